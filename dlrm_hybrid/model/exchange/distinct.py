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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Bytes, Float32s, Int64s
from dlrm_hybrid.bags import Bags, table_offsets
from dlrm_hybrid.comm.group import FLOAT_BYTES, CountedGroup, GroupMessages, split
from dlrm_hybrid.compress.embedding.ends import (
    Held,
    HolderEnd,
    Remembered,
    RowFormat,
    RowFormats,
    TrainerEnd,
)
from dlrm_hybrid.compress.embedding.memory import Rows
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
from dlrm_hybrid.model.rows.optimizer import learning
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import blamed

ID_BYTES = 4
_MARGIN_OF_IDS = 24  # for `GroupMessages`: nineteen of twenty messages have room
_MARGIN = 6  # of rows and gradients whose sizes vary: nine of ten


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
        formats: formats of rows and gradients.

    Attributes:
        ends: the ends of this trainer in training.
    """

    def __init__(
        self,
        wanted_T: Sequence[Sequence[int]],
        spec: ModelShape,
        formats: RowFormats,
        group: CountedGroup,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._dim = spec.widths.widest
        held_T = [
            Held(tuple(held), tuple(spec.table_rows[t] for t in held), spec.widths.of(held))
            for held in wanted_T
        ]
        self.ends, self._exact = (Ends.of(rows, held_T, self._rank) for rows in formats)
        margins = (_MARGIN_OF_IDS, _MARGIN, _MARGIN)
        self._ids, self._rows, self._gradients = (GroupMessages(group, one) for one in margins)
        self._kept: KeptRows | None = None
        self._order_F = np.array([table for tables in wanted_T for table in tables], np.int64)
        self._rows_F = np.array(spec.table_rows, np.int64)[self._order_F]
        self._learns_F = learning(spec.frozen, len(spec.table_rows))[self._order_F]
        self._columns_T = [sum(held.widths.dims) for held in held_T]
        self._leaf = torch.empty(0, requires_grad=True)  # it only makes autograd call backward
        ends_T = list(accumulate(len(tables) for tables in wanted_T))
        self._held_T = [
            slice(end - len(tables), end) for tables, end in zip(wanted_T, ends_T, strict=True)
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

        Without gradients, as in evaluations, they have a format of their own.

        Args:
            looked_up: the rows that were asked for; backward updates them.
        """
        if not torch.is_grad_enabled():
            return self.send_rows(looked_up.rows_KD, request, self._exact)
        return cast(Tensor, _Travel.apply(self._leaf, looked_up, self, request))

    def send_rows(self, values_KD: Tensor, request: AskedRows, ends: Ends) -> Tensor:
        """Send rows from the holders of tables to the trainers that look up (B, F, D)."""
        rows_elsewhere = sum(request.rows_T) - request.rows_T[self._rank]
        dense_bytes = FLOAT_BYTES * self._columns_T[self._rank] * rows_elsewhere
        trainer, mine_T = ends.trainer, request.mine_T
        parts_T = _parts(values_KD, request.theirs_T)
        outgoing = {
            t: end.rows(request.theirs_T[t], parts_T[t], end.exponent)
            for t, end in ends.holders.items()
        }
        sizes = {t: trainer.size(t, mine_T[t]) for t in outgoing}
        received_T = self._swap(self._rows, outgoing, sizes, dense_bytes)
        views: list[Float32s] = []
        for t, rows in enumerate(mine_T):
            if t == self._rank:
                views.append(trainer.own_rows(t, rows, parts_T[t]))
                continue
            with blamed(f"rows of trainer {t}"):
                views.append(trainer.take(t, rows, trainer.read(t, rows, received_T[t])))
        rows_KD = np.concatenate(views)
        if request.found_K is not None and self._kept is not None:
            rows = Rows(request.mine.ids_K, request.mine.counts_F)
            rows_KD = self._kept.complete(rows, request.found_K, rows_KD)
        return request.mine.pool(torch.from_numpy(rows_KD))

    def send_gradients(self, gradient_BFD: Tensor, request: AskedRows) -> Tensor:
        """Send gradients to the holders of tables: sums for distinct ids (K, D).

        Gradients of frozen tables are not sent: they are zero there.
        """
        columns = sum(self._columns_T) - self._columns_T[self._rank]
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
        trainer, holders = self.ends.trainer, self.ends.holders
        rounded_T = trainer.round(mine_T, _parts(sum_KD, mine_T))
        outgoing = {t: trainer.encode(t, mine_T[t], rounded_T[t]) for t in holders}
        sizes = {t: trainer.size(self._rank, theirs_T[t]) for t in holders}
        received_T = self._swap(self._gradients, outgoing, sizes, dense_bytes)
        gradients: list[Float32s] = []
        for t, rows in enumerate(theirs_T):
            if t == self._rank:
                gradients.append(trainer.values(rounded_T[t]))
                continue
            with blamed(f"gradients of trainer {t}"):
                gradients.append(holders[t].gradients(rows, received_T[t]))
        return torch.from_numpy(np.concatenate(gradients))

    def _swap(
        self,
        messages: GroupMessages,
        outgoing: Mapping[int, bytes],
        sizes: Mapping[int, int | None],
        dense_bytes: int,
    ) -> Sequence[memoryview]:
        """Exchange messages, with room for lengths only if the sizes of those to come vary."""
        messages_T = [outgoing.get(t, b"") for t in range(self._group.size())]
        if None in sizes.values():
            return messages.exchange(messages_T, dense_bytes)
        sizes_T = [sizes.get(t) or 0 for t in range(len(messages_T))]
        return self._group.swap(messages_T, sizes_T, dense_bytes)

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
        incoming_T = self._ids.exchange(outgoing_T, dense_bytes)
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
        held = self._held_T[self._rank]
        return len(self._order_F) - (held.stop - held.start)


@final
@dataclass(frozen=True, slots=True)
class Ends(Remembered):
    """The ends of one trainer: as the one who looks up, and as holder for the others by number."""

    trainer: TrainerEnd
    holders: Mapping[int, HolderEnd]

    @classmethod
    def of(cls, rows: RowFormat, held_T: Sequence[Held], rank: int) -> Ends:
        """Make the ends of the trainer with this number."""
        others = [trainer for trainer in range(len(held_T)) if trainer != rank]
        holders = {trainer: rows.holder(trainer, held_T[rank]) for trainer in others}
        return cls(rows.trainer(rank, held_T), holders)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.tensors()

    @override
    def counts(self) -> Mapping[str, tuple[int, int]]:
        return self.trainer.counts()

    @override
    def load(self, values: Mapping[str, Tensor]) -> None:
        for end in (self.trainer, *self.holders.values()):
            end.load(values)


def _parts(values_KD: Tensor, rows_T: Sequence[Rows]) -> list[Float32s]:
    """Split values into the values for the rows of each end."""
    parts = split(values_KD.contiguous(), [len(rows.ids_K) for rows in rows_T])
    return [part.numpy() for part in parts]


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
        return exchange.send_rows(looked_up.rows_KD, request, exchange.ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.looked_up.update(ctx.exchange.send_gradients(gradients[0], ctx.asked))
        return None, None, None, None
