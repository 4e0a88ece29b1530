"""What one worker does in a tick, as a generator of effects; see `parallel.effects`.

train step:
    look up the ids of the batch whose forward follows    (the stage with the interaction)
    pull the version of the weights that the next push is computed with
    forward and backward of the micro-batches, as the schedule says:
        forward:  receive activations, compute, send activations
        backward: receive a gradient, compute, send a gradient
    push the gradients of the weights, after rounds with the other trainers where the method has any
    update the tables                                     (the stage with the interaction)

The lookup comes first because it needs nothing from the servers: it overlaps their work.

What tensors are is not known here, and torch is not imported: `plan` runs the same step with costs
in place of tensors. So a new schedule can be simulated as soon as it can be trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlrm_hybrid.model.spec import StagePart
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.schedule import Pipeline
from dlrm_hybrid.types import BatchNumber, Tick


class Counted(Protocol):
    """Sums over rows that a loss was computed of."""

    @property
    def loss_sum(self) -> float:
        """Binary cross-entropy before the update, summed over the rows."""
        ...

    @property
    def correct(self) -> int:
        """Rows on the right side of one half."""
        ...

    @property
    def rows(self) -> int:
        """How many rows were counted."""
        ...


class StepResult(Counted, Protocol):
    """What a batch gives in one stage; see `stage.StageResult`."""

    @property
    def gradients(self) -> Any:
        """Of the weights."""
        ...

    @property
    def pooled_gradient_BFD(self) -> Any:  # noqa: N802
        """Of the pooled rows; None but where the interaction is."""
        ...


class StepInputs(Protocol):
    """A trainer's batch, or as much of it as a stage reads; see `stage.Inputs`."""

    @property
    def bags(self) -> Any:
        """Ids of the tables; not None where the interaction is."""
        ...

    @property
    def coming(self) -> Sequence[Any]:
        """`bags` of the batches after it, as far as the tables want to know them."""
        ...


class StepStage(Protocol):
    """Computes a stage of the model; see `stage.Stage`."""

    microbatches: int

    def begin(self, batch: BatchNumber, inputs: Any) -> None:
        """Take a batch in."""

    def __contains__(self, batch: BatchNumber) -> bool:
        """Whether a batch is in flight."""
        ...

    def bags(self, batch: BatchNumber) -> Any:
        """What a batch in flight looks up."""
        ...

    def take_rows(self, batch: BatchNumber, pooled_BFD: Any) -> None:
        """What a batch in flight has looked up, before its first forward."""

    def rows(self, batch: BatchNumber) -> int:
        """Rows of each micro-batch of a batch in flight."""
        ...

    def forward(self, batch: BatchNumber, microbatch: int, received_bN: Any) -> Any:
        """What leaves the stage; None from the last one."""
        ...

    def backward(self, batch: BatchNumber, microbatch: int, received_bM: Any) -> Any:
        """Gradient of what entered; None in the first stage."""
        ...

    def drop_graphs(self) -> None:
        """Forget what forward computed of batches in flight."""

    def finish(self, batch: BatchNumber) -> StepResult:
        """What a batch has given, after the backward of its last micro-batch."""
        ...


class StepBoundaries(Protocol):
    """The cuts before and after a stage; see `boundaries.Boundaries`."""

    def receive_activations(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Any | None]:
        """What enters the stage; None in the first one."""
        ...

    def send_activations(self, left_bM: Any, batch: BatchNumber, microbatch: int) -> None:
        """To the next stage; None to nobody."""

    def receive_gradient(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Any | None]:
        """Of what left the stage; None in the last one."""
        ...

    def send_gradient(self, gradient_bN: Any, batch: BatchNumber, microbatch: int) -> None:
        """To the stage before; None to nobody."""


class StepTables(Protocol):
    """A trainer's access to the tables; see `tables.base.Tables`."""

    def prefetch(self, batch: BatchNumber, bags: Any) -> None:
        """Ask for the rows of a batch."""

    def lookup(self, batch: BatchNumber, bags: Any, lr: float) -> Program[Any]:
        """Pooled rows of a batch."""
        ...

    def update(self, batch: BatchNumber, gradient_BFD: Any) -> Program[None]:
        """Update the rows that a batch looked up."""
        ...


class StepClient(Protocol):
    """How the weights of a stage follow the masters; see `dense.client.Client`."""

    def pull(self) -> Program[None]:
        """Bring the weights to a version that the next push may be computed with."""
        ...

    def push(self, gradients: Any) -> Program[None]:
        """Hand over the gradients of a batch."""
        ...


class StepRate(Protocol):
    """A learning rate over the steps."""

    def lr(self, step: int) -> float:
        """Of one step."""
        ...


class StepWorker(Protocol):
    """The parts of a worker that a step is made with; see `worker.Worker`."""

    @property
    def part(self) -> StagePart:
        """Which layers of the model it computes."""
        ...

    @property
    def pipeline(self) -> Pipeline:
        """The ops of all stages in every tick."""
        ...

    @property
    def stage(self) -> StepStage:
        """Computes."""
        ...

    @property
    def boundaries(self) -> StepBoundaries:
        """Its cuts to the neighbouring stages."""
        ...

    @property
    def tables(self) -> StepTables | None:
        """For its lookups; None where the interaction is not."""
        ...

    @property
    def embedding_schedule(self) -> StepRate:
        """Learning rate of the tables, by step."""
        ...

    @property
    def client(self) -> StepClient:
        """Of the weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What a training step measured; in every stage but the last the sums are 0.

    Attributes:
        loss_sum: binary cross-entropy before the update, summed over the rows.
        correct: rows on the right side of one half.
        rows: of the batches whose gradients were pushed, of most schedules one.
    """

    loss_sum: float = 0.0
    correct: int = 0
    rows: int = 0

    def plus(self, result: Counted) -> StepMetrics:
        """With one more batch, or those of another step."""
        return StepMetrics(
            loss_sum=self.loss_sum + result.loss_sum,
            correct=self.correct + result.correct,
            rows=self.rows + result.rows,
        )


def train_step(worker: StepWorker, tick: Tick, inputs: StepInputs | None) -> Program[StepMetrics]:
    """Do the ops of one tick, in which the batch of the same number is read.

    Batches that are not in flight are left out: those before the first that was read, and those
    after the last.

    Args:
        worker: does them.
        tick: its number.
        inputs: of the batch; None once all have been read.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
        DlrmError: a frame is not what it should be.
    """
    stage, boundaries, index = worker.stage, worker.boundaries, worker.part.index
    if inputs is not None:
        _read(worker, BatchNumber(tick), inputs)
    forward = BatchNumber(tick - worker.pipeline.delay(index, "F", 0))
    if worker.tables is not None and forward in stage:
        stage.take_rows(forward, (yield from look_up(worker, worker.tables, forward)))
    yield from worker.client.pull()
    metrics = StepMetrics()
    for kind, microbatch, delay in worker.pipeline.ops[index]:
        batch = BatchNumber(tick - delay)
        if batch not in stage:
            continue
        key = (batch, microbatch)
        if kind == "F":
            received_bN = yield from boundaries.receive_activations(*key, stage.rows(batch))
            left_bM = stage.forward(batch, microbatch, received_bN)
            boundaries.send_activations(left_bM, *key)
            continue
        received_bM = yield from boundaries.receive_gradient(*key, stage.rows(batch))
        entered_bN = stage.backward(batch, microbatch, received_bM)
        boundaries.send_gradient(entered_bN, *key)
        if microbatch == stage.microbatches - 1:
            result = yield from _finish(worker, batch)
            metrics = metrics.plus(result)
    stage.drop_graphs()
    return metrics


def drain(worker: StepWorker, ticks: int) -> Program[StepMetrics]:
    """After so many ticks, do the ops that are left of the batches in flight; none is read."""
    metrics = StepMetrics()
    for tick in range(ticks, ticks + worker.pipeline.most_in_flight):
        metrics = metrics.plus((yield from train_step(worker, Tick(tick), None)))
    return metrics


def _read(worker: StepWorker, batch: BatchNumber, inputs: StepInputs) -> None:
    """Take a batch in, and ask for its rows and those of the next ones where that helps."""
    worker.stage.begin(batch, inputs)
    if worker.tables is not None:
        assert inputs.bags is not None
        for number, bags in enumerate((inputs.bags, *inputs.coming), batch):
            worker.tables.prefetch(BatchNumber(number), bags)


def look_up(worker: StepWorker, tables: StepTables, batch: BatchNumber) -> Program[Any]:
    """Rows of the tables for a batch in flight."""
    lr = worker.embedding_schedule.lr(batch)
    return (yield from tables.lookup(batch, worker.stage.bags(batch), lr))


def _finish(worker: StepWorker, batch: BatchNumber) -> Program[StepResult]:
    """Push the gradients of a batch, and update its rows of the tables."""
    result = worker.stage.finish(batch)
    worker.stage.drop_graphs()  # of other batches: a local client updates the weights at once
    yield from worker.client.push(result.gradients)
    if worker.tables is not None:
        assert result.pooled_gradient_BFD is not None
        yield from worker.tables.update(batch, result.pooled_gradient_BFD)
    return result
