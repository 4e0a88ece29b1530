from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import worker_tasks
from criteo_rows import worker_processes

from dlrm_hybrid.data.workers import Workers
from dlrm_hybrid.types import DataError, DlrmError, ResourceError


def ignore(rows: int) -> None:
    pass


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_results_come_in_order_and_tasks_are_drawn_lazily(processes: int, window: int) -> None:
    drawn = 0
    reported: list[int] = []

    def tasks() -> Iterator[int]:
        nonlocal drawn
        for task in range(20):
            drawn += 1
            yield task

    with Workers(processes) as workers:
        results = workers.run(
            worker_tasks.square, tasks(), reported.append, window=window, queued=2
        )
        for count, result in enumerate(results, start=1):
            assert result == (count - 1) ** 2
            assert drawn - count < window
    assert drawn == 20
    assert sorted(reported) == list(range(20))


def test_a_slow_task_does_not_hold_the_others_back(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    tasks = [("wait_for_file", (0, flag)), ("square", 5), ("make_file", flag)]
    with Workers(2) as workers:
        results = workers.run(worker_tasks.dispatch, tasks, ignore, window=3, queued=1)
        assert list(results) == [0, 25, 1]


def test_the_error_of_a_task_is_raised_here() -> None:
    with Workers(2) as workers, pytest.raises(DataError, match="seen in a worker"):
        list(workers.run(worker_tasks.fail, ["", "data"], ignore, window=9, queued=1))


def test_a_bug_in_a_task_shows_its_traceback() -> None:
    with Workers(2) as workers, pytest.raises(DlrmError, match=r"(?s)Traceback.*ZeroDivisionError"):
        list(workers.run(worker_tasks.fail, ["bug"], ignore, window=9, queued=1))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_the_tasks_waits_for_the_results_before(processes: int) -> None:
    def tasks() -> Iterator[int]:
        yield from range(4)
        raise DataError("the file is cut")

    seen: list[int] = []
    with Workers(processes) as workers, pytest.raises(DataError, match="the file is cut"):
        for result in workers.run(worker_tasks.square, tasks(), ignore, window=9, queued=2):
            seen.append(result)
    assert seen == [0, 1, 4, 9]


def test_a_killed_worker_is_an_error_and_all_end() -> None:
    with pytest.raises(ResourceError, match="was killed by signal 9"), Workers(2) as workers:
        list(workers.run(worker_tasks.fail, ["", "killed", ""], ignore, window=9, queued=1))
    assert worker_processes() == []
