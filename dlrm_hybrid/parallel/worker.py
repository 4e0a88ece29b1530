"""What one worker does in a tick, as a generator of effects; see `parallel.effects`.

train step:
    look up the ids                                       (the stage with the interaction)
    pull the version of the weights that the next push is computed with
    forward and backward of the micro-batches, as the schedule says:
        forward:  receive activations, compute, send activations
        backward: receive a gradient, compute, send a gradient
    push the gradients of the weights, after rounds with the other trainers where the method has any
    update the tables                                     (the stage with the interaction)

The lookup comes first because it needs nothing from the servers: it overlaps their work.

Shapes: B rows of the trainer's batch, b rows of a micro-batch, F tables, D embedding dimension,
N width of what enters the stage, M of what leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Mask, Sections
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.optimizer import Schedule
from dlrm_hybrid.model.spec import StagePart
from dlrm_hybrid.parallel.dense.client import Client
from dlrm_hybrid.parallel.effects import Program, Receive
from dlrm_hybrid.parallel.port import Port
from dlrm_hybrid.parallel.schedule import Op
from dlrm_hybrid.parallel.stage import Inputs, Stage, StageResult, predict_stage
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber, Tick
from dlrm_hybrid.wire.frame import Kind

EVALUATION = 2**16 - 1
"""Number of the only micro-batch of a batch that is predicted: no training step has so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The parts of one worker.

    Attributes:
        rank: its own.
        stage: computes, and keeps what is in flight.
        ops: of the stage in every tick.
        boundaries: to the neighbouring stages.
        tables: for its lookups; None where the interaction is not.
        embedding_schedule: learning rate of the tables.
        client: pulls the weights of the stage and pushes their gradients.
    """

    rank: int
    stage: Stage
    ops: tuple[Op, ...]
    boundaries: Boundaries
    tables: Tables | None
    embedding_schedule: Schedule
    client: Client

    @property
    def name(self) -> str:
        """For messages: `worker-0.1 (rank 1)`."""
        return str(self.boundaries.port)

    @property
    def part(self) -> StagePart:
        """Which layers these are."""
        return self.stage.model.part


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What a training step measured; in every stage but the last the sums are 0.

    Attributes:
        loss_sum: binary cross-entropy before the update, summed over the rows.
        correct: rows on the right side of one half.
        rows: of the batches whose gradients were pushed, of most schedules one.
    """

    loss_sum: float
    correct: int
    rows: int

    def plus(self, result: StageResult) -> StepMetrics:
        """With one more batch."""
        return StepMetrics(
            loss_sum=self.loss_sum + result.loss_sum,
            correct=self.correct + result.correct,
            rows=self.rows + result.rows,
        )


def stage_inputs(worker: Worker, batch: Batch) -> Inputs:
    """What a worker's stage reads of a batch, and no more."""
    part = worker.part
    return Inputs(
        rows=len(batch.label_B),
        dense_BI=torch.from_numpy(batch.dense_BI) if part.is_first else None,
        ids_FB=torch.from_numpy(batch.ids_FB) if part.has_interaction else None,
        label_B=torch.from_numpy(batch.label_B) if part.is_last else None,
    )


def train_step(worker: Worker, tick: Tick, inputs: Inputs) -> Program[StepMetrics]:
    """Do the ops of one tick, in which the batch of the same number is read.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
        DlrmError: a frame is not what it should be.
    """
    stage, boundaries = worker.stage, worker.boundaries
    yield from _begin(worker, BatchNumber(tick), inputs)
    yield from worker.client.pull()
    metrics = StepMetrics(loss_sum=0.0, correct=0, rows=0)
    for kind, microbatch, delay in worker.ops:
        batch = BatchNumber(tick - delay)
        if batch < 0:
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


def _begin(worker: Worker, batch: BatchNumber, inputs: Inputs) -> Program[None]:
    """Look up the rows of a batch, and take it in."""
    pooled_BFD = None
    if worker.tables is not None:
        assert inputs.ids_FB is not None
        lr = worker.embedding_schedule.lr(batch)
        pooled_BFD = yield from worker.tables.lookup(batch, inputs.ids_FB, lr)
    worker.stage.begin(batch, inputs, pooled_BFD)


def _finish(worker: Worker, batch: BatchNumber) -> Program[StageResult]:
    """Push the gradients of a batch, and update its rows of the tables."""
    result = worker.stage.finish(batch)
    worker.stage.drop_graphs()  # of other batches: a local client updates the weights at once
    yield from worker.client.push(result.gradients)
    if worker.tables is not None:
        assert result.pooled_gradient_BFD is not None
        yield from worker.tables.update(batch, result.pooled_gradient_BFD)
    return result


def predict_batch(worker: Worker, number: int, inputs: Inputs) -> Program[Tensor | None]:
    """Logits (B,) of one batch from the last stage, None from the others; nothing learns.

    A stage is done when the next one has its activations: no stage runs away from the next by more
    than a batch.

    Args:
        worker: its weights are taken as they are.
        number: of the batch; another one for each batch of an evaluation.
        inputs: any number of rows; labels are not read.
    """
    batch, boundaries = BatchNumber(number), worker.boundaries
    pooled_BFD = None
    if worker.tables is not None:
        assert inputs.ids_FB is not None
        pooled_BFD = yield from worker.tables.predict(inputs.ids_FB)
    received_BN = yield from boundaries.receive_activations(batch, EVALUATION, inputs.rows)
    boundaries.confirm(batch)
    left = predict_stage(worker.stage.model, inputs, received_BN, pooled_BFD)
    if worker.part.is_last:
        return left
    boundaries.send_activations(left, batch, EVALUATION)
    yield from boundaries.receive_confirmation(batch)
    return None


@final
class Boundaries:
    """What crosses the cuts before and after a stage; before the first and after the last is None.

    Args:
        port: of the worker; the neighbouring stages of its trainer are rank - 1 and rank + 1.
        part: the stage.
        codecs: of both boundaries, by number.
        clock: measures the time that codecs take.

    Attributes:
        port: of the worker.
    """

    def __init__(
        self,
        port: Port,
        part: StagePart,
        codecs: Mapping[int, ActivationCodec],
        clock: SpanClock,
    ) -> None:
        self.port = port
        self._part = part
        self._codecs = codecs
        self._encoding = clock.within(Span.ENCODE)
        self._decoding = clock.within(Span.DECODE)
        # From forward to backward, by batch and micro-batch.
        self._sent: dict[tuple[BatchNumber, int], Mask] = {}
        self._received: dict[tuple[BatchNumber, int], Mask] = {}

    def receive_activations(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Tensor | None]:
        """What enters the stage, (b, N)."""
        if self._part.is_first:
            return None
        key = self._before(batch, microbatch)
        frame = yield self._from(self.port.rank - 1, Kind.ACTIVATION, key)
        shape = torch.Size((rows, self._part.input_width))
        with self._decoding:
            entered_bN, mask = self._codecs[key.boundary].decode(frame.sections, shape, key)
        self._received[batch, microbatch] = mask
        return entered_bN

    def send_activations(self, left_bM: Tensor | None, batch: BatchNumber, microbatch: int) -> None:
        """To the next stage."""
        if left_bM is None:
            return
        key = self._after(batch, microbatch)
        with self._encoding:
            sections, mask = self._codecs[key.boundary].encode(left_bM, key)
        self._sent[batch, microbatch] = mask
        self._send(self.port.rank + 1, Kind.ACTIVATION, key, sections, left_bM)

    def receive_gradient(
        self, batch: BatchNumber, microbatch: int, rows: int
    ) -> Program[Tensor | None]:
        """Of what left the stage, (b, M)."""
        if self._part.is_last:
            return None
        key = self._after(batch, microbatch)
        frame = yield self._from(self.port.rank + 1, Kind.ACTIVATION_GRADIENT, key)
        mask = self._sent.pop((batch, microbatch))
        shape = torch.Size((rows, self._part.output_width))
        with self._decoding:
            return self._codecs[key.boundary].decode_gradient(frame.sections, shape, mask, key)

    def send_gradient(
        self, gradient_bN: Tensor | None, batch: BatchNumber, microbatch: int
    ) -> None:
        """Of what entered, to the stage before."""
        if gradient_bN is None:
            return
        key = self._before(batch, microbatch)
        mask = self._received.pop((batch, microbatch))
        with self._encoding:
            sections = self._codecs[key.boundary].encode_gradient(gradient_bN, mask, key)
        self._send(self.port.rank - 1, Kind.ACTIVATION_GRADIENT, key, sections, gradient_bN)

    def confirm(self, batch: BatchNumber) -> None:
        """Tell the stage before that its activations have come; nothing goes back through them."""
        if not self._part.is_first:
            del self._received[batch, EVALUATION]
            self._send(self.port.rank - 1, Kind.RECEIVED, self._before(batch, EVALUATION))

    def receive_confirmation(self, batch: BatchNumber) -> Program[None]:
        """Wait until the next stage has the activations."""
        del self._sent[batch, EVALUATION]
        yield self._from(self.port.rank + 1, Kind.RECEIVED, self._after(batch, EVALUATION))

    def _before(self, batch: BatchNumber, microbatch: int) -> Key:
        return Key(batch, self._part.index - 1, microbatch)

    def _after(self, batch: BatchNumber, microbatch: int) -> Key:
        return Key(batch, self._part.index, microbatch)

    def _from(self, sender: int, kind: Kind, key: Key) -> Receive:
        return Receive(kind, sender, key.batch, boundary=key.boundary, microbatch=key.microbatch)

    def _send(
        self, to: int, kind: Kind, key: Key, sections: Sections = (), of: Tensor | None = None
    ) -> None:
        self.port.send(
            to,
            kind,
            key.batch,
            sections,
            boundary=key.boundary,
            microbatch=key.microbatch,
            dense_bytes=0 if of is None else 4 * of.numel(),
        )
