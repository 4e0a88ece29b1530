"""One set of tables for all trainers of a world in one process; rows come in trainer order.

Shapes: B batch, F tables, D embedding dimension, K distinct ids, N bags of each table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.comm.counted_group import split
from dlrm_hybrid.model.embeddings import DistinctBags, DistinctIds, distinct_bags, distinct_ids
from dlrm_hybrid.parallel.effects import Program, Together
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.parallel.tables.local import EmbeddingTables
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber


class LookupRequest(NamedTuple):
    """What one trainer looks up; see `Tables.lookup`."""

    batch: BatchNumber
    ids_FB: Tensor
    lr: float


class UpdateRequest(NamedTuple):
    """What one trainer teaches; see `Tables.update`."""

    batch: BatchNumber
    gradient_BFD: Tensor


class JointTables(Protocol):
    """Answers all trainers at once, in their order."""

    def lookup(self, requests: Sequence[LookupRequest]) -> list[Tensor]:
        """Pooled rows of each trainer, detached."""
        ...

    def update(self, requests: Sequence[UpdateRequest]) -> list[None]:
        """Learn from all trainers' gradients of a batch."""
        ...

    def predict(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Pooled rows of the ids of each trainer; no update follows."""
        ...


class Rounding(Protocol):
    """What the way between processes does to rows and gradients, float32 of any shape."""

    def pooled(self, pooled: Tensor) -> Tensor:
        """Rows as the trainers see them."""
        ...

    def gradient(self, gradient: Tensor) -> Tensor:
        """A trainer's part of the gradient as the tables see it."""
        ...


@final
class SharedTables(Tables):
    """One trainer's access to tables that a group of trainers shares.

    Args:
        joint: the tables.
        group: ranks of the workers that look up, in trainer order.
    """

    def __init__(self, joint: JointTables, group: tuple[int, ...]) -> None:
        self._joint = joint
        self._group = group

    @override
    def lookup(self, batch: BatchNumber, ids_FB: Tensor, lr: float) -> Program[Tensor]:
        request = LookupRequest(batch, ids_FB, lr)
        return (yield Together(self._group, self._joint.lookup, request))

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        request = UpdateRequest(batch, gradient_BFD)
        yield Together(self._group, self._joint.update, request)

    @override
    def predict(self, ids_FB: Tensor) -> Program[Tensor]:
        return (yield Together(self._group, self._joint.predict, ids_FB))


@final
class AllIds(JointTables):
    """Looks up every id of every trainer.

    Args:
        embeddings: the tables.
        rounding: of what would travel between processes.
        clock: told of the time they take.
    """

    def __init__(self, embeddings: EmbeddingTables, rounding: Rounding, clock: SpanClock) -> None:
        self._embeddings = embeddings
        self._rounding = rounding
        self._looking_up = clock.within(Span.EMBEDDING)
        self._pooled: dict[BatchNumber, Tensor] = {}

    @override
    def lookup(self, requests: Sequence[LookupRequest]) -> list[Tensor]:
        with self._looking_up:
            self._embeddings.set_lr(requests[0].lr)
            pooled_BFD = self._embeddings(torch.cat([one.ids_FB for one in requests], dim=1))
            self._pooled[requests[0].batch] = pooled_BFD
            return self._rounded(pooled_BFD.detach(), [one.ids_FB for one in requests])

    @override
    def update(self, requests: Sequence[UpdateRequest]) -> list[None]:
        with self._looking_up:
            parts = [
                self._rounding.gradient(mean_part(one.gradient_BFD, len(requests)))
                for one in requests
            ]
            self._pooled.pop(requests[0].batch).backward(torch.cat(parts))
        return [None] * len(requests)

    @override
    def predict(self, ids: Sequence[Tensor]) -> list[Tensor]:
        with self._looking_up, torch.no_grad():
            return self._rounded(self._embeddings(torch.cat(list(ids), dim=1)), ids)

    def _rounded(self, pooled_BFD: Tensor, ids: Sequence[Tensor]) -> list[Tensor]:
        rows = [ids_FB.shape[1] for ids_FB in ids]
        return [part.clone() for part in split(self._rounding.pooled(pooled_BFD), rows)]


class BagTables(Protocol):
    """Tables of this process that learn in backward: `model.Embeddings`."""

    def pooled(self, bags: DistinctBags) -> Tensor:
        """Look up bags of all tables → float32 (N, F * D)."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate with which the rows of the next lookups learn."""
        ...


@final
class EachIdOnce(JointTables):
    """Looks up each id of a trainer once, and sums its gradients before they would travel.

    Args:
        embeddings: the tables.
        rounding: of what would travel between processes.
        clock: told of the time they take.
    """

    def __init__(self, embeddings: BagTables, rounding: Rounding, clock: SpanClock) -> None:
        self._embeddings = embeddings
        self._rounding = rounding
        self._looking_up = clock.within(Span.EMBEDDING)
        self._batches: dict[BatchNumber, _LookedUp] = {}

    @override
    def lookup(self, requests: Sequence[LookupRequest]) -> list[Tensor]:
        with self._looking_up:
            self._embeddings.set_lr(requests[0].lr)
            found = self._found([one.ids_FB for one in requests])
            self._batches[requests[0].batch] = found
            return self._rounded(found)

    @override
    def update(self, requests: Sequence[UpdateRequest]) -> list[None]:
        with self._looking_up:
            found = self._batches.pop(requests[0].batch)
            parts = [
                self._rounding.gradient(ids.sum_by_id(mean_part(one.gradient_BFD, len(requests))))
                for ids, one in zip(found.ids, requests, strict=True)
            ]
            found.pooled_NW.backward(found.bags.scatter(torch.cat(parts), found.pooled_NW.shape))
        return [None] * len(requests)

    @override
    def predict(self, ids: Sequence[Tensor]) -> list[Tensor]:
        with self._looking_up, torch.no_grad():
            return self._rounded(self._found(ids))

    def _found(self, ids: Sequence[Tensor]) -> _LookedUp:
        order_F = np.arange(len(ids[0]))
        distinct = [distinct_ids(ids_FB, order_F) for ids_FB in ids]
        counts_TF = np.stack([one.counts_F for one in distinct])
        bags = distinct_bags(np.concatenate([one.ids_K for one in distinct]), counts_TF)
        return _LookedUp(distinct, bags, self._embeddings.pooled(bags))

    def _rounded(self, found: _LookedUp) -> list[Tensor]:
        num_tables = len(found.ids[0].counts_F)
        pooled_NW = found.pooled_NW.detach()
        rows_KD = found.bags.gather(pooled_NW, pooled_NW.shape[1] // num_tables)
        parts = split(self._rounding.pooled(rows_KD), [len(one.ids_K) for one in found.ids])
        return [one.expand(part_KD) for one, part_KD in zip(found.ids, parts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _LookedUp:
    """What waits for its gradients."""

    ids: list[DistinctIds]
    bags: DistinctBags
    pooled_NW: Tensor
