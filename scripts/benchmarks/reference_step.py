"""A training step of the full model in one process, without stages, clients or servers.

`step.py` measures it, and tests compare worlds with it.

Shapes: B batch, I integer features, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Optimizer, init_state
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.tables import Embedding
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.parallel.stage import count_correct


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and accuracy of a step, as scalars that nobody has read yet.

    Attributes:
        loss: float32, mean binary cross-entropy of the batch before the update.
        correct: int64, rows on the right side of one half.
    """

    loss: Tensor
    correct: Tensor


@final
class Dlrm(nn.Module):
    """A model in one process: a stage with all of its layers, and its tables.

    Args:
        spec: widths, tables and interaction.
        embedding: optimizer of the tables, which backward runs.
        precision: type of the products in the MLPs.
        seed: that of the initial values and of dropout.
    """

    def __init__(
        self, spec: ModelSpec, embedding: Embedding, precision: Precision, seed: int
    ) -> None:
        super().__init__()
        self.spec = spec
        (whole,) = Partition.of(spec, ()).stages
        self.stage = StageModel(spec, whole, precision, seed)
        self.embeddings = Embeddings(spec, embedding)
        draw_embeddings(self.embeddings.weights(), seed)

    def forward(self, dense_BI: Tensor, bags: Bags[Tensor]) -> Tensor:
        """Compute logits (B,) of dense columns and ids."""
        return self.logits(dense_BI, self.embeddings(bags))

    def logits(self, dense_BI: Tensor, pooled_BFD: Tensor, rows: range | None = None) -> Tensor:
        """Compute logits (B,) of dense columns and rows of the tables; `rows` as in `Mlp`."""
        return self.stage.forward(dense_BI, pooled_BFD, rows).squeeze(1)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters except tables by name."""
        return self.stage.dense_parameters()


@final
class Trainer:
    """A model with its optimizers, for single-process training; everything it learns is `tensors`.

    Args:
        model: learns in place.
        optimizer: of the dense parameters; the tables have theirs fused into backward.
    """

    def __init__(self, model: Dlrm, optimizer: Optimizer) -> None:
        self.model = model
        self._optimizer = optimizer
        self._weights = model.dense_parameters()
        self._state = init_state(optimizer, self._weights)
        self._updates = tuple((weight, self._state[name]) for name, weight in self._weights.items())

    def step(
        self, dense_BI: Tensor, ids_FB: Tensor, label_B: Tensor, *, lr: float, embedding_lr: float
    ) -> StepResult:
        """Learn from one batch: dense_BI float32, ids_FB int64, label_B float32 of 0 and 1."""
        self.model.embeddings.set_lr(embedding_lr)
        looked_up_BFD: Tensor = self.model.embeddings(Bags(ids_FB))
        pooled_BFD = looked_up_BFD.detach().requires_grad_()
        logit_B = self.model.logits(dense_BI, pooled_BFD)
        loss = functional.binary_cross_entropy_with_logits(logit_B, label_B)
        loss.backward()
        looked_up_BFD.backward(pooled_BFD.grad)
        with torch.no_grad():
            for weight, state in self._updates:
                gradient = weight.grad
                assert gradient is not None
                self._optimizer.apply(weight, gradient, state, lr)
                weight.grad = None
            correct = count_correct(logit_B, label_B)
        return StepResult(loss.detach(), correct)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The dense parameters by name."""
        return self._weights

    def tensors(self) -> dict[str, Tensor]:
        """Views of all weights and optimizer states by unique names; copying into one resumes."""
        embeddings = self.model.embeddings
        return {
            **{name: weight.detach() for name, weight in self._weights.items()},
            **{
                f"{name}.{slot}": tensor
                for name, state in self._state.items()
                for slot, tensor in state.items()
            },
            **embeddings.weights(),
            **embeddings.optimizer_state(),
        }


def predict(model: Dlrm, dense_BI: Tensor, ids_FB: Tensor) -> Tensor:
    """Logits (B,) without a graph; nothing learns."""
    with torch.no_grad():  # FBGEMM has no kernels for inference mode
        return model(dense_BI, Bags(ids_FB))
