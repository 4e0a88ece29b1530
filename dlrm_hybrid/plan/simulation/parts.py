"""The parts of a planned worker: they take time and send frames where real ones compute.

`parallel.step.train_step` runs them as it runs a `parallel.worker.Worker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from typing_extensions import override

from dlrm_hybrid.comm.mailbox import Key, Receive, key_of
from dlrm_hybrid.model.spec import StagePart
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.schedule import Pipeline
from dlrm_hybrid.parallel.step import (
    StepBoundaries,
    StepClient,
    StepRate,
    StepResult,
    StepStage,
    StepTables,
)
from dlrm_hybrid.parallel.sync.policy import AtLeast, SyncPolicy
from dlrm_hybrid.plan.frames import Round
from dlrm_hybrid.plan.simulation.machine import Rank
from dlrm_hybrid.types import BatchNumber, Version
from dlrm_hybrid.wire.frame import Kind

FORWARD_SHARE = 0.36
"""Of the time of forward and backward together: one matrix product of three, and what is beside it.
Assumed; no benchmark measures it."""
TENSOR: Any = "a tensor"  # wherever there would be one


def frame_key(
    kind: Kind, sender: int, number: int, *, boundary: int = 0, round: int = 0, microbatch: int = 0
) -> Key:
    """What a frame is asked for by; see `comm.mailbox.Receive`."""
    asked = Receive(kind, sender, number, boundary=boundary, round=round, microbatch=microbatch)
    return key_of(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInputs:
    """A batch; `coming` has so many of those after it."""

    bags: Any = TENSOR
    coming: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class PlannedResult:
    """What a batch gives: rows are what is counted."""

    rows: int
    gradients: Any = TENSOR
    pooled_gradient_BFD: Any = TENSOR
    loss_sum: float = 0.0
    correct: int = 0


@final
@dataclass(slots=True, kw_only=True)
class PlannedStage(StepStage):
    """Takes the time of forward and backward.

    Attributes:
        rank: whose time.
        microbatches: of every batch.
        batch_rows: of every batch.
        seconds: of forward and backward of a micro-batch.
        pace: how many times as long they take in this step.
    """

    rank: Rank
    microbatches: int
    batch_rows: int
    seconds: float
    pace: float = 1.0
    _flying: set[BatchNumber] = field(default_factory=set[BatchNumber])
    _graphs: set[tuple[BatchNumber, int]] = field(default_factory=set[tuple[BatchNumber, int]])

    @override
    def __contains__(self, batch: BatchNumber) -> bool:
        return batch in self._flying

    @override
    def begin(self, batch: BatchNumber, inputs: Any) -> None:
        self._flying.add(batch)

    @override
    def take_rows(self, batch: BatchNumber, pooled_BFD: Any) -> None:
        pass

    @override
    def bags(self, batch: BatchNumber) -> Any:
        return TENSOR

    @override
    def rows(self, batch: BatchNumber) -> int:
        return self.batch_rows // self.microbatches

    @override
    def forward(self, batch: BatchNumber, microbatch: int, received_bN: Any) -> Any:
        self.rank.work(self.pace * self.seconds * FORWARD_SHARE)
        self._graphs.add((batch, microbatch))
        return TENSOR

    @override
    def backward(self, batch: BatchNumber, microbatch: int, received_bM: Any) -> Any:
        if (batch, microbatch) not in self._graphs:
            self.forward(batch, microbatch, received_bM)  # what entered was kept
        self._graphs.discard((batch, microbatch))
        self.rank.work(self.pace * self.seconds * (1 - FORWARD_SHARE))
        return TENSOR

    @override
    def drop_graphs(self) -> None:
        self._graphs.clear()

    @override
    def finish(self, batch: BatchNumber) -> StepResult:
        self._flying.remove(batch)
        return PlannedResult(self.batch_rows)


@dataclass(frozen=True, slots=True)
class CutCosts:
    """What a micro-batch costs at a cut.

    Attributes:
        forward_bytes: of the frame with activations.
        backward_bytes: of that with gradients.
        encode: CPU seconds of either.
        decode: CPU seconds of either.
    """

    forward_bytes: float
    backward_bytes: float
    encode: float
    decode: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBoundaries(StepBoundaries):
    """Frames to and from the neighbouring stages.

    Attributes:
        rank: of the worker.
        stage: its number.
        before: the cut before it; None in the first.
        after: the cut after it; None in the last.
    """

    rank: Rank
    stage: int
    before: CutCosts | None
    after: CutCosts | None

    @override
    def receive_activations(self, batch: BatchNumber, microbatch: int, rows: int) -> Program[Any]:
        if self.before is None:
            return None
        yield self._from(-1, Kind.ACTIVATION, batch, microbatch)
        self.rank.work(self.before.decode)
        return TENSOR

    @override
    def send_activations(self, left_bM: Any, batch: BatchNumber, microbatch: int) -> None:
        if self.after is not None:
            self.rank.work(self.after.encode)
            key = self._key(Kind.ACTIVATION, self.stage, batch, microbatch)
            self.rank.send(self.rank.rank + 1, key, self.after.forward_bytes)

    @override
    def receive_gradient(self, batch: BatchNumber, microbatch: int, rows: int) -> Program[Any]:
        if self.after is None:
            return None
        yield self._from(+1, Kind.ACTIVATION_GRADIENT, batch, microbatch)
        self.rank.work(self.after.decode)
        return TENSOR

    @override
    def send_gradient(self, gradient_bN: Any, batch: BatchNumber, microbatch: int) -> None:
        if self.before is not None:
            self.rank.work(self.before.encode)
            key = self._key(Kind.ACTIVATION_GRADIENT, self.stage - 1, batch, microbatch)
            self.rank.send(self.rank.rank - 1, key, self.before.backward_bytes)

    def _key(self, kind: Kind, boundary: int, batch: BatchNumber, microbatch: int) -> Key:
        return frame_key(kind, self.rank.rank, batch, boundary=boundary, microbatch=microbatch)

    def _from(self, side: int, kind: Kind, batch: BatchNumber, microbatch: int) -> Receive:
        boundary = self.stage if side > 0 else self.stage - 1
        sender = self.rank.rank + side
        return Receive(kind, sender, batch, boundary=boundary, microbatch=microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCosts:
    """What a push and a version cost a worker.

    Attributes:
        push_bytes: of the frame to each server, by rank; empty where there is none.
        encode: CPU seconds of a push, all frames.
        apply: CPU seconds to take a version of each server over, or to update own weights.
        rounds: before a push.
        trainers: that agree in them.
        collective_server: rank that reduces them.
    """

    push_bytes: Mapping[int, float]
    encode: float
    apply: float
    rounds: Sequence[Round] = ()
    trainers: int = 1
    collective_server: int = 0


@final
@dataclass(slots=True, kw_only=True)
class PlannedClient(StepClient):
    """Pushes gradients to servers, and takes over the versions that the policy asks for.

    Attributes:
        rank: of the worker.
        trainer: its number.
        policy: which version a push is computed with.
        costs: of a push and of a version.
        pushed: pushes so far.
    """

    rank: Rank
    trainer: int
    policy: SyncPolicy
    costs: ClientCosts
    pushed: int = 0
    _applied: dict[int, Version] = field(default_factory=dict[int, Version])

    @override
    def pull(self) -> Program[None]:
        needs = self.policy.needs(self.pushed)
        for owner in self.costs.push_bytes:
            applied = self._applied.setdefault(owner, Version(0))
            for version in range(applied + 1, needs.version + 1):
                yield Receive(Kind.PARAMETERS, owner, version)
                self._apply(owner, version)
            while isinstance(needs, AtLeast):
                version = self._applied[owner] + 1
                if (yield Receive(Kind.PARAMETERS, owner, version, waits=False)) is None:
                    break
                self._apply(owner, version)

    @override
    def push(self, gradients: Any) -> Program[None]:
        costs, rounds = self.costs, len(self.costs.rounds)
        if not costs.push_bytes:
            self.rank.work(costs.apply)
        for number, one in enumerate(costs.rounds):
            self.rank.work(costs.encode / (rounds + 1))
            is_leader = self.pushed % costs.trainers == self.trainer
            key = frame_key(Kind.CONTRIBUTION, self.rank.rank, self.pushed, round=number)
            size = one.leader_bytes if is_leader else one.other_bytes
            self.rank.send(costs.collective_server, key, size)
            yield Receive(Kind.RESULT, costs.collective_server, self.pushed, round=number)
        self.rank.work(costs.encode / (rounds + 1))
        for owner, size in costs.push_bytes.items():
            self.rank.send(owner, frame_key(Kind.PUSH, self.rank.rank, self.pushed), size)
        self.pushed += 1

    def _apply(self, owner: int, version: int) -> None:
        self.rank.work(self.costs.apply / len(self.costs.push_bytes))
        self._applied[owner] = Version(version)


@final
@dataclass(frozen=True, slots=True)
class NoRate(StepRate):
    """A learning rate that nobody learns with."""

    @override
    def lr(self, step: int) -> float:
        return 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """The parts of one worker; see `parallel.worker.Worker`."""

    part: StagePart
    pipeline: Pipeline
    stage: PlannedStage
    boundaries: PlannedBoundaries
    tables: StepTables | None
    client: PlannedClient
    embedding_schedule: StepRate = NoRate()
