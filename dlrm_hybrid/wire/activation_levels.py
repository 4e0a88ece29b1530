"""Levels of kept activations and of their gradients as sections, with tables by unit.

The payload of a section is, with its first bytes as in `wire.frequencies`,

    u8, and tables if they follow │ u16 lowest step, classes u8 each, if tables follow
        │ u8: whether signs follow, if activations │ coded (kernels.levels.activations)

A unit's byte is its class by how often it is kept, and above it, from bit 4 on, its class by its
levels. Whoever sends has counted the levels of each unit; tables of positions follow from how often
its units are kept, for the gaps between independent choices are geometric.

Shapes: N units, S symbols, G classes; K kept of B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.arrays import Bytes, Float64s, Int16s, Int32s, Int64s
from dlrm_hybrid.kernels.levels.activations import (
    CLASSES,
    CODE_BITS,
    CONTEXTS,
    CONTEXTS_OF_GRADIENTS,
    END,
    ESCAPE,
    EVENTS_OF_A_ROW,
    EVENTS_OF_AN_ELEMENT,
    FAR,
    FIRST_GAPS,
    POSITIONS,
    REACH,
    STEPS,
    SYMBOL_BITS,
    SYMBOLS,
    UnitLevels,
    UnitTables,
    decode_units,
    encode_units,
)
from dlrm_hybrid.kernels.levels.rans import EVENT_BYTES, STATE_BYTES
from dlrm_hybrid.kernels.levels.steps import count_symbols, flip
from dlrm_hybrid.wire.frequencies import Shape, TableReceiver, TableSender, hints_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

_NO_HINTS = np.zeros((1, 1), np.uint16)  # a sender needs none
_ROUNDS = 6  # of grouping
_LOWEST_OCTAVE = -10  # of the odds that a unit is kept
_PARTS = 64  # expected gaps are counted in 64ths
_LEVEL_SHIFT = 4


class Levels(NamedTuple):
    """The levels of some rows, with the step of each row.

    Attributes:
        indices_K: flat, increasing.
        levels_K: levels of the elements.
        codes_B: codes of the rows' steps; 0 for a row without a level other than 0.
    """

    indices_K: Int32s
    levels_K: Int16s
    codes_B: Int16s


class Format(NamedTuple):
    """Width of rows, bits of levels, and whether messages hold gradients.

    Attributes:
        width: N.
        bits: of a level's magnitude, at most 8.
        is_gradient: of activations that the receiver knows to be kept.
    """

    width: int
    bits: int
    is_gradient: bool

    @property
    def shape(self) -> Shape:
        """The shape of the tables."""
        return Shape(0, CONTEXTS_OF_GRADIENTS if self.is_gradient else CONTEXTS, SYMBOLS)

    @property
    def added(self) -> int:
        """The number added to a level to make a symbol; 0 where its magnitude is the symbol."""
        return 1 << self.bits if self.is_gradient else 0

    @property
    def low_bits(self) -> int:
        """The bits of a level that are not in its symbol."""
        return max(self.bits + self.is_gradient - SYMBOL_BITS, 0)


@final
@dataclass(slots=True)
class UnitSender:
    """Codes levels with tables by unit, which it sends with the messages.

    Attributes:
        format: of the messages.
        lifespan: messages that tables serve at most.
    """

    format: Format
    lifespan: int
    _sender: TableSender = field(init=False)
    _tables: UnitTables = field(init=False)
    _mean_N: Float64s = field(init=False)
    _levels_NS: Int64s = field(init=False)
    _codes: Int64s = field(init=False)
    _rows: int = field(default=0, init=False)
    _messages: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        width = self.format.width
        self._sender = TableSender(self.format.shape, self.lifespan)
        self._mean_N = np.zeros(width)
        self._levels_NS = np.zeros((width, SYMBOLS), np.int64)
        self._codes = np.zeros(1 << CODE_BITS, np.int64)

    def section(self, levels: Levels) -> Section:
        """Code the levels of some rows, which change if they are of gradients."""
        indices_K, levels_K, codes_B = levels
        width, bits, is_gradient = self.format
        rows, elements, flips_B = codes_B.size, indices_K.size, np.empty(codes_B.size, np.uint8)
        far = 0 if is_gradient else rows * width // REACH + CLASSES
        events = EVENTS_OF_AN_ELEMENT * elements + EVENTS_OF_A_ROW * rows + far
        out = np.empty(EVENT_BYTES * events + STATE_BYTES, np.uint8)
        if is_gradient:
            flip(indices_K, levels_K, width, self._mean_N, flips_B)
        is_signed = not is_gradient and bool((levels_K < 0).any())
        head, tables = self._begin(levels)
        if not is_gradient:
            head += bytes([is_signed])
        kind = UnitLevels(bits, is_gradient, is_signed)
        size = encode_units(indices_K, levels_K, codes_B, flips_B, kind, tables, out)
        payload = head + out[:size].tobytes()
        return Section(0, Encoding.DENSE, Dtype.UINT8, len(payload), payload)

    def _begin(self, levels: Levels) -> tuple[bytes, UnitTables]:
        """The first bytes of a message, and the tables to code it with."""
        indices_K, levels_K, codes_B = levels
        width, added, low_bits = self.format.width, self.format.added, self.format.low_bits
        count_symbols(indices_K, levels_K, width, added, low_bits, self._levels_NS)
        self._codes += np.bincount(codes_B, minlength=self._codes.size)
        self._rows += codes_B.size
        self._messages += 1
        if not self._sender.is_due:
            return self._sender.begin(), self._tables
        kept_class_N = self._kept_classes()
        level_class_N = group_units(self._levels_NS, CLASSES)
        counts_CS = self._sender.counts.symbols_CS
        for group in range(CLASSES):
            counts_CS[group] = self._levels_NS[level_class_N == group].sum(axis=0)
        lowest = self._count_steps(counts_CS[STEPS])
        head = self._sender.begin()
        self._tables = UnitTables(
            kept_class_N,
            level_class_N,
            self._sender.tables.starts_CE,
            _NO_HINTS,
            np.array([lowest]),
        )
        self._levels_NS[:] = self._codes[:] = self._rows = self._messages = 0
        classes_N = kept_class_N | level_class_N << _LEVEL_SHIFT
        return head + lowest.to_bytes(2, "little") + classes_N.tobytes(), self._tables

    def _kept_classes(self) -> Bytes:
        """Classes of units by how often they are kept; counts the gaps to be expected of them."""
        class_N = np.zeros(self.format.width, np.uint8)
        if self.format.is_gradient:
            return class_N
        chance_N = (self._levels_NS.sum(axis=1) + 0.5) / (self._rows + 1)
        chance_N = np.minimum(chance_N, 1 - 0.5 / (self._rows + 1))
        octave_N = np.floor(np.log2(chance_N / (1 - chance_N))).astype(np.int64)
        class_N[:] = np.clip(octave_N - _LOWEST_OCTAVE, 0, CLASSES - 1)
        for group in range(CLASSES):
            gaps_S = expected_gaps(chance_N[class_N == group], self._rows)
            gaps_S[END] = self._messages
            self._sender.counts.symbols_CS[POSITIONS + group] = np.rint(_PARTS * gaps_S)
        return class_N

    def _count_steps(self, counts_S: Int64s) -> int:
        """Count steps from the lowest code on that leaves the fewest without a symbol."""
        sums = np.cumsum(np.append(0, self._codes[1:]))
        lowest = 1 + int(np.argmax(sums[ESCAPE:] - sums[:-ESCAPE]))
        counts_S[:ESCAPE] = self._codes[lowest : lowest + ESCAPE]
        counts_S[ESCAPE] = self._codes.sum() - counts_S[:ESCAPE].sum()
        return lowest


@final
@dataclass(slots=True)
class UnitReceiver:
    """Reads what a `UnitSender` has coded.

    Attributes:
        format: of the messages.
    """

    format: Format
    _receiver: TableReceiver = field(init=False)
    _tables: UnitTables | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._receiver = TableReceiver(self.format.shape, beside=2 + self.format.width)

    def levels(self, section: Section, rows: int, kept_K: Int32s | None = None) -> Levels:
        """The levels of so many rows.

        Args:
            section: of the sender.
            rows: B.
            kept_K: flat indices of the activations that gradients are of; None if no gradients.

        Raises:
            SectionError: no sender makes such a section, or tables are missing.
        """
        tables, payload = self._begin(section)
        width, bits, is_gradient = self.format
        is_signed = False
        if not is_gradient:
            if not len(payload) or payload[0] > 1:
                raise section.error("it does not say whether signs follow")
            is_signed, payload = bool(payload[0]), payload[1:]
        indices_K = np.empty(rows * width, np.int32) if kept_K is None else kept_K
        levels_K, codes_B = np.empty(indices_K.size, np.int16), np.empty(rows, np.int16)
        data = np.frombuffer(payload.toreadonly(), np.uint8)  # kernels know one type of array
        kind = UnitLevels(bits, is_gradient, is_signed)
        size = decode_units(data, kind, tables, indices_K, levels_K, codes_B)
        if size < 0:
            raise section.error(f"{len(payload)} bytes are no levels of {rows} × {width} elements")
        if kept_K is None:
            indices_K = indices_K[:size].copy()
        return Levels(indices_K, levels_K[:size], codes_B)

    def _begin(self, section: Section) -> tuple[UnitTables, memoryview]:
        tables, classes, payload = self._receiver.begin(section)
        if classes is not None:
            lowest = int.from_bytes(classes[:2], "little")
            classes_N = np.frombuffer(classes[2:], np.uint8)
            self._tables = UnitTables(
                classes_N & np.uint8(CLASSES - 1),
                classes_N >> np.uint8(_LEVEL_SHIFT),
                tables.starts_CE,
                hints_of(tables.starts_CE),
                np.array([lowest]),
            )
        assert self._tables is not None
        return self._tables, payload


def group_units(counts_NS: Int64s, groups: int) -> Bytes:
    """Group units so that few bits are lost if those of a group share one table.

    Units begin in the order of their mean symbol, in groups that have been counted as often; then
    each goes where its symbols take the fewest bits, some times.
    """
    weight_NS: Float64s = counts_NS.astype(np.float64)
    total_N: Float64s = weight_NS.sum(axis=1)
    symbols = counts_NS.shape[1]
    prior_S = (weight_NS.sum(axis=0) + 1 / symbols) / (total_N.sum() + 1)
    share_NS = (weight_NS + 1e-9) / (total_N + symbols * 1e-9)[:, None]
    order_N = np.argsort(share_NS @ np.arange(symbols, dtype=np.float64), kind="stable")
    group_N = np.empty(len(counts_NS), np.int64)
    below_N = np.cumsum(total_N[order_N]) / (total_N.sum() + 1)
    group_N[order_N] = below_N * groups
    for _ in range(_ROUNDS):
        sums_GS = np.zeros((groups, symbols))
        np.add.at(sums_GS, group_N, weight_NS)
        sums_GS += prior_S  # what a group lacks is as rare as among all
        bits_GS = -np.log2(sums_GS / sums_GS.sum(axis=1, keepdims=True))
        group_N = np.argmin(weight_NS @ bits_GS.T, axis=1)
    return group_N.astype(np.uint8)


def expected_gaps(chance_N: Float64s, rows: int) -> Float64s:
    """How often each symbol of a class but END is expected, if its units have these chances."""
    stays_N1 = (1 - chance_N)[:, None]
    reached_NE = stays_N1**FIRST_GAPS
    passed_N = reached_NE[:, -1]
    kept_N = rows * chance_N / np.maximum(1 - passed_N, chance_N)
    counts_S = np.zeros(SYMBOLS)
    counts_S[:FAR] = kept_N @ (reached_NE[:, :-1] - reached_NE[:, 1:])
    counts_S[FAR] = min(kept_N @ passed_N, rows * chance_N.size / REACH)
    return counts_S
