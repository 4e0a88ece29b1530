"""Pipeline schedules, the section `schedule`: the ops of a stage in a tick, for an interpreter.

In every schedule a stage goes through the micro-batches in ascending order, forward and backward,
so gradients are summed in one order and all schedules give the same bits.

Legend: S stages, M micro-batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self, final

from typing_extensions import override

from dlrm_hybrid.bounds import Lag, Several
from dlrm_hybrid.record import Choice, Effect, key
from dlrm_hybrid.types import BatchNumber


class Op(NamedTuple):
    """Forward or backward of one micro-batch through one stage.

    Attributes:
        kind: F or B.
        microbatch: number in the batch, counted from 0.
        delay: the op is on the batch read `delay` ticks ago; it is left out in the first ticks,
            where no batch is that old, and after the last batch, where it would be a newer one.
    """

    kind: Literal["F", "B"]
    microbatch: int
    delay: int = 0


StageOps = Callable[[int, int, int], tuple[Op, ...]]
"""(stage, S, M) to the ops of that stage in every tick, in order."""


@final
@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ops of all stages, and the messages in flight between them after any number of ticks.

    Attributes:
        ops: in every tick, by stage.
        microbatches: M, number per batch.
    """

    ops: tuple[tuple[Op, ...], ...]
    microbatches: int

    @classmethod
    def of(cls, schedule: StageOps, stages: int, microbatches: int) -> Self:
        """The pipeline of a schedule."""
        ops = tuple(schedule(stage, stages, microbatches) for stage in range(stages))
        return cls(ops, microbatches)

    @property
    def most_in_flight(self) -> int:
        """Most batches in flight at once, and the ticks in which they finish."""
        return max(op.delay for ops in self.ops for op in ops)

    def delay(self, stage: int, kind: Literal["F", "B"], microbatch: int) -> int:
        """Ticks between reading a batch and one op of a stage."""
        (delay,) = (op.delay for op in self.ops[stage] if op[:2] == (kind, microbatch))
        return delay

    def done(
        self, stage: int, kind: Literal["F", "B"], microbatch: int, ticks: int, emptied: int = 0
    ) -> int:
        """Number of batches that have had one op of a stage, which takes them in order.

        Args:
            stage: index of the stage.
            kind: kind of the op.
            microbatch: micro-batch of the op.
            ticks: number of ticks in which a batch was read.
            emptied: number of ticks when the pipeline was last empty.
        """
        return max(emptied, ticks - self.delay(stage, kind, microbatch))

    def pushed(self, stage: int, ticks: int, emptied: int = 0) -> int:
        """Number of batches whose gradients a stage has pushed; see `done`."""
        return self.done(stage, "B", self.microbatches - 1, ticks, emptied)

    def underway(
        self, kind: Literal["F", "B"], sender: int, receiver: int, ticks: int, emptied: int = 0
    ) -> Iterator[tuple[BatchNumber, int]]:
        """Yield (batch, micro-batch) of messages that `receiver` has not received from `sender`."""
        for microbatch in range(self.microbatches):
            received = self.done(receiver, kind, microbatch, ticks, emptied)
            sent = self.done(sender, kind, microbatch, ticks, emptied)
            for batch in range(received, sent):
                yield BatchNumber(batch), microbatch


def fault_of(pipeline: Pipeline) -> str | None:
    """The reason why stages cannot work by these ops, tick after tick; None if they can.

    Channels keep messages that come early, and a stage waits for those to come.
    """
    stages, numbers = len(pipeline.ops), [*range(pipeline.microbatches)]
    for stage, ops in enumerate(pipeline.ops):
        for kind in ("F", "B"):
            order = [op.microbatch for op in ops if op.kind == kind]
            if order != numbers or any(op.delay < 0 for op in ops):
                return f"stage {stage} has {kind} of {order}, must be {numbers}, once and in order"
    ticks = range(pipeline.most_in_flight + 2)
    ahead = [
        [(op.kind, op.microbatch, tick - op.delay) for tick in ticks for op in ops]
        for ops in pipeline.ops
    ]
    due = [deque(op for op in ops if op[2] >= 0) for ops in ahead]
    done: set[tuple[int, str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(due):
            while ops:
                kind, *of = ops[0]
                before = stage - 1 if kind == "F" else stage + 1
                waits = 0 <= before < stages and (before, kind, *of) not in done
                if waits or (kind == "B" and (stage, "F", *of) not in done):
                    break
                done.add((stage, *ops.popleft()))
                moved = True
    stuck = [f"stage {stage} for {ops[0][0]}" for stage, ops in enumerate(due) if ops]
    return f"stages wait for each other: {', '.join(stuck)}" if stuck else None


class Schedule(Choice, effect=Effect.STATE):
    """The order in which batches and their parts pass through the stages."""

    microbatches: Several = 1
    delays: tuple[Lag, ...] = ()
    staleness: tuple[Lag, ...] = ()

    @abstractmethod
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        """The ops of a stage in every tick, in order: a schedule is a `StageOps`."""


@dataclass(frozen=True, kw_only=True)
class Sequential(Schedule):
    """A batch passes through all stages before the next one begins."""

    name: ClassVar[str] = "sequential"
    microbatches: Several = key(
        1,
        "number of parts a trainer's batch is split into for pipelining",
        only="parallel=hybrid",
    )

    @override
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        """One micro-batch at a time: backward to the first stage before the next one starts."""
        return tuple(Op(kind, part) for part in range(microbatches) for kind in ("F", "B"))


@final
@dataclass(frozen=True, kw_only=True)
class Gpipe(Sequential):
    """All micro-batches go forward, then all go backward (Huang et al., 2019)."""

    name: ClassVar[str] = "gpipe"

    @override
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        """All forwards, then all backwards (arXiv 1811.06965)."""
        return tuple(Op(kind, part) for kind in ("F", "B") for part in range(microbatches))


@final
@dataclass(frozen=True, kw_only=True)
class OneForwardOneBackward(Sequential):
    """Each stage alternates forward and backward once it is full (Narayanan et al., 2019)."""

    name: ClassVar[str] = "one_f_one_b"

    @override
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        """As fast as `Gpipe`, but stage s never holds more than S - s micro-batches (PipeDream)."""
        warmup = min(stages - 1 - stage, microbatches)
        ops = [Op("F", microbatch) for microbatch in range(warmup)]
        for microbatch in range(microbatches):
            if warmup + microbatch < microbatches:
                ops.append(Op("F", warmup + microbatch))
            ops.append(Op("B", microbatch))
        return tuple(ops)


@final
@dataclass(frozen=True, kw_only=True)
class Dsp(Schedule):
    """Diversely stale parameters: stages work on different batches at once; docs/pipelines.md.

    In each tick a stage does the forward of one batch and the backward of an older one. It
    recomputes its forward at backward, with the weights of that time, and updates them at once (Xu,
    Huo and Huang, CVPR 2020). Stages need no clock: each waits only for its input and its
    gradients, so the bits do not depend on timing. With delays p and staleness m, a gradient takes
    q ticks to the stage before: what p and the next stage's m leave of m.
    """

    name: ClassVar[str] = "dsp"
    delays: tuple[Lag, ...] = key(
        (1, 1, 0), "for each stage, steps from its forward of a batch to the next stage's"
    )
    staleness: tuple[Lag, ...] = key(
        (4, 2, 0), "for each stage, updates between its forward and its backward of a batch"
    )

    @override
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        """One forward and one backward a tick; for as many stages as delays, and whole batches."""
        forward = sum(self.delays[:stage])
        return (Op("F", 0, forward), Op("B", 0, forward + self.staleness[stage]))
