"""Functions for worker processes: spawned processes import them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from dlrm_hybrid.data.workers import Report, Workers
from dlrm_hybrid.types import DataError


def square(task: int, report: Report) -> int:
    report(task)
    return task * task


def wait_for_file(task: tuple[int, Path | None], report: Report) -> int:
    """Return when another task has made the file."""
    number, path = task
    deadline = time.monotonic() + 30
    while path is not None and not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return number


def make_file(task: Path, report: Report) -> int:
    task.touch()
    return 1


def fail(task: str, report: Report) -> None:
    if task == "data":
        raise DataError("seen in a worker")
    if task == "bug":
        raise ZeroDivisionError("a bug")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def hang(task: int, report: Report) -> None:
    report(os.getpid())
    signal.pause()


def dispatch(task: tuple[str, object], report: Report) -> object:
    name, argument = task
    return globals()[name](argument, report)


def main() -> None:
    """Keep two workers busy for ever; write their process ids."""

    def show(pid: int) -> None:
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()

    from worker_tasks import hang as task  # workers know no functions of __main__

    with Workers(2) as workers:
        list(workers.run(task, [0, 1], show, window=2, queued=1))


if __name__ == "__main__":
    main()
