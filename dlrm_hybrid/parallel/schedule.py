"""Pipeline schedules as data: the ops of a stage in a tick, in order, for an interpreter.

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
        delay: the op is on the batch read so many ticks ago; left out in the first ticks where no
            batch is that old, and in those after the last batch where it would be a newer one.
    """

    kind: Literal["F", "B"]
    microbatch: int
    delay: int = 0


Schedule = Callable[[int, int, int], tuple[Op, ...]]
"""(stage, S, M) to the ops of that stage in every tick, in order."""


@final
@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ops of all stages, and what is in flight between them after so many ticks.

    Attributes:
        ops: in every tick, by stage.
        microbatches: M, number per batch.
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
        """Most batches in flight at once, and the ticks in which they finish."""
        return max(op.delay for ops in self.ops for op in ops)

    def delay(self, stage: int, kind: Literal["F", "B"], microbatch: int) -> int:
        """Ticks between reading a batch and one op of a stage."""
        (delay,) = (one.delay for one in self.ops[stage] if one[:2] == (kind, microbatch))
        return delay

    def done(
        self, stage: int, kind: Literal["F", "B"], microbatch: int, ticks: int, emptied: int = 0
    ) -> int:
        """Number of batches that have had one op of a stage, which takes them in order.

        Args:
            stage: index of the stage.
            kind: of the op.
            microbatch: of the op.
            ticks: in which a batch was read.
            emptied: number of them done when the pipeline was last empty.
        """
        return max(emptied, ticks - self.delay(stage, kind, microbatch))

    def pushed(self, stage: int, ticks: int, emptied: int = 0) -> int:
        """Number of batches whose gradients a stage has pushed; see `done`."""
        return self.done(stage, "B", self.microbatches - 1, ticks, emptied)

    def underway(
        self, kind: Literal["F", "B"], sender: int, receiver: int, ticks: int, emptied: int = 0
    ) -> Iterator[tuple[BatchNumber, int]]:
        """Yield (batch, micro-batch) of what `sender` has sent and `receiver` not yet received."""
        for microbatch in range(self.microbatches):
            received = self.done(receiver, kind, microbatch, ticks, emptied)
            sent = self.done(sender, kind, microbatch, ticks, emptied)
            for batch in range(received, sent):
                yield BatchNumber(batch), microbatch


def sequential(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """One micro-batch at a time: backward to the first stage before the next one starts."""
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
    """Alternate forward and backward once the pipe is full (Narayanan et al., 2019, PipeDream).

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

    A stage recomputes its forward at backward, with the weights of that time, and updates them at
    once (Xu, Huo and Huang, CVPR 2020). Stages need no clock: each waits only for its input and
    its gradients, so the bits do not depend on timing.

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
"""Schedules without parameters, by name."""
