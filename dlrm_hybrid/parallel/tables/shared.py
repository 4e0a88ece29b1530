"""One set of tables for all trainers of a world in one process; rows come in trainer order.

Shapes: B batch, F tables, D embedding dimension, K distinct ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Bools
from dlrm_hybrid.bags import Bags, joined
from dlrm_hybrid.comm.group import split
from dlrm_hybrid.compress.embedding.ends import Held, Remembered, RowFormats, TrainerEnd
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.embeddings import (
    DistinctIds,
    DistinctRows,
    Embeddings,
    distinct_ids,
    tensor_bags,
)
from dlrm_hybrid.model.rows.optimizer import learning
from dlrm_hybrid.model.sharding import Cast
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.parallel.effects import GroupCall, Program
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber


class LookupRequest(NamedTuple):
    """One trainer's lookup; see `Tables.lookup`."""

    batch: BatchNumber
    bags: Bags[Tensor]
    lr: float


class UpdateRequest(NamedTuple):
    """One trainer's gradient; see `Tables.update`."""

    batch: BatchNumber
    gradient_BFD: Tensor


@final
class JointTables:
    """Looks up and updates for all trainers at once, in trainer order.

    Args:
        look_up: `AllIds` or `EachIdOnce`.
        clock: measures the time of lookups and updates.
    """

    def __init__(self, look_up: AllIds | EachIdOnce, clock: SpanClock) -> None:
        self._look_up = look_up
        self._looking_up = clock.within(Span.EMBEDDING)
        self._batches: dict[BatchNumber, _AllRows | _RoundedRows] = {}

    def lookup(self, requests: Sequence[LookupRequest]) -> list[Tensor]:
        """Pooled rows of each trainer, detached."""
        with self._looking_up:
            self._look_up.set_lr(requests[0].lr)
            rows = self._look_up([request.bags for request in requests])
            self._batches[requests[0].batch] = rows
            return rows.rows()

    def update(self, requests: Sequence[UpdateRequest]) -> list[None]:
        """Update the rows by all trainers' gradients of a batch."""
        with self._looking_up:
            rows = self._batches.pop(requests[0].batch)
            rows.update([mean_part(request.gradient_BFD, len(requests)) for request in requests])
        return [None] * len(requests)

    def predict(self, bags: Sequence[Bags[Tensor]]) -> list[Tensor]:
        """Pooled rows of the ids of each trainer; no update follows."""
        with self._looking_up, torch.no_grad():
            return self._look_up(bags).rows()


@final
class SharedTables(Tables):
    """One trainer's access to tables that a group of trainers shares.

    Args:
        joint: the tables.
        group: ranks of the workers that look up, in trainer order.
        remembered: this trainer's compression state; None without any.
    """

    def __init__(
        self, joint: JointTables, group: tuple[int, ...], remembered: Remembered | None = None
    ) -> None:
        self._joint = joint
        self._group = group
        self.remembered = remembered

    @override
    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        request = LookupRequest(batch, bags, lr)
        return (yield GroupCall(self._group, self._joint.lookup, request))

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        request = UpdateRequest(batch, gradient_BFD)
        yield GroupCall(self._group, self._joint.update, request)

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        return (yield GroupCall(self._group, self._joint.predict, bags))


@final
@dataclass(frozen=True, slots=True, eq=False)
class AllIds:
    """Looks up every id of every trainer.

    Attributes:
        embeddings: the tables.
        wire: casts of rows, and of gradients, between processes.
    """

    embeddings: Embeddings
    wire: tuple[Cast, Cast]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the rows of the next lookups."""
        self.embeddings.set_lr(lr)

    def __call__(self, bags: Sequence[Bags[Tensor]]) -> _AllRows:
        """Look up the ids of each trainer; the rows wait for their gradients."""
        all_bags = joined([part.map(Tensor.numpy) for part in bags])
        pooled_BFD = self.embeddings(tensor_bags(all_bags))
        return _AllRows(pooled_BFD, [part.rows for part in bags], self.wire)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _AllRows:
    """Rows of all trainers, concatenated."""

    pooled_BFD: Tensor
    sizes: Sequence[int]
    wire: tuple[Cast, Cast]

    def rows(self) -> list[Tensor]:
        pooled_BFD = self.wire[0].rounded(self.pooled_BFD.detach())
        return [part.clone() for part in split(pooled_BFD, self.sizes)]

    def update(self, gradients: Sequence[Tensor]) -> None:
        self.pooled_BFD.backward(torch.cat(list(map(self.wire[1].rounded, gradients))))


@final
@dataclass(frozen=True, slots=True, eq=False)
class EachIdOnce:
    """Looks up each id of a trainer once, and sums its gradients before they would travel.

    Attributes:
        ends: ends of the trainers, each with all tables in one place.
        exact: end of a trainer whose lookup no update follows.
        learns_F: whether the rows of each table change.
    """

    embeddings: Embeddings
    ends: Sequence[TrainerEnd]
    exact: TrainerEnd
    learns_F: Bools

    @classmethod
    def of(
        cls, embeddings: Embeddings, spec: ModelShape, formats: RowFormats, trainers: int
    ) -> EachIdOnce:
        """Make it for so many trainers."""
        tables = len(spec.table_rows)
        held = Held(tuple(range(tables)), tuple(spec.table_rows), spec.widths)
        ends = [formats.training.trainer(trainer, [held]) for trainer in range(trainers)]
        exact = formats.exact.trainer(0, [held])
        return cls(embeddings, ends, exact, learning(spec.frozen, tables))

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the rows of the next lookups."""
        self.embeddings.set_lr(lr)

    def __call__(self, bags: Sequence[Bags[Tensor]]) -> _RoundedRows:
        """Look up the ids of each trainer; the rows wait for their gradients."""
        order_F = np.arange(bags[0].tables)
        distinct = [distinct_ids(part, order_F) for part in bags]
        counts_TF = np.stack([ids.counts_F for ids in distinct])
        ids_K = np.concatenate([ids.ids_K for ids in distinct])
        looked_up = self.embeddings.look_up_distinct(ids_K, counts_TF)
        ends = self.ends if torch.is_grad_enabled() else [self.exact] * len(bags)
        rows = [Rows(ids.ids_K, ids.counts_F) for ids in distinct]
        parts = list(zip(distinct, rows, ends, strict=True))
        return _RoundedRows(parts, looked_up, self.learns_F)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _RoundedRows:
    """Rows of the distinct ids of each trainer, concatenated, as each of them has them."""

    parts: Sequence[tuple[DistinctIds, Rows, TrainerEnd]]
    looked_up: DistinctRows
    learns_F: Bools

    def rows(self) -> list[Tensor]:
        values = split(self.looked_up.rows_KD, [len(rows.ids_K) for _, rows, _ in self.parts])
        return [
            ids.pool(torch.from_numpy(end.own_rows(0, rows, part_KD.numpy())))
            for (ids, rows, end), part_KD in zip(self.parts, values, strict=True)
        ]

    def update(self, gradients: Sequence[Tensor]) -> None:
        sums: list[Tensor] = []
        for (ids, rows, end), gradient_BFD in zip(self.parts, gradients, strict=True):
            sum_KD = ids.sum_by_id(gradient_BFD)
            sent, some_K = rows.of_tables(self.learns_F)
            (rounded_KD,) = end.round([sent], [sum_KD.numpy()[some_K]])
            sums.append(torch.zeros_like(sum_KD))
            sums[-1][torch.from_numpy(some_K)] = torch.from_numpy(end.values(rounded_KD))
        self.looked_up.update(torch.cat(sums))
