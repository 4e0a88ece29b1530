"""Ids on their way to the trainers that hold their rows, and rows and gradients back.

TorchRec's own input distribution is made for bags of any size: it sends splits, lengths and ids in
three collectives, and regroups them feature by feature. Here a bag is one id: one collective of
ids is enough (`IdExchange`; TorchRec returns the rows). `DistinctExchange` sends every id once:

    asks                                                         holds the rows
    distinct ids of a batch  ── lengths, then coded ids ──▶      one bag for each
    rows of all its ids      ◀────────── rows ─────────────      their rows
    sums for distinct ids    ──────── gradients ──────────▶      learns

Every trainer is on both sides. How many rows travel is known to both from the ids.

Shapes: B rows of this trainer's batch, F tables, D embedding dimension, K distinct ids, T trainers,
L tables that one trainer looks up, N rows of all trainers' batches or bags of each table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding

from dlrm_hybrid.comm.counted_group import FLOAT_BYTES, CountedGroup, split
from dlrm_hybrid.kernels.id_sets import BITS_OF_A_COUNT, BITS_OF_AN_ID, decode, encode
from dlrm_hybrid.model.embeddings import DistinctBags, DistinctIds, distinct_bags, distinct_ids
from dlrm_hybrid.model.sharding import Cast, Shard
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import DlrmError

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
    shardings: Sequence[Any],
    shards: Mapping[str, Sequence[Shard]],
    spec: ModelSpec,
    group: CountedGroup,
) -> Routes:
    """To the lookups of sharded tables."""
    tables = {name: table for table, name in enumerate(spec.table_names)}
    wanted_T: list[list[int]] = [[] for _ in range(group.size())]
    lookups: list[tuple[Feature, ...]] = []
    for sharding in shardings:
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


Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

ID_BYTES = 4  # as they would travel otherwise


@final
@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Which rows travel in a lookup.

    Attributes:
        mine: what this trainer wants, trainer after trainer that holds the tables.
        mine_T: how many of them each trainer holds.
        bags: what all trainers want of the tables held here.
        bags_T: how many of them each trainer wants.
        rows_T: rows of every trainer's batch.
    """

    mine: DistinctIds
    mine_T: list[int]
    bags: DistinctBags
    bags_T: list[int]
    rows_T: list[int]


@final
class DistinctExchange:
    """What table-wise trainers send each other where every id is sent once.

    Args:
        wanted_T: tables that each trainer holds, in the order of its lookups.
        spec: the tables, of fewer than 2**31 rows.
        casts: of rows, and of gradients, on the wire.
        group: of the trainers.
    """

    def __init__(
        self,
        wanted_T: Sequence[Sequence[int]],
        spec: ModelSpec,
        casts: tuple[Cast, Cast],
        group: CountedGroup,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._dim = spec.embedding_dim
        self._casts = casts
        self._order_F = np.array([table for held in wanted_T for table in held], np.int64)
        self._rows_F = np.array(spec.table_rows, np.int64)[self._order_F]
        self._num_held_T = [len(held) for held in wanted_T]
        ends_T = list(accumulate(self._num_held_T))
        self._held_T = [
            slice(end - held, end) for held, end in zip(self._num_held_T, ends_T, strict=True)
        ]

    def ask(self, ids_FB: Tensor) -> Asked:
        """Tell everybody what this trainer wants, and hear what everybody wants from it.

        Args:
            ids_FB: int64, of this trainer's batch, which may be empty; rows of their tables.

        Raises:
            DlrmError: what a trainer sent are no ids.
        """
        mine, num_rows = distinct_ids(ids_FB, self._order_F), ids_FB.shape[1]
        mine_T = [int(mine.counts_F[held].sum()) for held in self._held_T]
        parts_T = np.split(mine.ids_K, np.cumsum(mine_T)[:-1])
        messages_T = [
            _encoded(ids_K, mine.counts_F[held], self._rows_F[held], num_rows)
            for ids_K, held in zip(parts_T, self._held_T, strict=True)
        ]
        received_T, rows_T = self._exchange(messages_T, num_rows)
        rows_L = self._rows_F[self._held_T[self._rank]]
        counts_TL = np.empty((len(received_T), len(rows_L)), np.int64)
        ids_T: list[Int64s] = []
        for trainer, received in enumerate(received_T):
            ids_K = _decoded(received, counts_TL[trainer], rows_L, rows_T[trainer])
            if ids_K is None:
                raise DlrmError(f"trainer {trainer} sent what are no ids of the tables held here")
            ids_T.append(ids_K)
        bags = distinct_bags(np.concatenate(ids_T), counts_TL)
        return Asked(mine, mine_T, bags, [len(ids_K) for ids_K in ids_T], rows_T)

    def answer(self, pooled_NW: Tensor, asked: Asked) -> Tensor:
        """Send the rows that were asked for; returns those of this trainer's batch (B, F, D).

        Args:
            pooled_NW: float32 (N, L * D), looked up for the bags that were asked for.
            asked: what `ask` returned.
        """
        return cast(Tensor, _Travel.apply(pooled_NW, self, asked))

    def send_rows(self, pooled_NW: Tensor, asked: Asked) -> Tensor:
        """From where tables are to who asked (B, F, D)."""
        others = sum(asked.rows_T) - asked.rows_T[self._rank]
        dense_bytes = FLOAT_BYTES * self._dim * self._num_held_T[self._rank] * others
        codec, _ = self._casts
        given_KD = codec.encode(asked.bags.picked(pooled_NW, self._dim))
        taken_KD = self._group.exchange(given_KD, asked.bags_T, asked.mine_T, dense_bytes)
        return asked.mine.spread(codec.decode(taken_KD))

    def send_gradients(self, gradient_BFD: Tensor, asked: Asked) -> Tensor:
        """From who asked to where tables are: sums for distinct ids (K, D)."""
        dense_bytes = FLOAT_BYTES * self._dim * self._num_elsewhere * len(gradient_BFD)
        _, codec = self._casts
        given_KD = codec.encode(asked.mine.summed(gradient_BFD))
        return codec.decode(self._group.exchange(given_KD, asked.mine_T, asked.bags_T, dense_bytes))

    def _exchange(self, messages_T: list[Bytes], num_rows: int) -> tuple[list[Bytes], list[int]]:
        """Messages from everybody, and the rows of everybody's batches."""
        once_T = [1] * len(messages_T)
        lengths_T = [len(message) for message in messages_T]
        headers_T2 = torch.tensor([(length, num_rows) for length in lengths_T], dtype=torch.int32)
        told_T2 = self._group.exchange(headers_T2, once_T, once_T, 0)
        told_lengths_T, told_rows_T = cast("list[list[int]]", told_T2.t().tolist())
        given = torch.from_numpy(np.concatenate(messages_T))
        dense_bytes = ID_BYTES * self._num_elsewhere * num_rows
        taken = self._group.exchange(given, lengths_T, told_lengths_T, dense_bytes)
        received_T = [part.numpy() for part in split(taken, told_lengths_T)]
        return received_T, told_rows_T

    @property
    def _num_elsewhere(self) -> int:
        """Tables that other trainers hold."""
        return len(self._order_F) - self._num_held_T[self._rank]


def _encoded(ids_K: Int64s, counts_L: Int64s, rows_L: Int64s, num_rows: int) -> Bytes:
    room_bits = BITS_OF_AN_ID * len(ids_K) + BITS_OF_A_COUNT * len(counts_L)
    out = np.empty(room_bits // 8 + 1, np.uint8)
    return out[: encode(ids_K, counts_L, rows_L, _count_bits(rows_L, num_rows), out)]


def _decoded(message: Bytes, counts_L: Int64s, rows_L: Int64s, num_rows: int) -> Int64s | None:
    """The ids; None if the message has none, or more than such a batch can have."""
    if num_rows < 0:
        return None
    # An id takes a bit at least, whatever the header says of the batch.
    ids_K = np.empty(min(num_rows * len(rows_L), 8 * len(message)), np.int64)
    num_ids = decode(message, rows_L, _count_bits(rows_L, num_rows), ids_K, counts_L)
    return None if num_ids < 0 else ids_K[:num_ids]


def _count_bits(rows_L: Int64s, num_rows: int) -> Int64s:
    """Of the number of distinct ids of each table in a batch."""
    most_L = np.minimum(rows_L, num_rows).tolist()
    return np.array([most.bit_length() for most in most_L], np.int64)


@final
class _Travel(torch.autograd.Function):
    """Rows to who asked, one for each id; backward sums of their gradients to where tables are."""

    @staticmethod
    def forward(ctx: Any, pooled_NW: Tensor, exchange: DistinctExchange, asked: Asked) -> Tensor:
        ctx.exchange, ctx.asked, ctx.shape = exchange, asked, pooled_NW.shape
        return exchange.send_rows(pooled_NW, asked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_KD = ctx.exchange.send_gradients(gradients[0], ctx.asked)
        return ctx.asked.bags.placed(gradient_KD, ctx.shape), None, None
