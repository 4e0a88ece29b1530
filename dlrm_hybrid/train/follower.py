"""A follower: a worker that carries out the orders of its driver, and reports on each.

The driver is the leader of a run whose trainers do not wait for each other, or the program of a
world. An order is a frame of the kind DECISION whose values say what to `do`; a report is one of
the kind REPORT, whose number is that of the orders done. An order to learn names the positions of
its batches, or brings a batch along.

It takes the next batches before it is done with the last ones, where their orders have arrived. Its
threads, if it has several, train on them at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.parallel.messages import values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.train.asynchronous.crew import Crew
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame

LEARN = "learn"


class Order(NamedTuple):
    """An order: the values of its frame, and the frame, which may hold tensors."""

    values: Mapping[str, Any]
    frame: Frame


class Answer(NamedTuple):
    """What a worker reports when it has done an order."""

    metrics: StepMetrics = StepMetrics()
    value: Any = None
    tensors: Mapping[str, Tensor] = {}  # noqa: RUF012 - nobody writes to it


class Due(NamedTuple):
    """A batch to train on, and whether it is the last of its order."""

    batch: Batch
    is_last: bool


Act = Callable[[Order], Answer | None]
"""Carries out an order; None if it was the last one."""


class Link(Protocol):
    """A worker's end of the link to its driver, and what it does for it."""

    def acts(self) -> Mapping[str, Act]:
        """What the worker does beside training, by name."""
        ...

    def read(self, order: Order) -> Iterator[Due]:
        """Read the batches of an order to train."""
        ...

    def take(self) -> Frame:
        """Wait for the next order."""
        ...

    def take_now(self) -> Frame | None:
        """The next order if it has arrived."""
        ...

    def report(self, done: int, answer: Answer) -> None:
        """Report that so many orders are done, and the answer to the last one."""
        ...


@final
@dataclass(slots=True, kw_only=True)
class Follower:
    """A worker that its driver keeps busy.

    Attributes:
        rank: the worker.
        link: to its driver.
        meter: that of the process.
        ahead: number of batches whose rows are prefetched from the tables.
        crew: its threads; None if it has one.
    """

    rank: WorkerRank
    link: Link
    meter: RankMeter
    ahead: int = 0
    crew: Crew | None = None
    _reading: Iterator[Due] = field(default_factory=lambda: iter(()))
    _ends: deque[bool] = field(default_factory=deque[bool])
    _metrics: StepMetrics = StepMetrics()
    _done: int = 0
    _held: Order | None = None

    def run(self) -> None:
        """Carry out orders until an act was the last one; raises what acts raise."""
        acts = self.link.acts()
        self.link.report(0, Answer())
        while True:
            order = self._order()
            do = order.values["do"]
            if do == LEARN:
                self._learn(order)
                continue
            if do not in acts:
                raise DlrmError(f"rank {self.rank.messenger.rank}: told to do {do!r}")
            answer = acts[do](order)
            if answer is None:
                return
            self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        self._done += 1
        self.link.report(self._done, answer)

    def _learn(self, order: Order) -> None:
        """Train on these batches, and on those of orders that arrive meanwhile.

        Rows are prefetched across the ends of orders as long as batches are there.
        """
        rank, window = self.rank, deque[Batch]()
        self._reading = self.link.read(order)
        if self.crew is not None:
            self.crew.learn(rank.step, self._next_batch, self._learned_by_thread)
            return
        while True:
            while len(window) <= self.ahead and (batch := self._next_batch()) is not None:
                window.append(batch)
            if not window:
                return
            batch = window.popleft()
            self._learned(rank.learn(batch, [*window]))

    def _next_batch(self) -> Batch | None:
        """Read the next batch of the orders that have arrived."""
        while (due := next(self._reading, None)) is None:
            come = self._next_lease()
            if come is None:
                return None
            self._reading = self.link.read(come)
        self._ends.append(due.is_last)
        return due.batch

    def _learned_by_thread(self, metrics: StepMetrics) -> None:
        self.rank.step += 1
        self._learned(metrics)

    def _learned(self, metrics: StepMetrics) -> None:
        """Report if the order of the batch read first is done."""
        self.meter.step_done()
        self._metrics = self._metrics.plus(metrics)
        if self._ends.popleft():
            metrics, self._metrics = self._metrics, StepMetrics()
            self._finish(Answer(metrics))

    def _order(self) -> Order:
        """Wait for the next order."""
        order, self._held = self._held, None
        return order or _order_in(self.link.take())

    def _next_lease(self) -> Order | None:
        """The next order if it has arrived and is to train."""
        if self._held is None:
            frame = self.link.take_now()
            if frame is None:
                return None
            self._held = _order_in(frame)
        return self._order() if self._held.values["do"] == LEARN else None


def _order_in(frame: Frame) -> Order:
    return Order(values_of(frame), frame)
