"""Who answers a worker's lookups: tables of this process, or one set for all trainers of a world.

Both divide every trainer's gradient by the number of trainers before they learn, so that the same
numbers meet in the same order.

Shapes: B batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from dlrm_hybrid.parallel.effects import LearnEmbeddings, Lookup


class EmbeddingTables(Protocol):
    """Tables that learn in backward: `model.Embeddings`, or sharded ones."""

    def __call__(self, ids_FB: Tensor) -> Tensor:
        """Pooled rows float32 (B, F, D) of ids_FB, int64 and contiguous."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate with which the rows of the next lookups learn."""
        ...


class Rounding(Protocol):
    """What the way between processes does to rows and gradients; tensors are float32 (B, F, D)."""

    def pooled(self, pooled_BFD: Tensor) -> Tensor:
        """Rows as the trainers see them."""
        ...

    def gradient(self, gradient_BFD: Tensor) -> Tensor:
        """A trainer's part of the gradient as the tables see it."""
        ...


@final
class OwnTables:
    """Tables of one trainer's process; sharded ones answer all trainers together by themselves."""

    def __init__(self, embeddings: EmbeddingTables, trainers: int) -> None:
        self._embeddings = embeddings
        self._trainers = trainers
        self._pooled_BFD: Tensor | None = None

    def lookup(self, effect: Lookup) -> Tensor:
        """Pooled rows, detached."""
        self._embeddings.set_lr(effect.lr)
        self._pooled_BFD = self._embeddings(effect.ids_FB)
        return self._pooled_BFD.detach()

    def learn(self, effect: LearnEmbeddings) -> None:
        """Learn from the gradient of what was looked up last."""
        pooled_BFD, self._pooled_BFD = self._pooled_BFD, None
        assert pooled_BFD is not None, "a lookup comes before its gradient"
        pooled_BFD.backward(mean_part(effect.gradient_BFD, self._trainers))


@final
class SharedTables:
    """One set of tables for all trainers; rows come in trainer order.

    Args:
        embeddings: the tables.
        rounding: of what would travel between processes.
    """

    def __init__(self, embeddings: EmbeddingTables, rounding: Rounding) -> None:
        self._embeddings = embeddings
        self._rounding = rounding
        self._pooled_BFD: Tensor | None = None

    def lookup(self, effects: Sequence[Lookup]) -> list[Tensor]:
        """Pooled rows of each trainer, detached."""
        self._embeddings.set_lr(effects[0].lr)
        ids_FB = torch.cat([effect.ids_FB for effect in effects], dim=1)
        self._pooled_BFD = self._embeddings(ids_FB)
        rows = [effect.ids_FB.shape[1] for effect in effects]
        pooled_BFD = self._rounding.pooled(self._pooled_BFD.detach())
        parts: tuple[Tensor, ...] = torch.split(pooled_BFD, rows)
        return [part.clone() for part in parts]

    def learn(self, effects: Sequence[LearnEmbeddings]) -> None:
        """Learn from all trainers' gradients of what was looked up last."""
        pooled_BFD, self._pooled_BFD = self._pooled_BFD, None
        assert pooled_BFD is not None, "a lookup comes before its gradient"
        parts = [
            self._rounding.gradient(mean_part(effect.gradient_BFD, len(effects)))
            for effect in effects
        ]
        pooled_BFD.backward(torch.cat(parts))


def mean_part(gradient_BFD: Tensor, trainers: int) -> Tensor:
    """A trainer's part of the gradient of the mean loss of all trainers."""
    return gradient_BFD if trainers == 1 else gradient_BFD / trainers
