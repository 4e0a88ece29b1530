"""Ids on their way to the trainers that hold their rows.

TorchRec's own input distribution is made for bags of any size: it sends splits, lengths and ids in
three collectives, and regroups them feature by feature. Here a bag is one id: one collective of
ids is enough.

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

from dlrm_hybrid.comm.counted_group import CountedGroup, split
from dlrm_hybrid.model.embedding_plan import Shard
from dlrm_hybrid.model.spec import ModelSpec

WIRE_DTYPE = torch.int32


@dataclass(frozen=True, slots=True)
class Feature:
    """A table that this trainer looks up.

    Attributes:
        table: position in the model.
        rows: first and one past the last of the block it holds; None: it holds all rows.
    """

    table: int
    rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Routes:
    """Who looks up what.

    Attributes:
        wanted_T: tables that each trainer looks up, in the order of its lookups.
        lookups: the features of this trainer's lookups; together as many as wanted from it.
    """

    wanted_T: tuple[tuple[int, ...], ...]
    lookups: tuple[tuple[Feature, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """L features of N rows each, as FBGEMM takes them.

    Attributes:
        ids: int64, of the rows held here.
        offsets: int64 (L * N + 1,), where in `ids` the bag of each feature and row begins.
        num_rows: N.
    """

    ids: Tensor
    offsets: Tensor
    num_rows: int


@final
class IdExchange:
    """Sends ids to where they are looked up.

    Args:
        routes: of this trainer.
        group: of the trainers.
    """

    def __init__(self, routes: Routes, group: CountedGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._lookups = tuple(_Lookup(features) for features in routes.lookups)
        self._features_T = [len(wanted) for wanted in routes.wanted_T]
        self._order = torch.tensor([table for wanted in routes.wanted_T for table in wanted])

    def __call__(self, ids_FB: Tensor, rows_T: Sequence[int]) -> list[Bags]:
        """What each lookup has to look up for all trainers' batches, one after the other.

        Args:
            ids_FB: int64, of this trainer's batch; rows of their tables.
            rows_T: rows of every trainer's batch.
        """
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
        parts_LN = split(ids_LN, [lookup.num_features for lookup in self._lookups])
        return [
            lookup.bags_of(part_LN) for lookup, part_LN in zip(self._lookups, parts_LN, strict=True)
        ]


@final
class _Lookup:
    """Turns ids into what one of FBGEMM's kernels takes."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.num_features = len(features)
        blocks = [feature.rows for feature in features if feature.rows is not None]
        self._has_blocks = bool(blocks)
        if blocks:
            self._first_L1, self._stop_L1 = torch.tensor(blocks).t().unsqueeze(2)
        self._offsets = torch.arange(1)

    def bags_of(self, ids_LN: Tensor) -> Bags:
        if self._has_blocks:
            return self._of_blocks(ids_LN)
        num_ids = ids_LN.numel()
        if len(self._offsets) <= num_ids:
            self._offsets = torch.arange(num_ids + 1)
        return Bags(ids_LN.reshape(-1).long(), self._offsets[: num_ids + 1], ids_LN.shape[1])

    def _of_blocks(self, ids_LN: Tensor) -> Bags:
        """An id of another block is an empty bag here: its owner adds the row to the sum."""
        here_LN = (ids_LN >= self._first_L1).logical_and_(ids_LN < self._stop_L1)
        offsets = torch.zeros(ids_LN.numel() + 1, dtype=torch.int64)
        torch.cumsum(here_LN.view(-1), 0, out=offsets[1:])
        return Bags((ids_LN - self._first_L1)[here_LN], offsets, ids_LN.shape[1])


def routes(
    collection: ShardedEmbeddingBagCollection,
    shards: Mapping[str, Sequence[Shard]],
    spec: ModelSpec,
    group: CountedGroup,
) -> Routes:
    """To the lookups of sharded tables."""
    tables = {name: table for table, name in enumerate(spec.table_names)}
    wanted_T: list[list[int]] = [[] for _ in range(group.size())]
    lookups: list[tuple[Feature, ...]] = []
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
            tuple(
                Feature(tables[name], shards[name][group.rank()].rows if by_rows else None)
                for name in names_T[group.rank()]
            )
        )
    return Routes(tuple(tuple(wanted) for wanted in wanted_T), tuple(lookups))


@final
class IdCheck:
    """Refuses ids that are no rows; FBGEMM would end the process at another trainer."""

    def __init__(self, table_rows: Sequence[int]) -> None:
        self._rows_F1 = torch.tensor(table_rows).unsqueeze(1)

    def __call__(self, ids_FB: Tensor) -> None:
        """Raises RuntimeError if an id is not a row of its table."""
        bad_FB = (ids_FB < 0).logical_or_(ids_FB >= self._rows_F1)
        if bad_FB.any():
            table, row = (int(index) for index in bad_FB.nonzero()[0])
            raise RuntimeError(
                f"id {ids_FB[table, row]} is out of bounds: embedding.{table + 1} has num_rows = "
                f"{self._rows_F1[table].item()}"
            )
