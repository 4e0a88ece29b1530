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

Tensors are opaque here, and torch is not imported: `plan` runs the same step with a worker that has
costs in place of tensors, so a new schedule can be simulated as soon as it can be trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.types import BatchNumber, Tick

if TYPE_CHECKING:
    from dlrm_hybrid.parallel.stage import Inputs, StageResult
    from dlrm_hybrid.parallel.tables.base import Tables
    from dlrm_hybrid.parallel.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Sums over the rows of a training step; 0 in every stage but the last.

    Attributes:
        loss_sum: binary cross-entropy before the update, summed over the rows, and over several
            labels with their weights.
        correct: rows on the right side of one half, by the first label.
        rows: rows of the batches whose gradients were pushed, mostly one batch.
    """

    loss_sum: float = 0.0
    correct: int = 0
    rows: int = 0

    def plus(self, result: StageResult | StepMetrics) -> StepMetrics:
        """The sums with another batch or step added."""
        return StepMetrics(
            loss_sum=self.loss_sum + result.loss_sum,
            correct=self.correct + result.correct,
            rows=self.rows + result.rows,
        )


def train_step(worker: Worker, tick: Tick, inputs: Inputs | None) -> Program[StepMetrics]:
    """Run the ops of one tick, in which the batch of the same number is read.

    Ops on batches that are not in flight are left out: before the first batch and after the last.

    Args:
        worker: the worker that computes.
        tick: number of the tick.
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


def drain(worker: Worker, ticks: int) -> Program[StepMetrics]:
    """Finish the batches in flight after `ticks` ticks; reads no more."""
    metrics = StepMetrics()
    for tick in range(ticks, ticks + worker.pipeline.most_in_flight):
        metrics = metrics.plus((yield from train_step(worker, Tick(tick), None)))
    return metrics


def _read(worker: Worker, batch: BatchNumber, inputs: Inputs) -> None:
    """Take a batch into flight, and prefetch its rows and those of the batches coming."""
    worker.stage.begin(batch, inputs)
    if worker.tables is not None:
        assert inputs.bags is not None
        for number, bags in enumerate((inputs.bags, *inputs.coming), batch):
            worker.tables.prefetch(BatchNumber(number), worker.columns.by_table(bags))


def look_up(worker: Worker, tables: Tables, batch: BatchNumber) -> Program[Any]:
    """Look up the pooled rows of a batch in flight."""
    lr = worker.embedding_schedule.lr(batch)
    bags = worker.columns.by_table(worker.stage.bags(batch))
    return worker.columns.by_column((yield from tables.lookup(batch, bags, lr)))


def _finish(worker: Worker, batch: BatchNumber) -> Program[StageResult]:
    """Push the gradients of a batch, and update the rows it looked up."""
    result = worker.stage.finish(batch)
    worker.stage.drop_graphs()  # of other batches: a local client updates the weights at once
    yield from worker.client.push(result.gradients)
    if worker.tables is not None:
        assert result.pooled_gradient_BFD is not None
        gradient = worker.columns.gradients(result.pooled_gradient_BFD)
        yield from worker.tables.update(batch, gradient)
    return result
