"""A thread pool for code that releases the interpreter lock; free of torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar, final

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""A task calls it with the number of rows finished since its last call."""


@final
class Threads:
    """A pool of threads whose results come in the order of the tasks; use it in a `with`.

    Args:
        count: threads, so tasks that run at a time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count)
        self._reported: SimpleQueue[int] = SimpleQueue()
        self._is_ending = False

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        function: Callable[[Task, Report], Result],
        tasks: Iterable[Task],
        report: Report,
        *,
        window: int,
    ) -> Iterator[Result]:
        """Yield `function(task, report)` for every task, in the order of the tasks.

        Args:
            function: called in a thread; after an error or a signal elsewhere, its next report
                ends it.
            tasks: drawn lazily: task i only after result i - `window` was yielded.
            report: called in this thread with what `function` reports.
            window: tasks drawn and not yet yielded, at most.

        Raises:
            Exception: what `function` raised; what `tasks` raised, after the results of all tasks
                before.
        """
        source = iter(tasks)
        pending: deque[Future[Result]] = deque()
        failure: Exception | None = None
        is_exhausted = False
        while not is_exhausted or pending:
            while not is_exhausted and len(pending) < window:
                try:
                    pending.append(self._submit(function, next(source)))
                except StopIteration:
                    is_exhausted = True
                except Exception as error:
                    is_exhausted, failure = True, error
            if pending:
                self._wait(pending[0], report)
                yield pending.popleft().result()
        if failure is not None:
            raise failure

    def _submit(self, function: Callable[[Task, Report], Result], task: Task) -> Future[Result]:
        future = self._pool.submit(function, task, self._report)
        future.add_done_callback(lambda _: self._reported.put(0))
        return future

    def _report(self, rows: int) -> None:
        if self._is_ending:
            raise InterruptedError("another task has failed")
        self._reported.put(rows)

    def _wait(self, future: Future[Result], report: Report) -> None:
        """Pass reports on until a task is done, so that its last ones come before its result."""
        while not future.done():
            self._pass_on(report)
        for _ in range(self._reported.qsize()):  # no more: other tasks may report without end
            self._pass_on(report)

    def _pass_on(self, report: Report) -> None:
        if rows := self._reported.get():
            report(rows)
