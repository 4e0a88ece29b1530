"""Levels of some elements of all tensors of a bucket in one section; see `kernels.levels.updates`.

    CODED        number of tables, u8 │ if they are new: tables (wire.frequencies), popularity │
                 events, coded
    popularity   4 bits a row, 4 bits a column: their classes │ of each tensor: u8, i16

A section's `tensor` is the first of the bucket's, its `count` the elements of all. A receiver gets
just the elements that the sender codes. Any payload gives indices that increase from 0 to N - 1 in
their tensors and as many values, or a `SectionError`.

A class is how many times less often than the mean row of its tensor a row is sent, as a power of
two plus 4: 0 for 16 times as often or more, 15 for 2048 times less or never. Of a tensor the
numbers say how seldom its elements are sent on average, as a power of two, and the exponent of its
quantum.

Shapes: K elements of T tensors, matrices of N elements in all; E = T + 1 offsets; R rows and C
columns of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Bytes, Int32s, Int64s
from dlrm_hybrid.kernels.levels.rans import EVENT_BYTES, STATE_BYTES
from dlrm_hybrid.kernels.levels.updates import (
    CLASSES,
    CONTEXTS,
    GROUPS,
    MOST_EVENTS,
    SYMBOLS,
    Codebook,
    Order,
    collect_update,
    count_places,
    list_update,
    quanta,
    read_update,
    write_update,
)
from dlrm_hybrid.wire.frequencies import Shape, TableReceiver, TableSender, hints_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import Elements

_MEAN = 4  # class of the mean row
_RAREST = 31  # as a power of two
_LOWEST, _HIGHEST = -149, 127


@final
class Matrices:
    """The shapes of the tensors that are sent together; one of another rank is a row."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        pairs = [shape if len(shape) == 2 else (1, int(np.prod(shape))) for shape in shapes]
        self.sizes_T2 = np.array(pairs, np.int64).reshape(-1, 2)
        self.row_E = _offsets(self.sizes_T2[:, 0])
        self.col_E = _offsets(self.sizes_T2[:, 1])
        self.counts_T = self.sizes_T2.prod(axis=1)
        self.offsets_E = _offsets(self.counts_T)

    @property
    def payload_bytes(self) -> int:
        """Size of the coded payload in bytes."""
        places = int(self.row_E[-1] + self.col_E[-1])
        return (places + 1) // 2 + 3 * len(self.counts_T)


@final
class Popularity:
    """Counts, by row and column, of the elements sent since they were last cleared."""

    def __init__(self, matrices: Matrices) -> None:
        self._matrices = matrices
        self._row_counts_R = np.zeros(matrices.row_E[-1], np.int64)
        self._col_counts_C = np.zeros(matrices.col_E[-1], np.int64)
        self._counts_T = np.zeros(len(matrices.counts_T), np.int64)
        self._messages = 0

    def clear(self) -> None:
        """Set all counts to 0."""
        for counts in (self._row_counts_R, self._col_counts_C, self._counts_T):
            counts[:] = 0
        self._messages = 0

    def add(self, splits_E: Int64s, local_K: Int32s) -> None:
        """Count the elements of a message."""
        matrices = self._matrices
        count_places(
            *(matrices.row_E, matrices.col_E, splits_E, local_K),
            *(self._row_counts_R, self._col_counts_C, self._counts_T),
        )
        self._messages += 1

    def payload(self, exponents_T: Int64s) -> bytes:
        """The bytes of what was counted, and of the exponents of quanta."""
        matrices = self._matrices
        rows_R = _classes(self._row_counts_R, matrices.row_E)
        cols_C = _classes(self._col_counts_C, matrices.col_E)
        classes = np.concatenate([rows_R, cols_C, np.zeros(1, np.uint8)])
        pairs = classes[: classes.size // 2 * 2].reshape(-1, 2)
        sent_T = (self._counts_T + 0.5) / np.maximum(self._messages * matrices.counts_T, 1)
        rarity_T = np.clip(np.rint(-np.log2(sent_T)), 0, _RAREST).astype(np.uint8)
        nibbles = pairs[:, 0] | pairs[:, 1] << 4
        return nibbles.tobytes() + rarity_T.tobytes() + exponents_T.astype("<i2").tobytes()


def read_payload(payload: Bytes, matrices: Matrices) -> tuple[Order, Int64s] | None:
    """The order and the exponents in a payload; None if float32 has no such exponents."""
    tensors, rows = len(matrices.counts_T), int(matrices.row_E[-1])
    places = rows + int(matrices.col_E[-1])
    nibbles, rest = np.split(payload, [(places + 1) // 2])
    classes = np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(-1).astype(np.int64)
    exponents_T = np.frombuffer(rest[tensors:].tobytes(), "<i2").astype(np.int64)
    if ((exponents_T < _LOWEST) | (exponents_T > _HIGHEST)).any():
        return None
    rarity_T = rest[:tensors].astype(np.int64)
    return order_of(matrices, classes[:rows], classes[rows:places], rarity_T), exponents_T


def order_of(matrices: Matrices, rows_R: Int64s, cols_C: Int64s, rarity_T: Int64s) -> Order:
    """The order of all elements."""
    tensors = len(matrices.counts_T)
    tensor_R = np.repeat(np.arange(tensors), matrices.sizes_T2[:, 0])
    tensor_C = np.repeat(np.arange(tensors), matrices.sizes_T2[:, 1])
    row_ranks, row_sizes_TX, row_firsts_TX, by_row_R = _ranked(tensor_R, rows_R, tensors)
    col_ranks, col_sizes_TY, col_firsts_TY, by_col_C = _ranked(tensor_C, cols_C, tensors)
    sizes_TXY = row_sizes_TX[:, :, np.newaxis] * col_sizes_TY[:, np.newaxis, :]
    class_X = np.arange(CLASSES) - _MEAN
    groups_TXY = rarity_T[:, np.newaxis, np.newaxis] + class_X[:, np.newaxis] + class_X
    groups_TXY = np.clip(groups_TXY, 0, GROUPS - 1)
    flat_B = np.flatnonzero(sizes_TXY)
    flat_B = flat_B[np.argsort(groups_TXY.reshape(-1)[flat_B], kind="stable")]
    blocks_TXY = np.full(sizes_TXY.shape, -1, np.int32)
    blocks_TXY.reshape(-1)[flat_B] = np.arange(flat_B.size)
    tensor_B, row_B, col_B = np.unravel_index(flat_B, sizes_TXY.shape)
    starts_E = _offsets(sizes_TXY.reshape(-1)[flat_B])
    counts_G = np.bincount(
        groups_TXY.reshape(-1)[flat_B], sizes_TXY.reshape(-1)[flat_B], minlength=GROUPS
    )
    parts = (
        *(tensor_B, col_sizes_TY[tensor_B, col_B]),
        *(row_firsts_TX[tensor_B, row_B], col_firsts_TY[tensor_B, col_B]),
    )
    return Order(
        row_E=matrices.row_E,
        col_E=matrices.col_E,
        rows_R2=np.stack([rows_R, row_ranks], axis=1).astype(np.int32),
        cols_C2=np.stack([cols_C, col_ranks], axis=1).astype(np.int32),
        blocks_TXY=blocks_TXY,
        starts_E=starts_E,
        blocks_B4=np.stack(parts, axis=1).astype(np.int32),
        by_row_R=(by_row_R - matrices.row_E[tensor_R]).astype(np.int32),
        by_col_C=(by_col_C - matrices.col_E[tensor_C]).astype(np.int32),
        ends_G=np.cumsum(counts_G).astype(np.int64),
    )


def _classes(counts_P: Int64s, offsets_E: Int64s) -> Bytes:
    """The classes of rows, or of columns, by how often each was sent."""
    sizes_T = np.diff(offsets_E)
    totals_T = np.diff(np.concatenate([np.zeros(1), np.cumsum(counts_P)])[offsets_E])
    # Half an element more for each: what has not been sent yet may be.
    means_T = (totals_T + 0.5 * sizes_T) / np.maximum(sizes_T, 1)
    shares_P = (counts_P + 0.5) / np.repeat(means_T, sizes_T)
    return np.clip(np.rint(_MEAN - np.log2(shares_P)), 0, CLASSES - 1).astype(np.uint8)


def _ranked(
    tensor_P: Int64s, class_P: Int64s, tensors: int
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Numbers of rows, or of columns, in their classes; sizes, first and members of all classes."""
    key_P = tensor_P * CLASSES + class_P
    sizes = np.bincount(key_P, minlength=tensors * CLASSES)
    firsts = _offsets(sizes)[:-1]
    members_P = np.argsort(key_P, kind="stable")
    ranks_P = np.empty_like(key_P)
    ranks_P[members_P] = np.arange(key_P.size) - firsts[key_P[members_P]]
    shape = (tensors, CLASSES)
    return ranks_P, sizes.reshape(shape), firsts.reshape(shape), members_P


def _offsets(sizes: Int64s) -> Int64s:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


LIFESPAN = 1000  # messages that tables serve
_SHAPE = Shape(flags=0, contexts=CONTEXTS, symbols=SYMBOLS)
_SKIPPED = 2**14  # elements that an event skips at most


@final
class UpdateSender:
    """Codes updates of one bucket to receivers that get all of them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._matrices = Matrices(shapes)
        self._popularity = Popularity(self._matrices)
        self._tables = TableSender(_SHAPE, LIFESPAN)
        self._order: Order | None = None
        self._base_exponents_T = np.zeros(len(shapes), np.int64)

    def encode(self, tensor: int, elements: Elements) -> Section:
        """One section of elements whose values are levels.

        Raises:
            ValueError: values of a tensor are no multiples, up to 32,767, of a power of two.
        """
        splits_E, local_K, values_K = _without_zeros(elements)
        exponents_T = np.empty(splits_E.size - 1, np.int64)
        if not quanta(splits_E, values_K, exponents_T):
            raise ValueError(f"tensor {tensor} and others: values are no levels")
        self._popularity.add(splits_E, local_K)
        popularity = b""
        if self._tables.is_due or self._order is None:
            popularity = self._popularity.payload(exponents_T)
            self._popularity.clear()
            self._order, self._base_exponents_T = _order_of(popularity, self._matrices)
        size = self._room(local_K.size)
        events_S = np.empty(size, np.uint32)
        symbols_CS = self._tables.counts.symbols_CS
        parts = (splits_E, local_K, values_K, exponents_T, self._base_exponents_T)
        num_events = list_update(self._order, *parts, events_S, symbols_CS)
        head = self._tables.begin() + popularity
        out = np.empty(EVENT_BYTES * num_events + STATE_BYTES, np.uint8)
        num_bytes = write_update(events_S, num_events, self._tables.tables.starts_CE, out)
        payload = head + out[:num_bytes].tobytes()
        count = int(self._matrices.offsets_E[-1])
        return Section(tensor, Encoding.CODED, Dtype.BFLOAT16, count, payload)

    def restart(self) -> None:
        """Send tables with the next update: who receives it may have none."""
        self._tables.restart()
        self._popularity.clear()
        self._order = None

    def _room(self, elements: int) -> int:
        """The most events: of elements, of skips, of the ends of groups, and of quanta."""
        count = int(self._matrices.offsets_E[-1])
        tensors = len(self._base_exponents_T)
        return MOST_EVENTS * elements + count // _SKIPPED + 3 * CONTEXTS + 2 * tensors


@final
class UpdateReceiver:
    """Reads what an `UpdateSender` has coded, all of it in its order.

    Args:
        shapes: of the tensors.
        beside: another receiver of the same tensors, with which it shares memory to decode in.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], beside: UpdateReceiver | None = None
    ) -> None:
        self._codebook: Codebook | None = None
        if beside is None:
            self._matrices = Matrices(shapes)
            count = int(self._matrices.offsets_E[-1])
            self._marks_W = np.zeros((count + 63) // 64, np.uint64)
            self._levels_N = np.empty(count, np.int16)
        else:
            self._matrices = beside._matrices
            self._marks_W, self._levels_N = beside._marks_W, beside._levels_N
        self._tables = TableReceiver(_SHAPE, beside=self._matrices.payload_bytes)

    def decode(self, section: Section) -> Elements:
        """The elements of all tensors.

        Raises:
            SectionError: no such section has this payload, or it needs tables that never came.
        """
        count = int(self._matrices.offsets_E[-1])
        if section.encoding is not Encoding.CODED or section.count != count:
            name = section.encoding.name
            raise section.error(f"{name} of {section.count} elements, expected CODED of {count}")
        tables, popularity, rest = self._tables.begin(section)
        if popularity is not None:
            contents = read_payload(np.frombuffer(popularity, np.uint8), self._matrices)
            if contents is None:
                self._tables.forget()  # they serve nothing without it
                raise section.error("an exponent of its quanta is none of float32")
            self._codebook = Codebook(*contents, tables.starts_CE, hints_of(tables.starts_CE))
        assert self._codebook is not None
        exponents_T = np.empty_like(self._codebook.exponents_T)
        data = np.frombuffer(rest, np.uint8).copy()  # writable: one type for the kernel
        offsets_E = self._matrices.offsets_E
        size = read_update(
            data, self._codebook, offsets_E, self._marks_W, self._levels_N, exponents_T
        )
        if size < 0:
            self._marks_W[:] = 0
            raise section.error(f"{len(rest)} bytes are no levels of {count} elements")
        splits_E, indices_K = np.empty_like(offsets_E), np.empty(size, np.int32)
        values_K = np.empty(size, np.float32)
        collect_update(
            *(self._marks_W, self._levels_N, offsets_E, exponents_T),
            *(splits_E, indices_K, values_K),
        )
        return Elements(splits_E, indices_K, values_K)


def _order_of(payload: bytes, matrices: Matrices) -> tuple[Order, Int64s]:
    contents = read_payload(np.frombuffer(payload, np.uint8), matrices)
    assert contents is not None, "exponents of float32"
    return contents


def _without_zeros(elements: Elements) -> Elements:
    if elements.values_K.all():
        return elements
    kept_K = np.flatnonzero(elements.values_K)
    offsets_E = np.searchsorted(kept_K, elements.offsets_E)
    return Elements(offsets_E, elements.indices_K[kept_K], elements.values_K[kept_K])
