"""Distinct ids on their way to the trainers that hold their rows, and rows and gradients back.

    asks                                                         holds the rows
    distinct ids of a batch  ── lengths, then coded ids ──▶      one bag for each
    rows of all its ids      ◀────────── rows ─────────────      their rows
    sums for distinct ids    ──────── gradients ──────────▶      learns

Every trainer is on both sides. How many rows travel is known to both from the ids.

Shapes: B rows of a batch, F tables, D embedding dimension, K distinct ids, T trainers, L tables
that this trainer holds, N bags of each of them.
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

from dlrm_hybrid.comm.counted_group import FLOAT_BYTES, CountedGroup, split
from dlrm_hybrid.kernels.id_sets import BITS_OF_A_COUNT, BITS_OF_AN_ID, decode, encode
from dlrm_hybrid.model.distinct_ids import DistinctBags, DistinctIds, distinct_bags, distinct_ids
from dlrm_hybrid.model.embedding_codecs import Cast
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import DlrmError

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
