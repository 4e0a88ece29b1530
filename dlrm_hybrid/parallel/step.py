"""The ops of one worker in a tick, as a generator of effects; see `parallel.effects`.

train step:
    look up the ids of the batch whose forward follows    (the stage with the interaction)
    pull the version of the weights that the next push is computed with
    forward and backward of the micro-batches, as the schedule says:
        forward:  receive activations, compute, send activations
        backward: receive a gradient, compute, send a gradient
    push the gradients of the weights, after rounds with the other trainers where the method has any
    update the tables                                     (the stage with the interaction)

The lookup comes first because it needs nothing from the servers: it overlaps their work.

Tensors are opaque here, and torch is not imported: `plan` runs the same step with costs in place
of tensors, so a new schedule can be simulated as soon as it can be trained with.
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
    """Sums over the rows of a loss."""

    @property
    def loss_sum(self) -> float:
        """Binary cross-entropy before the update, summed over the rows."""
        ...

    @property
    def correct(self) -> int:
        """Number of rows on the right side of one half."""
        ...

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...


class StepResult(Counted, Protocol):
    """Results of one batch in one stage; see `stage.StageResult`."""

    @property
    def gradients(self) -> Any:
        """Gradients of the weights."""
        ...

    @property
    def pooled_gradient_BFD(self) -> Any:  # noqa: N802
        """Gradient of the pooled rows; None at a stage without the interaction."""
        ...


class StepInputs(Protocol):
    """A trainer's batch, or as much of it as a stage reads; see `stage.Inputs`."""

    @property
    def bags(self) -> Any:
        """Ids of the tables; not None at the stage with the interaction."""
        ...

    @property
    def coming(self) -> Sequence[Any]:
        """`bags` of the batches after it, as far as the tables look ahead."""
        ...


class StepStage(Protocol):
    """Computes a stage of the model; see `stage.Stage`."""

    microbatches: int

    def begin(self, batch: BatchNumber, inputs: Any) -> None:
        """Take a batch into flight."""

    def __contains__(self, batch: BatchNumber) -> bool:
        """Whether a batch is in flight."""
        ...

    def bags(self, batch: BatchNumber) -> Any:
        """The ids that a batch in flight looks up."""
        ...

    def take_rows(self, batch: BatchNumber, pooled_BFD: Any) -> None:
        """Set the pooled rows of a batch in flight, before its first forward."""

    def rows(self, batch: BatchNumber) -> int:
        """Rows of each micro-batch of a batch in flight."""
        ...

    def forward(self, batch: BatchNumber, microbatch: int, received_bN: Any) -> Any:
        """Compute the stage's output; None from the last stage."""
        ...

    def backward(self, batch: BatchNumber, microbatch: int, received_bM: Any) -> Any:
        """Compute the gradient of the stage's input; None in the first stage."""
        ...

    def drop_graphs(self) -> None:
        """Drop the autograd graphs of batches in flight."""

    def finish(self, batch: BatchNumber) -> StepResult:
        """Remove a batch after the backward of its last micro-batch; returns its results."""
        ...


class StepBoundaries(Protocol):
    """The boundaries before and after a stage; see `boundaries.Boundaries`."""

    def receive_activations(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Any | None]:
        """Receive the stage's input; None at the first stage."""
        ...

    def send_activations(self, left_bM: Any, batch: BatchNumber, microbatch: int) -> None:
        """Send the stage's output to the next stage; None sends nothing."""

    def receive_gradient(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Any | None]:
        """Receive the gradient of the stage's output; None at the last stage."""
        ...

    def send_gradient(self, gradient_bN: Any, batch: BatchNumber, microbatch: int) -> None:
        """Send the gradient of the stage's input to the stage before; None sends nothing."""


class StepTables(Protocol):
    """A trainer's access to the tables; see `tables.base.Tables`."""

    def prefetch(self, batch: BatchNumber, bags: Any) -> None:
        """Request the rows of a batch."""

    def lookup(self, batch: BatchNumber, bags: Any, lr: float) -> Program[Any]:
        """Look up the pooled rows of a batch."""
        ...

    def update(self, batch: BatchNumber, gradient_BFD: Any) -> Program[None]:
        """Update the rows that a batch looked up."""
        ...


class StepClient(Protocol):
    """Keeps a stage's weights in step with the masters; see `dense.client.Client`."""

    def pull(self) -> Program[None]:
        """Bring the weights to a version that the next push may be computed with."""
        ...

    def push(self, gradients: Any) -> Program[None]:
        """Hand over the gradients of a batch."""
        ...


class StepRate(Protocol):
    """A learning rate over the steps."""

    def lr(self, step: int) -> float:
        """The learning rate of one step."""
        ...


class StepWorker(Protocol):
    """The parts of a worker that a step is made with; see `worker.Worker`."""

    @property
    def part(self) -> StagePart:
        """The layers of the model that it computes."""
        ...

    @property
    def pipeline(self) -> Pipeline:
        """The ops of all stages in every tick."""
        ...

    @property
    def stage(self) -> StepStage:
        """The stage's computation and batches in flight."""
        ...

    @property
    def boundaries(self) -> StepBoundaries:
        """The boundaries to the neighbouring stages."""
        ...

    @property
    def tables(self) -> StepTables | None:
        """Access to the tables; None at a stage without the interaction."""
        ...

    @property
    def embedding_schedule(self) -> StepRate:
        """Learning rate of the tables, by step."""
        ...

    @property
    def client(self) -> StepClient:
        """Pulls the stage's weights and pushes their gradients."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Sums over the rows of a training step; 0 in every stage but the last.

    Attributes:
        loss_sum: binary cross-entropy before the update, summed over the rows.
        correct: rows on the right side of one half.
        rows: those of the batches whose gradients were pushed, mostly one batch.
    """

    loss_sum: float = 0.0
    correct: int = 0
    rows: int = 0

    def plus(self, result: Counted) -> StepMetrics:
        """The sums with another batch or step added."""
        return StepMetrics(
            loss_sum=self.loss_sum + result.loss_sum,
            correct=self.correct + result.correct,
            rows=self.rows + result.rows,
        )


def train_step(worker: StepWorker, tick: Tick, inputs: StepInputs | None) -> Program[StepMetrics]:
    """Run the ops of one tick, in which the batch of the same number is read.

    Ops on batches that are not in flight are left out: before the first batch and after the last.

    Args:
        worker: the one that computes.
        tick: its number.
        inputs: the batch; None once all have been read.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
        DlrmError: a frame is not the expected one.
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
    """Finish the batches in flight after so many ticks; reads no more."""
    metrics = StepMetrics()
    for tick in range(ticks, ticks + worker.pipeline.most_in_flight):
        metrics = metrics.plus((yield from train_step(worker, Tick(tick), None)))
    return metrics


def _read(worker: StepWorker, batch: BatchNumber, inputs: StepInputs) -> None:
    """Take a batch into flight, and prefetch its rows and those of the batches coming."""
    worker.stage.begin(batch, inputs)
    if worker.tables is not None:
        assert inputs.bags is not None
        for number, bags in enumerate((inputs.bags, *inputs.coming), batch):
            worker.tables.prefetch(BatchNumber(number), bags)


def look_up(worker: StepWorker, tables: StepTables, batch: BatchNumber) -> Program[Any]:
    """Look up the pooled rows of a batch in flight."""
    lr = worker.embedding_schedule.lr(batch)
    return (yield from tables.lookup(batch, worker.stage.bags(batch), lr))


def _finish(worker: StepWorker, batch: BatchNumber) -> Program[StepResult]:
    """Push the gradients of a batch, and update the rows it looked up."""
    result = worker.stage.finish(batch)
    worker.stage.drop_graphs()  # of other batches: a local client updates the weights at once
    yield from worker.client.push(result.gradients)
    if worker.tables is not None:
        assert result.pooled_gradient_BFD is not None
        yield from worker.tables.update(batch, result.pooled_gradient_BFD)
    return result
