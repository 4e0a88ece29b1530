"""Levels of some elements of all tensors of a bucket in one section; see `kernels.levels.updates`.

    CODED   number of tables, u8 │ if they are new: tables (wire.frequencies), popularity
            (wire.popularity) │ events, coded

A section's `tensor` is the first of the bucket's, its `count` the elements of all. A receiver gets
just the elements that the sender codes. Any payload gives indices that
increase from 0 to N - 1 in their tensors and as many values, or a `SectionError`.

Shapes: K elements of T tensors of N elements in all; E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.kernels.levels.order import Order
from dlrm_hybrid.kernels.levels.rans import EVENT_BYTES, STATE_BYTES
from dlrm_hybrid.kernels.levels.updates import (
    CONTEXTS,
    MOST_EVENTS,
    SYMBOLS,
    Known,
    collect_update,
    list_update,
    quanta,
    read_update,
    write_update,
)
from dlrm_hybrid.wire.frequencies import Shape, TableReceiver, Tables, TableSender, hints_of
from dlrm_hybrid.wire.popularity import Matrices, Popularity, read_payload
from dlrm_hybrid.wire.section import Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import Elements

LIFESPAN = 1000  # messages that tables serve
_SHAPE = Shape(flags=0, contexts=CONTEXTS, symbols=SYMBOLS)
_SKIPPED = 2**14  # elements that an event skips at most


@final
class UpdateSender:
    """Codes updates of one bucket to receivers that get all of them.

    Args:
        shapes: of its tensors.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._matrices = Matrices(shapes)
        self._popularity = Popularity(self._matrices)
        self._tables = TableSender(_SHAPE, LIFESPAN)
        self._order: Order | None = None
        self._known_T = np.zeros(len(shapes), np.int64)

    def encode(self, tensor: int, elements: Elements) -> Section:
        """One section of elements whose values are levels.

        Args:
            tensor: number of the bucket's first tensor.
            elements: of all its tensors.

        Raises:
            ValueError: values of a tensor are no multiples, up to 32,767, of a power of two.
        """
        splits_E, local_K, values_K = _without_zeros(elements)
        exponents_T = np.empty(splits_E.size - 1, np.int64)
        if not quanta(splits_E, values_K, exponents_T):
            raise ValueError(f"tensor {tensor} and others: values are no levels")
        self._popularity.add(splits_E, local_K)
        told = b""
        if self._tables.is_due or self._order is None:
            told = self._popularity.payload(exponents_T)
            self._popularity.clear()
            self._order, self._known_T = _told(told, self._matrices)
        size = self._room(local_K.size)
        events_S = np.empty(size, np.uint32)
        symbols_CS = self._tables.counts.symbols_CS
        parts = (splits_E, local_K, values_K, exponents_T, self._known_T)
        listed = list_update(self._order, *parts, events_S, symbols_CS)
        head = self._tables.begin() + told
        out = np.empty(EVENT_BYTES * listed + STATE_BYTES, np.uint8)
        num_bytes = write_update(events_S, listed, self._tables.tables.starts_CE, out)
        payload = head + out[:num_bytes].tobytes()
        count = int(self._matrices.offsets_E[-1])
        return Section(tensor, Encoding.CODED, Dtype.BFLOAT16, count, payload)

    def restart(self) -> None:
        """Send tables with the next update: who receives it may have none."""
        self._tables.restart()
        self._popularity.clear()
        self._order = None

    def _room(self, elements: int) -> int:
        """For events: of elements, of skips, of the ends of groups, and of quanta."""
        count = int(self._matrices.offsets_E[-1])
        tensors = len(self._known_T)
        return MOST_EVENTS * elements + count // _SKIPPED + 3 * CONTEXTS + 2 * tensors


@final
class UpdateReceiver:
    """Reads what an `UpdateSender` has coded, all of it in its order.

    Args:
        shapes: of the tensors.
        beside: another one of the same tensors, with which it shares memory to decode in.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], beside: UpdateReceiver | None = None
    ) -> None:
        self._tables = TableReceiver(_SHAPE)
        self._known: Known | None = None
        if beside is not None:
            self._matrices = beside._matrices
            self._marks_W, self._levels_N = beside._marks_W, beside._levels_N
            return
        self._matrices = Matrices(shapes)
        count = int(self._matrices.offsets_E[-1])
        self._marks_W = np.zeros((count + 63) // 64, np.uint64)
        self._levels_N = np.empty(count, np.int16)

    def decode(self, section: Section) -> Elements:
        """The elements of all tensors.

        Raises:
            SectionError: no such section has this payload, or it needs tables that never came.
        """
        count = int(self._matrices.offsets_E[-1])
        if section.encoding is not Encoding.CODED or section.count != count:
            name = section.encoding.name
            raise section.error(f"{name} of {section.count} elements, expected CODED of {count}")
        tables, rest = self._tables.begin(section)
        if self._tables.brought:
            rest = self._popularity(rest, section, tables)
        assert self._known is not None
        exponents_T = np.empty_like(self._known.exponents_T)
        data = np.frombuffer(rest, np.uint8).copy()  # writable: one type for the kernel
        offsets_E = self._matrices.offsets_E
        found = read_update(
            data, self._known, offsets_E, self._marks_W, self._levels_N, exponents_T
        )
        if found < 0:
            self._marks_W[:] = 0
            raise section.error(f"{len(rest)} bytes are no levels of {count} elements")
        splits_E, indices_K = np.empty_like(offsets_E), np.empty(found, np.int32)
        values_K = np.empty(found, np.float32)
        collect_update(
            *(self._marks_W, self._levels_N, offsets_E, exponents_T),
            *(splits_E, indices_K, values_K),
        )
        return Elements(splits_E, indices_K, values_K)

    def _popularity(self, rest: memoryview, section: Section, tables: Tables) -> memoryview:
        """Read what came with tables, which serve nothing without it; gives what follows."""
        size = self._matrices.payload_bytes
        told = None
        if len(rest) >= size:
            told = read_payload(np.frombuffer(rest[:size], np.uint8), self._matrices)
        if told is None:
            self._tables.forget()
            raise section.error(f"{len(rest)} bytes hold no popularity of {size}")
        self._known = Known(*told, tables.starts_CE, hints_of(tables.starts_CE))
        return rest[size:]


def _told(payload: bytes, matrices: Matrices) -> tuple[Order, Int64s]:
    told = read_payload(np.frombuffer(payload, np.uint8), matrices)
    assert told is not None, "exponents of float32"
    return told


def _without_zeros(given: Elements) -> Elements:
    if given.values_K.all():
        return given
    kept_K = np.flatnonzero(given.values_K)
    offsets_E = np.searchsorted(kept_K, given.offsets_E)
    return Elements(offsets_E, given.indices_K[kept_K], given.values_K[kept_K])
