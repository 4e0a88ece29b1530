"""One step of one pipeline stage: autograd by hand, from boundary to boundary.

What enters a stage becomes a leaf; what leaves it is detached; backward starts from the received
gradient and ends in the leaf. The pooled rows of the tables are leaves too, one for each
micro-batch, so the tables are looked up once and learn once in a step.

Shapes: B rows of the trainer's batch, b rows of a micro-batch, I integer features, F tables,
D embedding dimension, N width of what enters the stage, M of what leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from dlrm_hybrid.model.spec import microbatch_rows
from dlrm_hybrid.model.stage_model import StageModel
from dlrm_hybrid.model.step import count_correct

# MKL rounds products differently where an operand lies at an address that is no multiple of it.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """A trainer's batch, or as much of it as a stage reads.

    Attributes:
        rows: B.
        dense_BI: float32; the first stage needs it.
        ids_FB: int64, contiguous; the stage with the interaction needs it.
        label_B: float32, 0 or 1; the last stage needs it to learn.
    """

    rows: int
    dense_BI: Tensor | None
    ids_FB: Tensor | None
    label_B: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageResult:
    """What a step of a stage gives.

    Attributes:
        gradients: of the mean loss of the trainer's batch, by parameter, float32.
        pooled_gradient_BFD: the same of the pooled rows; None but where the interaction is.
        loss_sum: binary cross-entropy, summed over the rows; 0 but in the last stage.
        correct: rows on the right side of one half; 0 but in the last stage.
    """

    gradients: Mapping[str, Tensor]
    pooled_gradient_BFD: Tensor | None
    loss_sum: float
    correct: int


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A micro-batch between its forward and its backward."""

    entered_bN: Tensor
    pooled_bFD: Tensor | None
    left: Tensor


@final
class StageStep:
    """One training step of one stage; micro-batches in any order that a schedule allows.

    Gradients are summed in the order of the backward calls.

    Args:
        model: the stage's layers.
        inputs: the batch.
        pooled_BFD: rows of the tables; not None where the interaction is.
        microbatches: of the batch.

    Attributes:
        rows: b.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """

    def __init__(
        self, model: StageModel, inputs: Inputs, pooled_BFD: Tensor | None, microbatches: int
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._pooled_BFD = pooled_BFD
        self._microbatches = microbatches
        self.rows = microbatch_rows(inputs.rows, microbatches)
        self._graphs: dict[int, _Graph] = {}
        self._pooled_gradients: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}

    def forward(self, microbatch: int, received_bN: Tensor | None) -> Tensor | None:
        """Activations (b, M) for the next stage, detached; None in the last stage.

        Args:
            microbatch: its number.
            received_bN: from the stage before, becomes part of the graph; None in the first.
        """
        part = self._model.part
        entered_bN = self._entered(microbatch, received_bN)
        pooled_bFD = None
        if part.has_interaction:
            pooled_bFD = _leaf(self._of(self._pooled_BFD, microbatch))
        left: Tensor = self._model(entered_bN, pooled_bFD)
        if part.is_last:
            logit_b = left.squeeze(1)
            label_b = self._of(self._inputs.label_B, microbatch)
            left = functional.binary_cross_entropy_with_logits(logit_b, label_b)
            self._logits[microbatch] = logit_b.detach()
            self._losses[microbatch] = left.detach()
        self._graphs[microbatch] = _Graph(entered_bN, pooled_bFD, left)
        return None if part.is_last else left.detach()

    def backward(self, microbatch: int, received_bM: Tensor | None) -> Tensor | None:
        """Gradient (b, N) for the stage before; None in the first stage.

        Args:
            microbatch: its number; its forward has been done.
            received_bM: gradient of what left; None in the last stage.
        """
        graph = self._graphs.pop(microbatch)
        if self._model.part.is_last:
            received_bM = torch.tensor(1 / self._microbatches)
        graph.left.backward(received_bM)
        if graph.pooled_bFD is not None:
            self._pooled_gradients[microbatch] = _gradient_of(graph.pooled_bFD)
        return None if self._model.part.is_first else _gradient_of(graph.entered_bN)

    def finish(self) -> StageResult:
        """Everything the step has gathered; the parameters keep no gradient."""
        assert not self._graphs
        gradients: dict[str, Tensor] = {}
        for name, weight in self._model.dense_parameters().items():
            gradients[name] = _gradient_of(weight)
            weight.grad = None
        pooled = [gradient for _, gradient in sorted(self._pooled_gradients.items())]
        return StageResult(
            gradients=gradients,
            pooled_gradient_BFD=torch.cat(pooled) if len(pooled) > 1 else next(iter(pooled), None),
            loss_sum=sum(float(loss) * self.rows for loss in self._losses.values()),
            correct=sum(
                int(count_correct(logit_b, self._of(self._inputs.label_B, microbatch)))
                for microbatch, logit_b in self._logits.items()
            ),
        )

    def _entered(self, microbatch: int, received_bN: Tensor | None) -> Tensor:
        if self._model.part.is_first:
            return aligned(self._of(self._inputs.dense_BI, microbatch))
        assert received_bN is not None
        return received_bN.requires_grad_()

    def _of(self, batch: Tensor | None, microbatch: int) -> Tensor:
        """The rows of one micro-batch."""
        assert batch is not None
        return batch[microbatch * self.rows : (microbatch + 1) * self.rows]


def predict_stage(
    model: StageModel, inputs: Inputs, received_BN: Tensor | None, pooled_BFD: Tensor | None
) -> Tensor:
    """What leaves the stage, (B, M), without a graph; in the last stage the logits (B,)."""
    entered_BN = inputs.dense_BI if received_BN is None else received_BN
    assert entered_BN is not None
    with torch.no_grad():
        left_BM: Tensor = model(aligned(entered_BN), pooled_BFD)
    return left_BM.squeeze(1) if model.part.is_last else left_BM


def aligned(tensor: Tensor) -> Tensor:
    """The same values at an address from which every product gives the same bits."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
