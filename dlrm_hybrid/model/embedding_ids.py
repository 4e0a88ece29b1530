"""Ids on their way to the trainers that hold their rows.

TorchRec's own input distribution is made for bags of any size: it sends splits, lengths and ids in
three collectives, and regroups them feature by feature. Here a bag is one id: one collective of
ids is enough. What comes out is what TorchRec's lookups take.

Shapes: B rows of this trainer's batch, N rows of all trainers' batches, F tables, L features that
one trainer looks up, T trainers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_hybrid.comm.counted_group import CountedGroup, split
from dlrm_hybrid.model.embedding_plan import Shard
from dlrm_hybrid.model.spec import ModelSpec

WIRE_DTYPE = torch.int32


@dataclass(frozen=True, slots=True)
class Feature:
    """A table that a trainer looks up, or the block of its rows that this trainer holds.

    Attributes:
        table: position in the model.
        name: of the table's feature, for TorchRec.
        rows: first and one past the last of the block; None: it holds all rows.
    """

    table: int
    name: str
    rows: tuple[int, int] | None


@final
class IdExchange:
    """Sends ids to where they are looked up.

    Args:
        wanted_T: tables that each trainer looks up, in the order of its lookups.
        lookups: the features of this trainer's lookups; together as many as wanted from it.
        table_rows: rows of every table.
        group: of the trainers.
    """

    def __init__(
        self,
        wanted_T: Sequence[Sequence[int]],
        lookups: Sequence[Sequence[Feature]],
        table_rows: Sequence[int],
        group: CountedGroup,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._lookups = tuple(_Lookup(tuple(features)) for features in lookups)
        self._features_T = [len(wanted) for wanted in wanted_T]
        self._order = torch.tensor([table for wanted in wanted_T for table in wanted])
        self._rows_F1 = torch.tensor(table_rows).unsqueeze(1)

    def __call__(self, ids_FB: Tensor, rows_T: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Features of all trainers' batches, one after the other, for every lookup.

        Args:
            ids_FB: int64, of this trainer's batch.
            rows_T: rows of every trainer's batch.

        Raises:
            RuntimeError: an id is not a row of its table.
        """
        self._check(ids_FB)
        ids_LB = ids_FB.to(WIRE_DTYPE).index_select(0, self._order)
        mine, num_rows = self._features_T[self._rank], rows_T[self._rank]
        ids = self._group.exchange(
            ids_LB.view(-1),
            [features * num_rows for features in self._features_T],
            [mine * rows for rows in rows_T],
        )
        parts = split(ids, [mine * rows for rows in rows_T])
        ids_LN = torch.cat(
            [part.view(mine, rows) for part, rows in zip(parts, rows_T, strict=True)], 1
        )
        parts_LN = split(ids_LN, [len(lookup.features) for lookup in self._lookups])
        return [
            lookup.features_of(part_LN)
            for lookup, part_LN in zip(self._lookups, parts_LN, strict=True)
        ]

    def _check(self, ids_FB: Tensor) -> None:
        bad_FB = (ids_FB < 0).logical_or_(ids_FB >= self._rows_F1)
        if bad_FB.any():
            table, row = (int(index) for index in bad_FB.nonzero()[0])
            raise RuntimeError(
                f"id {ids_FB[table, row]} is out of bounds: embedding.{table + 1} has num_rows = "
                f"{self._rows_F1[table].item()}"
            )


@final
class _Lookup:
    """Turns ids into what one of TorchRec's lookups takes."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.features = features
        self._names = [feature.name for feature in features]
        self._blocks = [feature.rows for feature in features if feature.rows is not None]
        if self._blocks:
            self._first_L1, self._stop_L1 = torch.tensor(self._blocks).t().unsqueeze(2)
        self._ones = torch.ones(0, dtype=torch.int32)
        self._offsets = torch.zeros(1, dtype=torch.int64)

    def features_of(self, ids_LN: Tensor) -> KeyedJaggedTensor:
        if self._blocks:
            return self._of_blocks(ids_LN)
        num_ids = ids_LN.numel()
        if len(self._ones) < num_ids:
            self._ones = torch.ones(num_ids, dtype=torch.int32)
            self._offsets = torch.arange(num_ids + 1)
        return KeyedJaggedTensor(
            keys=self._names,
            values=ids_LN.reshape(-1).long(),
            lengths=self._ones[:num_ids],
            offsets=self._offsets[: num_ids + 1],
            stride=ids_LN.shape[1],
        )

    def _of_blocks(self, ids_LN: Tensor) -> KeyedJaggedTensor:
        """An id of another block is an empty bag here: its owner adds the row to the sum."""
        here_LN = (ids_LN >= self._first_L1).logical_and_(ids_LN < self._stop_L1)
        return KeyedJaggedTensor(
            keys=self._names,
            values=(ids_LN - self._first_L1)[here_LN],
            lengths=here_LN.view(-1).to(torch.int32),
            stride=ids_LN.shape[1],
        )


def id_exchange(
    collection: ShardedEmbeddingBagCollection,
    shards: Mapping[str, Sequence[Shard]],
    spec: ModelSpec,
    group: CountedGroup,
) -> IdExchange:
    """The exchange that feeds the lookups of sharded tables."""
    tables = {name: table for table, name in enumerate(spec.table_names)}
    wanted_T: list[list[int]] = [[] for _ in range(group.size())]
    lookups: list[list[Feature]] = []
    for sharding in cast(Any, collection)._embedding_shardings:
        by_rows = isinstance(sharding, BaseRwEmbeddingSharding)
        names_T: list[list[str]] = (
            [sharding.feature_names()] * group.size()
            if by_rows
            else sharding.feature_names_per_rank()
        )
        for wanted, names in zip(wanted_T, names_T, strict=True):
            wanted.extend(tables[name] for name in names)
        lookups.append(
            [
                Feature(tables[name], name, shards[name][group.rank()].rows if by_rows else None)
                for name in names_T[group.rank()]
            ]
        )
    return IdExchange(wanted_T, lookups, spec.table_rows, group)
