"""The threads of one worker, which train at the same time, each on its own batches.

Batch n of a trainer belongs to thread n mod H in each of its workers: so each thread has its own
path through all stages, on which batches keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import final

import torch

from dlrm_hybrid.comm.mailbox import GivenUpError, SharedMailbox
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.step import StepMetrics, train_step
from dlrm_hybrid.parallel.worker import Worker, stage_inputs
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.types import Tick

ReadNext = Callable[[], Batch | None]
"""Reads the worker's next batch; None if none has arrived yet."""
Learned = Callable[[StepMetrics], None]
"""Called with the metrics of each batch, in order."""


@final
class Crew:
    """Worker threads that train together; use it in a `with`.

    Args:
        workers: one for each thread, with shared parameters and client.
        runner: runner of their programs.
        mailbox: mailbox of the runner.
        meter: counts the CPU time of the threads.

    Attributes:
        mailbox: mailbox of the runner.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        runner: ProcessRunner,
        mailbox: SharedMailbox,
        meter: RankMeter,
    ) -> None:
        self.mailbox = mailbox
        self._workers, self._runner, self._meter = workers, runner, meter
        # Each thread has its own OpenMP settings.
        settings = torch.get_num_threads()

        def begin() -> None:
            torch.set_num_threads(settings)
            meter.add_thread()

        self._pool = ThreadPoolExecutor(len(workers), initializer=begin)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._meter.drop_threads()
        self._pool.shutdown()

    def learn(self, first: int, read: ReadNext, learned: Learned) -> None:
        """Train on batches until all that have arrived are done.

        Args:
            first: number of the first batch.
            read: called by one thread at a time.
            learned: called by one thread at a time, while none is in `read`.

        Raises:
            DlrmError: the first error of a thread; the other threads have ended.
        """
        shares = Shares(first, len(self._workers), read, learned)
        futures = [
            self._pool.submit(self._work, thread, shares) for thread in range(1, len(self._workers))
        ]
        failures: list[Exception] = []
        for work in (partial(self._work, 0, shares), *(future.result for future in futures)):
            try:
                work()
            except Exception as error:
                failures.append(error)
        failures.sort(key=lambda error: isinstance(error, GivenUpError))  # causes before effects
        if failures:
            raise failures[0]

    def _work(self, thread: int, shares: Shares) -> None:
        worker = self._workers[thread]
        try:
            while (share := shares.next(thread)) is not None:
                number, batch = share
                program = train_step(worker, Tick(number), stage_inputs(worker, batch))
                shares.finish(number, self._runner.run(program))
        except BaseException:
            shares.stop()
            self.mailbox.give_up()
            raise


@final
class Shares:
    """Deals batches to threads, and reports finished ones in order.

    Args:
        first: number of the first batch; batch n belongs to thread n mod H.
        threads: number of threads, H.
        read: reads the next batch.
        learned: called with the metrics of each batch, in order.
    """

    def __init__(self, first: int, threads: int, read: ReadNext, learned: Learned) -> None:
        self._read, self._learned = read, learned
        self._ready = [deque[tuple[int, Batch]]() for _ in range(threads)]
        self._next, self._told = first, first
        self._finished: dict[int, StepMetrics] = {}
        self._turn = Condition()
        self._under_way = 0
        self._is_stopped = False

    def next(self, thread: int) -> tuple[int, Batch] | None:
        """Take the next batch of a thread with its number, which the thread will `finish`.

        Waits while others have batches under way, since more may arrive until these are done.

        Returns:
            None once all that arrived are done, or `stop` was called.
        """
        ready = self._ready[thread]
        with self._turn:
            while not self._is_stopped:
                if ready:
                    self._under_way += 1
                    return ready.popleft()
                if self._read_on():
                    continue
                if self._under_way or any(self._ready):
                    self._turn.wait()
                else:
                    self.stop()  # no thread may read on alone after this
            return None

    def finish(self, number: int, metrics: StepMetrics) -> None:
        """Record that a batch is done, and report those done in order."""
        with self._turn:
            self._under_way -= 1
            self._finished[number] = metrics
            while (batch_metrics := self._finished.pop(self._told, None)) is not None:
                self._told += 1
                self._learned(batch_metrics)

    def stop(self) -> None:
        """Stop dealing batches to the worker threads."""
        with self._turn:
            self._is_stopped = True
            self._turn.notify_all()

    def _read_on(self) -> bool:
        """Read the next batch, for whichever thread; False if there was none."""
        batch = self._read()
        if batch is None:
            return False
        self._ready[self._next % len(self._ready)].append((self._next, batch))
        self._next += 1
        self._turn.notify_all()
        return True
