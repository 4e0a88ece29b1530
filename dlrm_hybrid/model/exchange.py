"""Ids on their way to the trainers that hold their rows, and rows and gradients back.

TorchRec's own input distribution is made for bags of any size: it sends splits, lengths and ids in
three collectives, and regroups them feature by feature. Here a bag is one id: one collective of
ids is enough (`IdExchange`; TorchRec returns the rows). `DistinctExchange` sends every id once:

    looks up                                                     holds the rows
    distinct ids of a batch  ── lengths, then coded ids ──▶      one bag for each
    rows of all its ids      ◀────────── rows ─────────────      their rows
    sums for distinct ids    ──────── gradients ──────────▶      updates

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

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.counted_group import FLOAT_BYTES, CountedGroup, split
from dlrm_hybrid.kernels.gaps import (
    BITS_OF_A_COUNT,
    BITS_OF_AN_ID,
    STORE_BYTES,
    decode_ids,
    encode_ids,
)
from dlrm_hybrid.model.embeddings import (
    DistinctBags,
    DistinctIds,
    distinct_bags,
    distinct_ids,
    require_ids_on_cpu,
)
from dlrm_hybrid.model.sharding import Cast, ShardingKind
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import DlrmError

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

WIRE_DTYPE = torch.int32
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Routes:
    """Which trainer looks up what, by lookups that each take the tables of one kernel.

    Attributes:
        wanted_T: tables that each trainer looks up, in the order of its lookups.
        num_features_L: tables of each lookup of this trainer; together as many as wanted from it.
        blocks_L: first and one past the last row that this trainer holds, of every table of a
            lookup; None where it holds all rows.
    """

    wanted_T: tuple[tuple[int, ...], ...]
    num_features_L: tuple[int, ...]
    blocks_L: tuple[tuple[tuple[int, int], ...] | None, ...]


def routes(
    shardings: Mapping[str, Any],
    blocks: Mapping[str, tuple[int, int]],
    spec: ModelSpec,
    group: CountedGroup,
) -> Routes:
    """To the lookups of sharded tables, one for each kind of sharding.

    Args:
        shardings: TorchRec's descriptions by kind.
        blocks: first and one past the last row that this trainer holds, by table, of those that
            are cut by rows.
        spec: the tables.
        group: of the trainers.
    """
    tables = {name: table for table, name in enumerate(spec.table_names)}
    wanted_T: list[list[int]] = [[] for _ in range(group.size())]
    num_features_L: list[int] = []
    blocks_L: list[tuple[tuple[int, int], ...] | None] = []
    for kind, sharding in shardings.items():
        by_rows = kind == ShardingKind.ROW_WISE
        names_T: list[list[str]] = (
            [sharding.feature_names()] * group.size()
            if by_rows
            else sharding.feature_names_per_rank()
        )
        for wanted, names in zip(wanted_T, names_T, strict=True):
            wanted.extend(tables[name] for name in names)
        mine = names_T[group.rank()]
        num_features_L.append(len(mine))
        blocks_L.append(tuple(blocks[name] for name in mine) if by_rows else None)
    return Routes(tuple(map(tuple, wanted_T)), tuple(num_features_L), tuple(blocks_L))


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
        self._num_features_L = routes.num_features_L
        self._blocks_L = [
            None if not blocks else torch.tensor(blocks).t().unsqueeze(2)
            for blocks in routes.blocks_L
        ]
        self._offsets = torch.arange(1)
        self._features_T = [len(wanted) for wanted in routes.wanted_T]
        self._order = torch.tensor([table for wanted in routes.wanted_T for table in wanted])

    def __call__(self, bags: Bags[Tensor], rows_T: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """What each lookup has to look up for the batches of all trainers, concatenated.

        Args:
            bags: of this trainer's batch; rows of their tables.
            rows_T: rows of every trainer's batch.

        Returns:
            For each lookup, as FBGEMM takes them: the ids held here, int64, and where in them the
            bag of each feature and row begins, int64 (features * N + 1,).
        """
        ids_LB = bags.values.to(WIRE_DTYPE).index_select(0, self._order)
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
        parts_LN = split(ids_LN, self._num_features_L)
        return [
            self._dense_bags(part_LN) if blocks is None else _block_bags(part_LN, *blocks)
            for part_LN, blocks in zip(parts_LN, self._blocks_L, strict=True)
        ]

    def _dense_bags(self, ids_LN: Tensor) -> tuple[Tensor, Tensor]:
        num_ids = ids_LN.numel()
        if len(self._offsets) <= num_ids:
            self._offsets = torch.arange(num_ids + 1)
        return ids_LN.reshape(-1).long(), self._offsets[: num_ids + 1]


def _block_bags(ids_LN: Tensor, first_L1: Tensor, stop_L1: Tensor) -> tuple[Tensor, Tensor]:
    """An id of another block is an empty bag here: its owner adds the row to the sum."""
    here_LN = (ids_LN >= first_L1).logical_and_(ids_LN < stop_L1)
    offsets = torch.zeros(ids_LN.numel() + 1, dtype=torch.int64)
    torch.cumsum(here_LN.view(-1), 0, out=offsets[1:])
    return (ids_LN - first_L1)[here_LN], offsets


def check_ids(bags: Bags[Tensor], table_rows_F1: Tensor) -> None:
    """Refuse ids that are no rows; FBGEMM would end the process at another trainer."""
    ids_FB = require_ids_on_cpu(bags).values
    bad_FB = (ids_FB < 0).logical_or_(ids_FB >= table_rows_F1)
    if bad_FB.any():
        table, row = (int(index) for index in bad_FB.nonzero()[0])
        raise RuntimeError(
            f"id {ids_FB[table, row]} is out of bounds: embedding.{table + 1} has num_rows = "
            f"{table_rows_F1[table].item()}"
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Which rows travel in a lookup.

    Attributes:
        mine: what this trainer looks up, by the trainers that hold the tables.
        mine_T: how many of them each trainer holds.
        bags: what all trainers look up in the tables held here.
        bags_T: how many of them each trainer looks up.
        rows_T: rows of every trainer's batch.
    """

    mine: DistinctIds
    mine_T: list[int]
    bags: DistinctBags
    bags_T: list[int]
    rows_T: list[int]


@final
class DistinctExchange:
    """Sends every distinct id of a batch once, between trainers with table-wise sharding.

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

    def ask(self, bags: Bags[Tensor]) -> Asked:
        """Send every trainer the ids of its tables; receive those of the tables held here.

        Args:
            bags: of this trainer's batch, which may be empty; rows of their tables.

        Raises:
            DlrmError: a trainer sent invalid ids.
        """
        mine, num_rows = distinct_ids(bags, self._order_F), bags.rows
        mine_T = [int(mine.counts_F[held].sum()) for held in self._held_T]
        parts_T = np.split(mine.ids_K, np.cumsum(mine_T)[:-1])
        messages_T = [
            encoded_ids(ids_K, mine.counts_F[held], self._rows_F[held], num_rows)
            for ids_K, held in zip(parts_T, self._held_T, strict=True)
        ]
        received_T, rows_T = self._exchange(messages_T, num_rows)
        rows_L = self._rows_F[self._held_T[self._rank]]
        counts_TL = np.empty((len(received_T), len(rows_L)), np.int64)
        ids_T: list[Int64s] = []
        for trainer, received in enumerate(received_T):
            ids_K = decoded_ids(received, counts_TL[trainer], rows_L, rows_T[trainer])
            if ids_K is None:
                raise DlrmError(f"trainer {trainer} sent invalid ids for the tables held here")
            ids_T.append(ids_K)
        theirs = distinct_bags(np.concatenate(ids_T), counts_TL)
        return Asked(mine, mine_T, theirs, [len(ids_K) for ids_K in ids_T], rows_T)

    def answer(self, pooled_NW: Tensor, asked: Asked) -> Tensor:
        """Send the rows that were asked for; returns those of this trainer's batch (B, F, D).

        Args:
            pooled_NW: float32 (N, L * D), looked up for the bags that were asked for.
            asked: what `ask` returned.
        """
        return cast(Tensor, _Travel.apply(pooled_NW, self, asked))

    def send_rows(self, pooled_NW: Tensor, asked: Asked) -> Tensor:
        """From the holders of tables to those that look up (B, F, D)."""
        others = sum(asked.rows_T) - asked.rows_T[self._rank]
        dense_bytes = FLOAT_BYTES * self._dim * self._num_held_T[self._rank] * others
        codec, _ = self._casts
        given_KD = codec.encode(asked.bags.gather(pooled_NW, self._dim))
        taken_KD = self._group.exchange(given_KD, asked.bags_T, asked.mine_T, dense_bytes)
        return asked.mine.expand(codec.decode(taken_KD))

    def send_gradients(self, gradient_BFD: Tensor, asked: Asked) -> Tensor:
        """From those that look up to the holders of tables: sums for distinct ids (K, D)."""
        dense_bytes = FLOAT_BYTES * self._dim * self._num_elsewhere * len(gradient_BFD)
        _, codec = self._casts
        given_KD = codec.encode(asked.mine.sum_by_id(gradient_BFD))
        return codec.decode(self._group.exchange(given_KD, asked.mine_T, asked.bags_T, dense_bytes))

    def _exchange(self, messages_T: list[Bytes], num_rows: int) -> tuple[list[Bytes], list[int]]:
        """Messages from everybody, and the rows of everybody's batches."""
        once_T = [1] * len(messages_T)
        lengths_T = [len(message) for message in messages_T]
        headers_T2 = torch.tensor([(length, num_rows) for length in lengths_T], dtype=torch.int32)
        received_T2 = self._group.exchange(headers_T2, once_T, once_T, 0)
        their_lengths_T, their_rows_T = cast("list[list[int]]", received_T2.t().tolist())
        given = torch.from_numpy(np.concatenate(messages_T))
        dense_bytes = ID_BYTES * self._num_elsewhere * num_rows
        taken = self._group.exchange(given, lengths_T, their_lengths_T, dense_bytes)
        received_T = [part.numpy() for part in split(taken, their_lengths_T)]
        return received_T, their_rows_T

    @property
    def _num_elsewhere(self) -> int:
        """Tables that other trainers hold."""
        return len(self._order_F) - self._num_held_T[self._rank]


def encoded_ids(ids_K: Int64s, counts_L: Int64s, rows_L: Int64s, num_rows: int) -> Bytes:
    """Distinct ids of a batch as bytes: how many are of each table, and the gaps between them.

    Args:
        ids_K: table after table, increasing in each.
        counts_L: how many are of each table.
        rows_L: of the tables, fewer than 2**31 each.
        num_rows: of the batch.
    """
    room_bits = BITS_OF_AN_ID * len(ids_K) + BITS_OF_A_COUNT * len(counts_L)
    out = np.empty(room_bits // 8 + 1 + STORE_BYTES, np.uint8)
    return out[: encode_ids(ids_K, counts_L, rows_L, _count_bits(rows_L, num_rows), out)]


def decoded_ids(message: Bytes, counts_L: Int64s, rows_L: Int64s, num_rows: int) -> Int64s | None:
    """The ids whose bytes `encoded_ids` gave; None if these are not of such a batch.

    Args:
        message: the bytes, in memory that may be written to.
        counts_L: receives how many are of each table.
        rows_L: of the tables.
        num_rows: of the batch.
    """
    if num_rows < 0:
        return None
    # An id takes a bit at least, whatever the header says of the batch.
    ids_K = np.empty(min(num_rows * len(rows_L), 8 * len(message)), np.int64)
    num_ids = decode_ids(message, rows_L, _count_bits(rows_L, num_rows), ids_K, counts_L)
    return None if num_ids < 0 else ids_K[:num_ids]


def _count_bits(rows_L: Int64s, num_rows: int) -> Int64s:
    """Of the number of distinct ids of each table in a batch."""
    most_L = np.minimum(rows_L, num_rows).tolist()
    return np.array([most.bit_length() for most in most_L], np.int64)


@final
class _Travel(torch.autograd.Function):
    """Rows to those that look up, one for each id; backward returns sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, pooled_NW: Tensor, exchange: DistinctExchange, asked: Asked) -> Tensor:
        ctx.exchange, ctx.asked, ctx.shape = exchange, asked, pooled_NW.shape
        return exchange.send_rows(pooled_NW, asked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_KD = ctx.exchange.send_gradients(gradients[0], ctx.asked)
        return ctx.asked.bags.scatter(gradient_KD, ctx.shape), None, None
