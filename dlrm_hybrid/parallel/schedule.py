"""Schedules of a pipeline as data: the ops of a stage in a tick, in order; an interpreter runs it.

In every schedule a stage goes through the micro-batches in ascending order, forward and backward,
so gradients are summed in one order and all schedules give the same bits.

Legend: S stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Self, final

from dlrm_hybrid.types import BatchNumber


class Op(NamedTuple):
    """Forward or backward of one micro-batch through one stage.

    Attributes:
        kind: F or B.
        microbatch: of a batch, counted from 0.
        delay: of the batch that was read so many ticks ago; the first ticks leave out what would
            come before the first batch, those after the last one what would come behind it.
    """

    kind: Literal["F", "B"]
    microbatch: int
    delay: int = 0


Schedule = Callable[[int, int, int], tuple[Op, ...]]
"""(stage, S, M) to the ops of that stage in every tick, in order."""


@final
@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ops of all stages, and what is between them after so many ticks.

    Attributes:
        ops: in every tick, by stage.
        microbatches: M of every batch.
    """

    ops: tuple[tuple[Op, ...], ...]
    microbatches: int

    @classmethod
    def of(cls, schedule: Schedule, stages: int, microbatches: int) -> Self:
        """The pipeline of a schedule."""
        ops = tuple(schedule(stage, stages, microbatches) for stage in range(stages))
        return cls(ops, microbatches)

    @property
    def most_in_flight(self) -> int:
        """Batches that may be on their way, and the ticks in which these come to their end."""
        return max(op.delay for ops in self.ops for op in ops)

    def delay(self, stage: int, kind: Literal["F", "B"], microbatch: int) -> int:
        """Ticks between reading a batch and one op of a stage."""
        (delay,) = (one.delay for one in self.ops[stage] if one[:2] == (kind, microbatch))
        return delay

    def done(
        self, stage: int, kind: Literal["F", "B"], microbatch: int, ticks: int, emptied: int = 0
    ) -> int:
        """Batches that have had one op of a stage; it goes through them in their order.

        Args:
            stage: that goes through them.
            kind: of the op.
            microbatch: of the op.
            ticks: in which a batch was read.
            emptied: how many of them were done when last nothing was in flight.
        """
        return max(emptied, ticks - self.delay(stage, kind, microbatch))

    def pushed(self, stage: int, ticks: int, emptied: int = 0) -> int:
        """Batches whose gradients a stage has pushed; see `done`."""
        return self.done(stage, "B", self.microbatches - 1, ticks, emptied)

    def underway(
        self, kind: Literal["F", "B"], sender: int, receiver: int, ticks: int, emptied: int = 0
    ) -> Iterator[tuple[BatchNumber, int]]:
        """Batch and micro-batch of what one stage has sent and the other has not yet asked for."""
        for microbatch in range(self.microbatches):
            received = self.done(receiver, kind, microbatch, ticks, emptied)
            sent = self.done(sender, kind, microbatch, ticks, emptied)
            for batch in range(received, sent):
                yield BatchNumber(batch), microbatch


def sequential(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """One micro-batch at a time: back to the first stage before the next one starts."""
    return tuple(
        op
        for microbatch in range(microbatches)
        for op in (Op("F", microbatch), Op("B", microbatch))
    )


def gpipe(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """All forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965)."""
    forwards = tuple(Op("F", microbatch) for microbatch in range(microbatches))
    return forwards + tuple(Op("B", microbatch) for microbatch in range(microbatches))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """Forward and backward in turns once the pipe is full (Narayanan et al., 2019, PipeDream).

    As fast as `gpipe`, but stage s never holds more than S - s micro-batches.
    """
    warmup = min(stages - 1 - stage, microbatches)
    ops = [Op("F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            ops.append(Op("F", warmup + microbatch))
        ops.append(Op("B", microbatch))
    return tuple(ops)


@final
@dataclass(frozen=True, slots=True)
class DiverselyStale:
    """DSP: in each tick a stage does the forward of one batch and the backward of an older one.

    Every stage computes backward again from what entered, with the weights there are then, and
    learns at once (Xu, Huo and Huang, CVPR 2020). Nobody needs a clock: a stage waits for what
    enters and for gradients, and for nothing else, so the bits are those of any timing.

    Attributes:
        delays: p, ticks from a stage's forward of a batch to that of the next stage; 0 at the end.
        staleness: m, updates of a stage between forward and backward of a batch; 0 at the end.
            What p and the next stage's m leave of it is q, the ticks of a gradient.
    """

    delays: tuple[int, ...]
    staleness: tuple[int, ...]

    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        """A `Schedule` for as many stages as there are delays, and batches in one part."""
        forward = sum(self.delays[:stage])
        return (Op("F", 0, forward), Op("B", 0, forward + self.staleness[stage]))


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"sequential": sequential, "gpipe": gpipe, "one_f_one_b": one_f_one_b}
)
"""Those that need no more than their name."""
