"""Worker processes that die with their parent and whose death is noticed.

The kernel ends them, also where they have been stopped: they ask for it before their program is
loaded. Each is a process group of its own, so that what a terminal sends reaches only their parent.
Processes of multiprocessing would bring a resource tracker, which outlives a parent that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from dlrm_hybrid.process import masked, tie_to
from dlrm_hybrid.types import DlrmError, ResourceError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]  # rows finished since the last call
_JOIN_SECONDS = 10
_PROGRAM = "from dlrm_hybrid.data.workers import serve; serve({descriptor})"


def serve(descriptor: int) -> None:
    """Body of a worker: tasks in, reports and results out, until the parent hangs up."""
    connection = Connection(descriptor)

    def report(rows: int) -> None:
        connection.send(("report", None, rows))

    while True:
        try:
            function, index, task = connection.recv()
        except EOFError:
            return
        try:
            result = function(task, report)
            connection.send(("result", index, result))
        except (DlrmError, OSError) as error:
            connection.send(("error", index, error))
        except Exception:
            text = f"internal error in a worker:\n{traceback.format_exc()}"
            connection.send(("error", index, DlrmError(text)))


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    queued: int = 0


@dataclass(slots=True)
class _Run:
    """One pass over tasks: what was drawn, what came back."""

    results: dict[int, Any] = field(default_factory=dict[int, Any])
    drawn: int = 0
    yielded: int = 0
    exhausted: bool = False
    failure: Exception | None = None

    def draw(self, tasks: Iterator[Task]) -> tuple[int, Task] | None:
        """The next task; an error of the iterator itself waits until all before it is done."""
        try:
            task = next(tasks)
        except StopIteration:
            self.exhausted = True
            return None
        except Exception as error:
            self.exhausted = True
            self.failure = error
            return None
        self.drawn += 1
        return self.drawn - 1, task


class Workers:
    """`processes` processes; with one, tasks run in the caller's own. Of no use after an error."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._workers: list[_Worker] = []
        try:
            for _ in range(processes if processes > 1 else 0):
                self._workers.append(_start())
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait(_JOIN_SECONDS)
            worker.connection.close()

    def run(
        self,
        function: Callable[[Task, Report], Result],
        tasks: Iterable[Task],
        report: Report,
        *,
        window: int,
        queued: int,
    ) -> Iterator[Result]:
        """Yield `function(task, report)` for every task, in the order of the tasks.

        Args:
            function: a function of a module; called in a worker.
            tasks: drawn lazily: task i only after result i - `window` was yielded.
            report: called here with what `function` reports there.
            window: tasks drawn and not yet yielded, at most.
            queued: tasks given to one worker at a time; 2 keeps it busy while we read.

        Raises:
            ResourceError: a worker was killed.
            Exception: what `function` raised, at once; what `tasks` raised, after the results of
                all tasks before.
        """
        iterator = iter(tasks)
        if not self._workers:
            for task in iterator:
                yield function(task, report)
            return
        run = _Run()
        while not run.exhausted or run.yielded < run.drawn:
            self._feed(run, function, iterator, window, queued)
            while run.yielded in run.results:
                result = run.results.pop(run.yielded)
                run.yielded += 1
                yield result
            if run.yielded < run.drawn and run.yielded not in run.results:
                self._receive(run, report)
        if run.failure is not None:
            raise run.failure

    def _feed(
        self,
        run: _Run,
        function: Callable[[Task, Report], Result],
        tasks: Iterator[Task],
        window: int,
        queued: int,
    ) -> None:
        idle = deque(sorted(self._workers, key=lambda worker: worker.queued))
        while idle and not run.exhausted and run.drawn - run.yielded < window:
            worker = idle.popleft()
            if worker.queued >= queued:
                continue
            drawn = run.draw(tasks)
            if drawn is None:
                return
            try:
                worker.connection.send((function, *drawn))
            except OSError:
                raise _lost(worker) from None
            worker.queued += 1
            idle.append(worker)

    def _receive(self, run: _Run, report: Report) -> None:
        """Wait for at least one message or death."""
        by_handle = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_handle)):
            worker = by_handle[connection]  # type: ignore[index]
            try:
                kind, index, value = worker.connection.recv()
            except (EOFError, OSError):
                raise _lost(worker) from None
            if kind == "report":
                report(value)
                continue
            worker.queued -= 1
            if kind == "error":
                raise value
            run.results[index] = value


def _start() -> _Worker:
    ours, theirs = Pipe()
    program = _PROGRAM.format(descriptor=theirs.fileno())
    # Tasks name functions of modules that only this process may know how to find.
    path = os.pathsep.join(folder or os.curdir for folder in sys.path)
    with theirs, masked():  # with it open the end of the worker would not end the connection
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
                preexec_fn=tie_to(os.getpid()),
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            ours.close()
            raise ResourceError(
                f"cannot start a worker process: {error.strerror}; try data.processes=1"
            ) from error
    return _Worker(process, ours)


def _lost(worker: _Worker) -> ResourceError:
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(_JOIN_SECONDS)
    code = worker.process.returncode
    if code is not None and code < 0:
        return ResourceError(
            f"worker process {worker.process.pid} was killed by signal {-code}; too little memory "
            "is the usual reason: try a smaller data.processes"
        )
    return ResourceError(f"worker process {worker.process.pid} ended with code {code}")
