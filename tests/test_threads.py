from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.threads import Report, Threads
from dlrm_hybrid.types import DataError


def ignore(rows: int) -> None:
    pass


def name() -> str:
    return threading.current_thread().name


def square(task: int, report: Report) -> int:
    report(task)
    return task * task


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_results_come_in_order_and_tasks_are_drawn_lazily(count: int, window: int) -> None:
    drawn = 0
    reported: list[int] = []

    def tasks() -> Iterator[int]:
        nonlocal drawn
        for task in range(20):
            drawn += 1
            yield task

    with Threads(count) as threads:
        results = threads.run(square, tasks(), reported.append, window=window)
        for number, result in enumerate(results, start=1):
            assert result == (number - 1) ** 2
            assert drawn - number < window
    assert drawn == 20
    assert sorted(reported) == list(range(1, 20))


def test_a_slow_task_does_not_hold_the_others_back() -> None:
    made = threading.Event()

    def wait_or_make(task: int, report: Report) -> int:
        if task == 0:
            assert made.wait(HANG_SECONDS)
        if task == 2:
            made.set()
        return task

    with Threads(2) as threads:
        assert list(threads.run(wait_or_make, range(3), ignore, window=3)) == [0, 1, 2]


def test_reports_come_in_the_callers_thread() -> None:
    reporters: list[str] = []
    with Threads(2) as threads:
        for _ in threads.run(square, range(9), lambda _: reporters.append(name()), window=9):
            pass
    assert set(reporters) == {name()}


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_tasks_waits_for_the_results_before(count: int) -> None:
    def tasks() -> Iterator[int]:
        yield from range(4)
        raise DataError("the file is cut")

    seen: list[int] = []
    with Threads(count) as threads, pytest.raises(DataError, match="the file is cut"):
        for result in threads.run(square, tasks(), ignore, window=9):
            seen.append(result)
    assert seen == [0, 1, 4, 9]


def test_the_error_of_one_task_ends_the_others() -> None:
    started = threading.Event()

    def fail_or_go_on(task: int, report: Report) -> None:
        if task == 0:
            assert started.wait(HANG_SECONDS)
            raise DataError("seen in a thread")
        started.set()
        while True:
            report(1)

    with pytest.raises(DataError, match="seen in a thread"), Threads(2) as threads:
        list(threads.run(fail_or_go_on, range(9), ignore, window=9))
