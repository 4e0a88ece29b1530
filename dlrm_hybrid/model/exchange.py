"""Ids on their way to the trainers that hold their rows, and rows and gradients back.

TorchRec's own input distribution is made for bags of any size: it sends splits, lengths and ids in
three collectives, and regroups them feature by feature. Where every bag has one id, one collective
of ids is enough, else one of lengths and one of ids (`IdExchange`; TorchRec returns the pooled
rows). `DistinctExchange` sends every id once, and pools where it looks up:

    looks up                                                     holds the rows
    distinct ids of a batch  ── lengths, then coded ids ──▶      one bag for each
    rows of these, pooled    ◀────────── rows ─────────────      their rows
    sums for distinct ids    ──────── gradients ──────────▶      updates

Every trainer is on both sides. How many rows travel is known to both from the ids.

Shapes: B rows of this trainer's batch, F tables, D embedding dimension, K distinct ids, T trainers,
L tables that one trainer looks up, N rows of all trainers' batches or bags of each table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.bags import Bags, in_order, jagged, joined, lengths_of, table_offsets
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
from dlrm_hybrid.model.sharding import Cast, Routes
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import DlrmError

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

WIRE_DTYPE = torch.int32
ID_BYTES = 4


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

        Raises:
            DlrmError: a trainer sent bags that are none.
        """
        if bags.offsets is not None:
            return self._of_jagged(bags.map(Tensor.numpy), rows_T)
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

    def _of_jagged(self, bags: Bags[Int64s], rows_T: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The lengths of bags travel first: who holds a table does not know how many ids follow."""
        asked = in_order(bags, self._order.numpy())
        mine, num_rows = self._features_T[self._rank], rows_T[self._rank]
        lengths = self._group.exchange(
            torch.from_numpy(lengths_of(asked).reshape(-1)).to(WIRE_DTYPE),
            [features * num_rows for features in self._features_T],
            [mine * rows for rows in rows_T],
        )
        theirs_T = [part.long() for part in split(lengths, [mine * rows for rows in rows_T])]
        for trainer, theirs in enumerate(theirs_T):
            if (theirs < 0).any():
                raise DlrmError(f"trainer {trainer} sent bags of fewer ids than none")
        counts_T = [int(theirs.sum()) for theirs in theirs_T]
        ends = table_offsets(asked)[np.cumsum([0, *self._features_T])]
        ids = self._group.exchange(
            torch.from_numpy(asked.values).to(WIRE_DTYPE), np.diff(ends).tolist(), counts_T
        )
        parts = zip(split(ids.long(), counts_T), theirs_T, rows_T, strict=True)
        held = joined(
            [jagged(own.numpy(), theirs.view(mine, n).numpy()) for own, theirs, n in parts]
        )
        lookups_L = np.split(np.arange(mine), np.cumsum(self._num_features_L)[:-1])
        return [
            _jagged_bags(in_order(held, tables), blocks)
            for tables, blocks in zip(lookups_L, self._blocks_L, strict=True)
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


def _jagged_bags(bags: Bags[Int64s], blocks_2L1: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `_dense_bags` and `_block_bags`: a bag has those of its ids whose rows are held here."""
    values_N, offsets = bags.values, bags.offsets
    assert offsets is not None
    if blocks_2L1 is not None:
        counts_L = np.diff(table_offsets(bags))
        first_N, stop_N = np.repeat(blocks_2L1.squeeze(2).numpy(), counts_L, axis=1)
        here_N = (values_N >= first_N) & (values_N < stop_N)
        offsets = np.concatenate([[0], np.cumsum(here_N)])[offsets]
        values_N = (values_N - first_N)[here_N]
    return torch.from_numpy(values_N), torch.from_numpy(offsets)


def check_ids(bags: Bags[Tensor], table_rows_F1: Tensor) -> None:
    """Refuse ids that are no rows; FBGEMM would end the process at another trainer."""
    ids, rows = require_ids_on_cpu(bags).values, table_rows_F1
    if bags.offsets is not None:
        counts_F = np.diff(table_offsets(bags.map(Tensor.numpy)))
        rows = table_rows_F1.flatten().repeat_interleave(torch.from_numpy(counts_F))
    is_bad = (ids < 0).logical_or_(ids >= rows)
    if is_bad.any():
        first = int(is_bad.flatten().nonzero()[0])
        starts = table_offsets(bags.map(Tensor.numpy))
        table = int(np.searchsorted(starts, first, side="right")) - 1
        raise RuntimeError(
            f"id {ids.flatten()[first]} is out of bounds: embedding.{table + 1} has num_rows = "
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
        mine = distinct_ids(bags, self._order_F)
        mine_T = [int(mine.counts_F[held].sum()) for held in self._held_T]
        parts_T = np.split(mine.ids_K, np.cumsum(mine_T)[:-1])
        messages_T = [
            encoded_ids(ids_K, mine.counts_F[held], self._rows_F[held], mine.most)
            for ids_K, held in zip(parts_T, self._held_T, strict=True)
        ]
        received_T, most_T, rows_T = self._exchange(messages_T, mine)
        rows_L = self._rows_F[self._held_T[self._rank]]
        counts_TL = np.empty((len(received_T), len(rows_L)), np.int64)
        ids_T: list[Int64s] = []
        for trainer, received in enumerate(received_T):
            ids_K = decoded_ids(received, counts_TL[trainer], rows_L, most_T[trainer])
            if ids_K is None or rows_T[trainer] < 0:
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
        return asked.mine.pool(codec.decode(taken_KD))

    def send_gradients(self, gradient_BFD: Tensor, asked: Asked) -> Tensor:
        """From those that look up to the holders of tables: sums for distinct ids (K, D)."""
        dense_bytes = FLOAT_BYTES * self._dim * self._num_elsewhere * len(gradient_BFD)
        _, codec = self._casts
        given_KD = codec.encode(asked.mine.sum_by_id(gradient_BFD))
        return codec.decode(self._group.exchange(given_KD, asked.mine_T, asked.bags_T, dense_bytes))

    def _exchange(
        self, messages_T: list[Bytes], mine: DistinctIds
    ) -> tuple[list[Bytes], list[int], list[int]]:
        """Messages from everybody, most ids of a table, and rows, of everybody's batches."""
        once_T = [1] * len(messages_T)
        lengths_T = [len(message) for message in messages_T]
        # Of bags of one id they are the same.
        sizes = (mine.most,) if mine.bags.offsets is None else (mine.most, mine.bags.rows)
        headers_TX = torch.tensor([(length, *sizes) for length in lengths_T], dtype=torch.int32)
        received_TX = self._group.exchange(headers_TX, once_T, once_T, 0)
        their_lengths_T, their_most_T, *others = cast("list[list[int]]", received_TX.t().tolist())
        given = torch.from_numpy(np.concatenate(messages_T))
        dense_bytes = ID_BYTES * self._numbers_elsewhere(mine.bags)
        taken = self._group.exchange(given, lengths_T, their_lengths_T, dense_bytes)
        received_T = [part.numpy() for part in split(taken, their_lengths_T)]
        return received_T, their_most_T, others[0] if others else their_most_T

    def _numbers_elsewhere(self, bags: Bags[Tensor]) -> int:
        """Ids that `IdExchange` would send to others, and lengths of bags where it sends them."""
        if bags.offsets is None:
            return self._num_elsewhere * bags.rows
        counts_F = np.diff(table_offsets(bags.map(Tensor.numpy)))[self._order_F]
        own = int(counts_F[self._held_T[self._rank]].sum())
        return bags.num_ids - own + self._num_elsewhere * bags.rows

    @property
    def _num_elsewhere(self) -> int:
        """Tables that other trainers hold."""
        return len(self._order_F) - self._num_held_T[self._rank]


def encoded_ids(ids_K: Int64s, counts_L: Int64s, rows_L: Int64s, most: int) -> Bytes:
    """Distinct ids of a batch as bytes: how many are of each table, and the gaps between them.

    Args:
        ids_K: table after table, increasing in each.
        counts_L: how many are of each table.
        rows_L: of the tables, fewer than 2**31 each.
        most: ids that the batch has of any table, repeated ones counted.
    """
    room_bits = BITS_OF_AN_ID * len(ids_K) + BITS_OF_A_COUNT * len(counts_L)
    out = np.empty(room_bits // 8 + 1 + STORE_BYTES, np.uint8)
    return out[: encode_ids(ids_K, counts_L, rows_L, _count_bits(rows_L, most), out)]


def decoded_ids(message: Bytes, counts_L: Int64s, rows_L: Int64s, most: int) -> Int64s | None:
    """The ids whose bytes `encoded_ids` gave; None if these are not of such a batch.

    Args:
        message: the bytes, in memory that may be written to.
        counts_L: receives how many are of each table.
        rows_L: of the tables.
        most: as the writer had it.
    """
    if most < 0:
        return None
    # An id takes a bit at least, whatever the header says of the batch.
    ids_K = np.empty(min(most * len(rows_L), 8 * len(message)), np.int64)
    num_ids = decode_ids(message, rows_L, _count_bits(rows_L, most), ids_K, counts_L)
    return None if num_ids < 0 else ids_K[:num_ids]


def _count_bits(rows_L: Int64s, most: int) -> Int64s:
    """Of the number of distinct ids of each table in a batch."""
    return np.array([one.bit_length() for one in np.minimum(rows_L, most).tolist()], np.int64)


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
