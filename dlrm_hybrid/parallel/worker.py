"""What one worker does in a step, as a generator of effects; see `parallel.effects`.

train step:
    look up the ids                                       (the stage with the interaction)
    take over the versions of the weights that the step needs
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

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Saved, Sections
from dlrm_hybrid.model.optimizer import Schedule
from dlrm_hybrid.model.stage_model import StageModel
from dlrm_hybrid.parallel.collectives.reduce import CollectiveClient
from dlrm_hybrid.parallel.dense.client import Client
from dlrm_hybrid.parallel.effects import Effect, LearnEmbeddings, Lookup, Receive
from dlrm_hybrid.parallel.outgoing import Send
from dlrm_hybrid.parallel.schedule import Op
from dlrm_hybrid.parallel.stage import Inputs, StageStep, predict_stage
from dlrm_hybrid.wire.frame import Frame, Kind

EVALUATION = 2**16 - 1
"""Number of the only micro-batch of a batch that is predicted: no training step has so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The parts of one worker.

    Attributes:
        rank: its own; the neighbouring stages of its trainer are rank - 1 and rank + 1.
        attempt: how often the run has been restarted.
        model: of its stage.
        codec: of both its boundaries.
        ops: of its stage in every step.
        client: keeps the weights of `model` at the version that a step needs.
        collectives: runs the rounds of what `client` pushes, where its method has any.
        embedding_schedule: learning rate of the tables.
        send: to any rank.
    """

    rank: int
    attempt: int
    model: StageModel
    codec: ActivationCodec
    ops: tuple[Op, ...]
    client: Client
    collectives: CollectiveClient
    embedding_schedule: Schedule
    send: Send

    @property
    def microbatches(self) -> int:
        """Of every training step."""
        return sum(op.kind == "F" for op in self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step taught; in every stage but the last the sums are 0.

    Attributes:
        loss_sum: binary cross-entropy before the update, summed over the rows.
        correct: rows on the right side of one half.
        rows: of the trainer's batch.
    """

    loss_sum: float
    correct: int
    rows: int


def train_step(worker: Worker, step: int, inputs: Inputs) -> Generator[Effect, Any, StepOutcome]:
    """Learn from one batch; `step` counts from 0.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
        DlrmError: a frame is not what it should be.
    """
    pooled_BFD = yield from _lookup(worker, inputs, worker.embedding_schedule.lr(step))
    yield from take_versions(worker, step)
    stage = StageStep(worker.model, inputs, pooled_BFD, worker.microbatches)
    pipe = _Pipe(worker, step)
    for kind, microbatch in worker.ops:
        if kind == "F":
            received_bN = yield from pipe.activations(microbatch, stage.rows)
            pipe.send_activations(stage.forward(microbatch, received_bN), microbatch)
        else:
            received_bM = yield from pipe.gradient(microbatch)
            pipe.send_gradient(stage.backward(microbatch, received_bM), microbatch)
    result = stage.finish()
    pushing = worker.client.push(step, result.gradients)
    for outgoing in (yield from worker.collectives.run(step, pushing)):
        worker.send(*outgoing)
    if result.pooled_gradient_BFD is not None:
        yield LearnEmbeddings(result.pooled_gradient_BFD)
    return StepOutcome(loss_sum=result.loss_sum, correct=result.correct, rows=inputs.rows)


def take_versions(worker: Worker, step: int) -> Generator[Effect, Any, None]:
    """Bring the weights to the version that `step` is computed with."""
    for receive in worker.client.wants(step):
        frame: Frame = yield receive
        worker.client.apply(frame)


def evaluate_batch(
    worker: Worker, number: int, inputs: Inputs
) -> Generator[Effect, Any, Tensor | None]:
    """Logits (B,) of one batch from the last stage, None from the others; nothing learns.

    A stage is done when the one behind has taken its activations: no stage runs away from the
    next by more than a batch.

    Args:
        worker: its weights are taken as they are.
        number: of the batch; another one for each batch of an evaluation.
        inputs: any number of rows; labels are not read.
    """
    pooled_BFD = yield from _lookup(worker, inputs, lr=0.0)
    pipe = _Pipe(worker, number)
    received_BN = yield from pipe.activations(EVALUATION, inputs.rows)
    pipe.confirm()
    left = predict_stage(worker.model, inputs, received_BN, pooled_BFD)
    if worker.model.part.is_last:
        return left
    pipe.send_activations(left, EVALUATION)
    yield from pipe.confirmation()
    return None


@final
class _Pipe:
    """Both boundaries of a worker in one step; what is beyond the first and last stage is None."""

    def __init__(self, worker: Worker, step: int) -> None:
        self._worker = worker
        self._part = worker.model.part
        self._step = step
        self._sent: dict[int, Saved] = {}
        self._received: dict[int, Saved] = {}

    def activations(self, microbatch: int, rows: int) -> Generator[Effect, Any, Tensor | None]:
        """What enters the stage, (b, N)."""
        if self._part.is_first:
            return None
        key = self._key(self._part.index - 1, microbatch)
        frame = yield self._receive(Kind.ACTIVATION, self._worker.rank - 1, key)
        shape = torch.Size((rows, self._part.input_width))
        entered_bN, saved = self._worker.codec.decode(frame.sections, shape, key)
        self._received[microbatch] = saved
        return entered_bN

    def send_activations(self, left_bM: Tensor | None, microbatch: int) -> None:
        """To the stage behind."""
        if left_bM is None:
            return
        key = self._key(self._part.index, microbatch)
        sections, saved = self._worker.codec.encode(left_bM, key)
        self._sent[microbatch] = saved
        frame = self._frame(Kind.ACTIVATION, key, sections)
        self._worker.send(self._worker.rank + 1, frame, _dense_bytes(left_bM))

    def gradient(self, microbatch: int) -> Generator[Effect, Any, Tensor | None]:
        """Of what left the stage, (b, M)."""
        if self._part.is_last:
            return None
        key = self._key(self._part.index, microbatch)
        frame = yield self._receive(Kind.ACTIVATION_GRADIENT, self._worker.rank + 1, key)
        saved = self._sent.pop(microbatch)
        return self._worker.codec.decode_gradient(frame.sections, saved, key)

    def send_gradient(self, gradient_bN: Tensor | None, microbatch: int) -> None:
        """Of what entered, to the stage before."""
        if gradient_bN is None:
            return
        key = self._key(self._part.index - 1, microbatch)
        saved = self._received.pop(microbatch)
        sections = self._worker.codec.encode_gradient(gradient_bN, saved, key)
        frame = self._frame(Kind.ACTIVATION_GRADIENT, key, sections)
        self._worker.send(self._worker.rank - 1, frame, _dense_bytes(gradient_bN))

    def confirm(self) -> None:
        """Tell the stage before that its activations have come."""
        if not self._part.is_first:
            key = self._key(self._part.index - 1, EVALUATION)
            self._worker.send(self._worker.rank - 1, self._frame(Kind.CONTROL, key, ()), 0)

    def confirmation(self) -> Generator[Effect, Any, None]:
        """Wait until the stage behind has the activations."""
        key = self._key(self._part.index, EVALUATION)
        yield self._receive(Kind.CONTROL, self._worker.rank + 1, key)

    def _key(self, boundary: int, microbatch: int) -> Key:
        return Key(self._step, boundary, microbatch)

    def _receive(self, kind: Kind, sender: int, key: Key) -> Receive:
        return Receive(kind, sender, key.step, key.boundary, key.microbatch)

    def _frame(self, kind: Kind, key: Key, sections: Sections) -> Frame:
        return Frame(
            kind=kind,
            sender=self._worker.rank,
            attempt=self._worker.attempt,
            step=key.step,
            boundary=key.boundary,
            microbatch=key.microbatch,
            sections=sections,
        )


def _lookup(worker: Worker, inputs: Inputs, lr: float) -> Generator[Effect, Any, Tensor | None]:
    """Rows of the tables (B, F, D) where the interaction is."""
    if not worker.model.part.has_interaction:
        return None
    assert inputs.ids_FB is not None
    pooled_BFD: Tensor = yield Lookup(inputs.ids_FB, lr)
    return pooled_BFD


def _dense_bytes(tensor: Tensor) -> int:
    """Size of a tensor's elements as float32."""
    return 4 * tensor.numel()
