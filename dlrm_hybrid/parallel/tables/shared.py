"""Who answers a worker's lookups: tables of this process, or one set for all trainers of a world.

Both divide every trainer's gradient by the number of trainers before they learn, so that the same
numbers meet in the same order.

Shapes: B batch, F tables, D embedding dimension, K distinct ids, N bags of each table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.comm.counted_group import split
from dlrm_hybrid.model.embeddings import (
    DistinctBags,
    DistinctIds,
    distinct_bags,
    distinct_ids,
)
from dlrm_hybrid.parallel.effects import LearnEmbeddings, Lookup


class EmbeddingTables(Protocol):
    """Tables that learn in backward: `model.Embeddings`, or sharded ones."""

    def __call__(self, ids_FB: Tensor) -> Tensor:
        """Pooled rows float32 (B, F, D) of ids_FB, int64 and contiguous."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate with which the rows of the next lookups learn."""
        ...


class DistinctTables(Protocol):
    """Tables of this process that learn in backward: `model.Embeddings`."""

    def pooled(self, bags: DistinctBags) -> Tensor:
        """Look up bags of all tables → float32 (N, F * D)."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate with which the rows of the next lookups learn."""
        ...


class Rounding(Protocol):
    """What the way between processes does to rows and gradients, float32 of any shape."""

    def pooled(self, pooled: Tensor) -> Tensor:
        """Rows as the trainers see them."""
        ...

    def gradient(self, gradient: Tensor) -> Tensor:
        """A trainer's part of the gradient as the tables see it."""
        ...


class WorldTables(Protocol):
    """What answers all trainers of a world in one process together, in their order."""

    def lookup(self, effects: Sequence[Lookup]) -> list[Tensor]:
        """Pooled rows of each trainer, detached."""
        ...

    def learn(self, effects: Sequence[LearnEmbeddings]) -> None:
        """Learn from all trainers' gradients of what was looked up last."""
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
        return [part.clone() for part in split(pooled_BFD, rows)]

    def learn(self, effects: Sequence[LearnEmbeddings]) -> None:
        """Learn from all trainers' gradients of what was looked up last."""
        pooled_BFD, self._pooled_BFD = self._pooled_BFD, None
        assert pooled_BFD is not None, "a lookup comes before its gradient"
        parts = [
            self._rounding.gradient(mean_part(effect.gradient_BFD, len(effects)))
            for effect in effects
        ]
        pooled_BFD.backward(torch.cat(parts))


@final
class SharedDistinctTables:
    """One set of tables for all trainers, each of which names an id once and sums its gradients.

    Args:
        embeddings: the tables.
        rounding: of what would travel between processes.
    """

    def __init__(self, embeddings: DistinctTables, rounding: Rounding) -> None:
        self._embeddings = embeddings
        self._rounding = rounding
        self._last: _LookedUp | None = None

    def lookup(self, effects: Sequence[Lookup]) -> list[Tensor]:
        """Pooled rows of each trainer, detached."""
        self._embeddings.set_lr(effects[0].lr)
        num_tables = len(effects[0].ids_FB)
        order_F = np.arange(num_tables)
        asked = [distinct_ids(effect.ids_FB, order_F) for effect in effects]
        counts_TF = np.stack([one.counts_F for one in asked])
        bags = distinct_bags(np.concatenate([one.ids_K for one in asked]), counts_TF)
        pooled_NW = self._embeddings.pooled(bags)
        self._last = _LookedUp(asked, bags, pooled_NW)
        rows_KD = bags.picked(pooled_NW.detach(), pooled_NW.shape[1] // num_tables)
        parts = split(self._rounding.pooled(rows_KD), [len(one.ids_K) for one in asked])
        return [one.spread(part_KD) for one, part_KD in zip(asked, parts, strict=True)]

    def learn(self, effects: Sequence[LearnEmbeddings]) -> None:
        """Learn from all trainers' gradients of what was looked up last."""
        last, self._last = self._last, None
        assert last is not None, "a lookup comes before its gradient"
        parts = [
            self._rounding.gradient(one.summed(mean_part(effect.gradient_BFD, len(effects))))
            for one, effect in zip(last.asked, effects, strict=True)
        ]
        last.pooled_NW.backward(last.bags.placed(torch.cat(parts), last.pooled_NW.shape))


@dataclass(frozen=True, slots=True, eq=False)
class _LookedUp:
    """What waits for its gradients."""

    asked: list[DistinctIds]
    bags: DistinctBags
    pooled_NW: Tensor


def mean_part(gradient_BFD: Tensor, trainers: int) -> Tensor:
    """A trainer's part of the gradient of the mean loss of all trainers."""
    return gradient_BFD if trainers == 1 else gradient_BFD / trainers
