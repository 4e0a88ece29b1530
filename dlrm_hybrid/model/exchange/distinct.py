"""Exchange of distinct ids, their rows and gradients, between trainers that share tables.

Each id of a batch is sent once, and rows are pooled by the trainer that looks them up:

    looks up                                                     holds the rows
    distinct ids of a batch  ──────── coded ids ──────────▶      looks them up
    rows of these, pooled    ◀────────── rows ─────────────      their rows
    sums for distinct ids    ──────── gradients ──────────▶      updates

Every trainer is on both sides. Both sides know the number of rows from the ids.

Shapes: B rows of this trainer's batch, F tables, D width of the widest (see `Widths`), K distinct
ids, T trainers, L tables that one trainer looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Bytes, Int64s
from dlrm_hybrid.bags import Bags, table_offsets
from dlrm_hybrid.comm.group import FLOAT_BYTES, CountedGroup, GroupMessages
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.kernels.gaps import (
    BITS_OF_A_COUNT,
    BITS_OF_AN_ID,
    STORE_BYTES,
    decode_ids,
    encode_ids,
)
from dlrm_hybrid.model.embeddings import (
    DistinctIds,
    DistinctLookup,
    DistinctRows,
    distinct_ids,
)
from dlrm_hybrid.model.exchange.kept import KeptRows, not_found
from dlrm_hybrid.model.exchange.levels import LevelExchange
from dlrm_hybrid.model.rows.optimizer import learning
from dlrm_hybrid.model.sharding import Cast
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.types import DlrmError

ID_BYTES = 4
_MARGIN = 24  # for `GroupMessages`: nineteen of twenty messages have room


@final
@dataclass(frozen=True, slots=True, eq=False)
class AskedRows:
    """The rows exchanged in one lookup.

    Attributes:
        mine: ids that this trainer looks up, by the trainers that hold the tables.
        mine_T: ids of `mine` that each trainer is asked for.
        found_K: slots of kept rows of `mine`, below 0 for rows asked for; None if all are.
        theirs_T: ids that each trainer looks up in the tables held here.
        rows_T: number of rows of every trainer's batch.
    """

    mine: DistinctIds
    mine_T: list[Rows]
    found_K: Int64s | None
    theirs_T: list[Rows]
    rows_T: list[int]

    def look_up(self, tables: DistinctLookup, lr: float) -> DistinctRows:
        """Look up the rows that all trainers ask for in the tables held here."""
        ids_K = np.concatenate([rows.ids_K for rows in self.theirs_T])
        return tables(ids_K, np.stack([rows.counts_L for rows in self.theirs_T]), lr)


@final
class DistinctExchange:
    """Sends each distinct id of a batch once, between trainers with table-wise sharding.

    Args:
        wanted_T: tables that each trainer holds, in the order of its lookups.
        spec: the tables, of fewer than 2**31 rows.
        casts: casts of rows, and of gradients, on the wire.
        levels: exchange for rows and gradients of training as levels; None casts them.
    """

    def __init__(
        self,
        wanted_T: Sequence[Sequence[int]],
        spec: ModelShape,
        casts: tuple[Cast, Cast],
        group: CountedGroup,
        levels: LevelExchange | None = None,
    ) -> None:
        self._group = group
        self._messages = GroupMessages(group, _MARGIN)
        self._rank = group.rank()
        self._dim = spec.widths.widest
        self._casts = casts
        self.levels = levels
        self._kept: KeptRows | None = None
        self._order_F = np.array([table for tables in wanted_T for table in tables], np.int64)
        self._rows_F = np.array(spec.table_rows, np.int64)[self._order_F]
        self._learns_F = learning(spec.frozen, len(spec.table_rows))[self._order_F]
        self._widths_T = [spec.widths.of(tables) for tables in wanted_T]
        self._num_held_T = [len(tables) for tables in wanted_T]
        self._leaf = torch.empty(0, requires_grad=True)  # it only makes autograd call backward
        ends_T = list(accumulate(self._num_held_T))
        self._held_T = [
            slice(end - count, end) for count, end in zip(self._num_held_T, ends_T, strict=True)
        ]

    def keep_rows(self) -> None:
        """Keep rows that are looked up without gradients, until the next lookup with gradients.

        No table may change before.
        """
        rows_F = self._rows_F.copy()
        rows_F[self._held_T[self._rank]] = 1  # they are here
        self._kept = KeptRows(rows_F.tolist(), self._dim)

    def ask(self, bags: Bags[Tensor]) -> AskedRows:
        """Send every trainer the ids of its tables; receive the ids of the tables held here.

        Args:
            bags: bags of this trainer's batch, which may be empty; ids are valid.

        Raises:
            DlrmError: a trainer sent invalid ids.
        """
        distinct = distinct_ids(bags, self._order_F)
        request, found_K = Rows(distinct.ids_K, distinct.counts_F), None
        if torch.is_grad_enabled():
            self._kept = None
        elif self._kept is not None:
            found_K = self._kept.find(request)
            request = not_found(request, found_K)
        counts_T = [request.counts_L[tables] for tables in self._held_T]
        parts_T = np.split(request.ids_K, np.cumsum([counts_L.sum() for counts_L in counts_T])[:-1])
        mine_T = list(map(Rows, parts_T, counts_T))
        messages_T = [
            encoded_ids(rows.ids_K, rows.counts_L, self._rows_F[tables], distinct.most)
            for rows, tables in zip(mine_T, self._held_T, strict=True)
        ]
        received_T, most_T, rows_T = self._exchange(messages_T, distinct)
        rows_L = self._rows_F[self._held_T[self._rank]]
        counts_TL = np.empty((len(received_T), len(rows_L)), np.int64)
        ids_T: list[Int64s] = []
        for trainer, message in enumerate(received_T):
            ids_K = decoded_ids(message, counts_TL[trainer], rows_L, most_T[trainer])
            if ids_K is None or rows_T[trainer] < 0:
                raise DlrmError(f"trainer {trainer} sent invalid ids for the tables held here")
            ids_T.append(ids_K)
        theirs_T = list(map(Rows, ids_T, counts_TL))
        return AskedRows(distinct, mine_T, found_K, theirs_T, rows_T)

    def answer(self, looked_up: DistinctRows, request: AskedRows) -> Tensor:
        """Send the rows that were asked for; returns the rows of this trainer's batch (B, F, D).

        Without gradients, as in evaluations, rows are cast, not sent as levels.

        Args:
            looked_up: the rows that were asked for; backward updates them.
        """
        if not torch.is_grad_enabled():
            return self.send_rows(looked_up.rows_KD, request, None)
        return cast(Tensor, _Travel.apply(self._leaf, looked_up, self, request))

    def send_rows(
        self, values_KD: Tensor, request: AskedRows, levels: LevelExchange | None
    ) -> Tensor:
        """Send rows from the holders of tables to the trainers that look up (B, F, D)."""
        rows_elsewhere = sum(request.rows_T) - request.rows_T[self._rank]
        dense_bytes = FLOAT_BYTES * sum(self._widths_T[self._rank].dims) * rows_elsewhere
        if levels is not None:
            rows_KD = levels.rows(values_KD, request.theirs_T, request.mine_T, dense_bytes)
            return request.mine.pool(rows_KD)
        of_mine, of_theirs = self._packings(request.mine_T, request.theirs_T)
        rows_KD = self._exchanged(values_KD, of_theirs, of_mine, self._casts[0], dense_bytes)
        if request.found_K is not None and self._kept is not None:
            rows = Rows(request.mine.ids_K, request.mine.counts_F)
            all_KD = self._kept.complete(rows, request.found_K, rows_KD.numpy())
            rows_KD = torch.from_numpy(all_KD)
        return request.mine.pool(rows_KD)

    def send_gradients(self, gradient_BFD: Tensor, request: AskedRows) -> Tensor:
        """Send gradients to the holders of tables: sums for distinct ids (K, D).

        Gradients of frozen tables are not sent: they are zero there.
        """
        elsewhere = [widths for t, widths in enumerate(self._widths_T) if t != self._rank]
        columns = sum(dim for widths in elsewhere for dim in widths.dims)
        dense_bytes = FLOAT_BYTES * columns * len(gradient_BFD)
        sum_KD = request.mine.sum_by_id(gradient_BFD)
        if self._learns_F.all():
            return self._send_gradients(sum_KD, request.theirs_T, request.mine_T, dense_bytes)
        pairs, tables = zip(request.mine_T, self._held_T, strict=True), self._held_T[self._rank]
        sent = [ids.of_tables(self._learns_F[of]) for ids, of in pairs]
        taken = [ids.of_tables(self._learns_F[tables]) for ids in request.theirs_T]
        is_sent_K, is_taken_K = (
            torch.from_numpy(np.concatenate([some_K for _, some_K in rows]))
            for rows in (sent, taken)
        )
        gradient_KD = sum_KD.new_zeros(len(is_taken_K), self._dim)
        gradient_KD[is_taken_K] = self._send_gradients(
            sum_KD[is_sent_K], [ids for ids, _ in taken], [ids for ids, _ in sent], dense_bytes
        )
        return gradient_KD

    def _send_gradients(
        self, sum_KD: Tensor, theirs_T: Sequence[Rows], mine_T: Sequence[Rows], dense_bytes: int
    ) -> Tensor:
        if self.levels is not None:
            return self.levels.gradients(sum_KD, theirs_T, mine_T, dense_bytes)
        of_mine, of_theirs = self._packings(mine_T, theirs_T)
        return self._exchanged(sum_KD, of_mine, of_theirs, self._casts[1], dense_bytes)

    def _packings(
        self, mine_T: Sequence[Rows], theirs_T: Sequence[Rows]
    ) -> tuple[_Packing, _Packing]:
        """Rows that this trainer looks up, by holder; and rows held here, by who looks up."""
        widths_T = [self._widths_T[self._rank]] * len(theirs_T)
        return _Packing(self._widths_T, mine_T), _Packing(widths_T, theirs_T)

    def _exchanged(
        self, values_KD: Tensor, source: _Packing, target: _Packing, codec: Cast, dense_bytes: int
    ) -> Tensor:
        """Send rows to the trainers that are to have them; returns the rows for this trainer."""
        message = codec.encode(source.widths.packed(values_KD, source.counts).flatten())
        reply = self._group.exchange(message, source.sizes, target.sizes, dense_bytes)
        return target.widths.unpacked(codec.decode(reply), target.counts)

    def _exchange(
        self, messages_T: list[Bytes], ids: DistinctIds
    ) -> tuple[list[Bytes], list[int], list[int]]:
        """Exchange messages; returns all trainers' messages, most ids of a table, and rows."""
        # With one id per bag the two numbers are the same.
        sizes = [ids.most] if ids.bags.offsets is None else [ids.most, ids.bags.rows]
        head = np.array(sizes, "<i4").tobytes()
        local = messages_T[self._rank]
        outgoing_T = [head + message.tobytes() for message in messages_T]
        outgoing_T[self._rank] = b""
        dense_bytes = ID_BYTES * self._numbers_elsewhere(ids.bags)
        incoming_T = self._messages.exchange(outgoing_T, dense_bytes)
        incoming_T[self._rank] = memoryview(head + local.tobytes())
        if ranks := [trainer for trainer, part in enumerate(incoming_T) if len(part) < len(head)]:
            raise DlrmError(f"trainer {ranks[0]} sent invalid ids for the tables held here")
        their_sizes_TX = np.array([np.frombuffer(part[: len(head)], "<i4") for part in incoming_T])
        received_T = [np.frombuffer(part[len(head) :], np.uint8).copy() for part in incoming_T]
        return received_T, their_sizes_TX[:, 0].tolist(), their_sizes_TX[:, -1].tolist()

    def _numbers_elsewhere(self, bags: Bags[Tensor]) -> int:
        """Number of ids that `IdExchange` would send to others, and of lengths if bags vary."""
        if bags.offsets is None:
            return self._num_elsewhere * bags.rows
        counts_F = np.diff(table_offsets(bags.map(Tensor.numpy)))[self._order_F]
        num_here = int(counts_F[self._held_T[self._rank]].sum())
        return bags.num_ids - num_here + self._num_elsewhere * bags.rows

    @property
    def _num_elsewhere(self) -> int:
        return len(self._order_F) - self._num_held_T[self._rank]


@final
@dataclass(frozen=True, slots=True)
class _Packing:
    """Widths and numbers of rows to or from each trainer, which are packed into a message."""

    widths_T: Sequence[Widths]
    rows_T: Sequence[Rows]

    @property
    def sizes(self) -> list[int]:
        pairs = zip(self.widths_T, self.rows_T, strict=True)
        return [widths.elements(rows.counts_L) for widths, rows in pairs]

    @property
    def widths(self) -> Widths:
        return Widths(
            tuple(dim for widths in self.widths_T for dim in widths.dims), self.widths_T[0].widest
        )

    @property
    def counts(self) -> Int64s:
        return np.concatenate([rows.counts_L for rows in self.rows_T])


def encoded_ids(ids_K: Int64s, counts_L: Int64s, rows_L: Int64s, most: int) -> Bytes:
    """Encode distinct ids of a batch: their number per table, and the gaps between them.

    Args:
        ids_K: the ids, table after table, increasing in each.
        rows_L: rows per table, fewer than 2**31 each.
        most: largest number of ids of any table in the batch, with repeats.
    """
    room_bits = BITS_OF_AN_ID * len(ids_K) + BITS_OF_A_COUNT * len(counts_L)
    out = np.empty(room_bits // 8 + 1 + STORE_BYTES, np.uint8)
    return out[: encode_ids(ids_K, counts_L, rows_L, _count_bits(rows_L, most), out)]


def decoded_ids(message: Bytes, counts_L: Int64s, rows_L: Int64s, most: int) -> Int64s | None:
    """Decode `encoded_ids`; None if the bytes are not of such a batch.

    Args:
        message: the bytes, in writable memory.
        counts_L: filled with the number of ids per table.
        most: `most` of the encoder.
    """
    if most < 0:
        return None
    # An id takes a bit at least, whatever the header says of the batch.
    ids_K = np.empty(min(most * len(rows_L), 8 * len(message)), np.int64)
    num_ids = decode_ids(message, rows_L, _count_bits(rows_L, most), ids_K, counts_L)
    return None if num_ids < 0 else ids_K[:num_ids]


def _count_bits(rows_L: Int64s, most: int) -> Int64s:
    """Bits for the number of distinct ids of each table in a batch."""
    return np.array([rows.bit_length() for rows in np.minimum(rows_L, most).tolist()], np.int64)


@final
class _Travel(torch.autograd.Function):
    """Sends rows to the trainers that look up; backward returns gradients, and updates the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        _leaf: Tensor,
        looked_up: DistinctRows,
        exchange: DistinctExchange,
        request: AskedRows,
    ) -> Tensor:
        ctx.exchange, ctx.asked, ctx.looked_up = exchange, request, looked_up
        return exchange.send_rows(looked_up.rows_KD, request, exchange.levels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.looked_up.update(ctx.exchange.send_gradients(gradients[0], ctx.asked))
        return None, None, None, None
