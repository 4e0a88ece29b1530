"""Probability tables of coded messages: counted by the sender, sent with the messages they serve.

A sender counts the symbols of what it sends. With messages 0, 1, 2, 4 … and every `lifespan` it
makes new tables of what it has counted since, that message included, and sends them with it. A
payload begins with

    u8: number of its tables, below 128; 128 more where they follow │ the tables, if so │ …

so that a receiver knows tables it lacks. A sender whose receivers may have changed begins anew.

Shapes: C flags, or contexts of symbols; S symbols, E = S + 1 offsets between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.arrays import Halves, Int64s
from dlrm_hybrid.kernels.levels.rans import HINTS, SCALE
from dlrm_hybrid.wire.section import Section

_NUMBERS = 128
_FOLLOW = 128


class Shape(NamedTuple):
    """How many tables a format has.

    Attributes:
        flags: contexts of flags.
        contexts: contexts of symbols.
        symbols: that each context has, at least 2.
    """

    flags: int
    contexts: int
    symbols: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Chances of every flag and intervals of every symbol, of 4096.

    Attributes:
        chance_C: uint16, of flags that are set, 1 to 4095.
        starts_CE: uint16, where the intervals of symbols start; from 0 to 4096, none is empty.
    """

    chance_C: Halves
    starts_CE: Halves


@final
@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """How often each flag and symbol was sent; kernels add to them.

    Attributes:
        set_C: int64, flags that were set.
        flags_C: int64, all flags.
        symbols_CS: int64.
    """

    set_C: Int64s
    flags_C: Int64s
    symbols_CS: Int64s

    @classmethod
    def of(cls, shape: Shape) -> Counts:
        """The counts before the first message: zeros."""
        none_C = np.zeros(shape.flags, np.int64)
        return cls(none_C, none_C.copy(), np.zeros((shape.contexts, shape.symbols), np.int64))

    def forget(self) -> None:
        """Set all counts to 0, as before the first message."""
        for counts in (self.set_C, self.flags_C, self.symbols_CS):
            counts[:] = 0


def is_renewal(message: int, lifespan: int) -> bool:
    """Whether what is fitted to messages is renewed with this one: 0, 1, 2, 4 … and every lifespan.

    So it adapts fast at first, when little has been seen.
    """
    return message % lifespan == 0 or (message < lifespan and not message & (message - 1))


def fitted(counts: Counts) -> Tables:
    """Tables in which what was counted takes the fewest bits, but nothing is impossible."""
    share_C = (counts.set_C + 0.5) / (counts.flags_C + 1)
    chance_C = np.clip(np.rint(share_C * SCALE), 1, SCALE - 1).astype(np.uint16)
    contexts, symbols = counts.symbols_CS.shape
    weights_CS = counts.symbols_CS + 1 / symbols
    total_C1 = weights_CS.sum(axis=1, keepdims=True)
    # Each symbol has one place of its own; rounding the sums keeps the total.
    ends_CS = np.rint(np.cumsum(weights_CS / total_C1, axis=1) * (SCALE - symbols))
    starts_CE = np.zeros((contexts, symbols + 1), np.uint16)
    starts_CE[:, 1:] = ends_CS + np.arange(1, symbols + 1)
    return Tables(chance_C, starts_CE)


def hints_of(starts_CE: Halves) -> Halves:
    """Where to begin to look for a symbol in each context, for `rans.read_hinted`."""
    places_H = np.arange(HINTS) * (SCALE // HINTS)
    hints = [np.searchsorted(starts_E, places_H, side="right") - 1 for starts_E in starts_CE]
    return np.array(hints, np.uint16)


@final
@dataclass(slots=True)
class TableSender:
    """Makes the tables of a stream of messages, and sends them when they are renewed.

    Attributes:
        shape: of the tables.
        lifespan: messages that tables serve at most.
        counts: of what was sent since the tables were made; add the message at hand, then `begin`.
        tables: in use.
    """

    shape: Shape
    lifespan: int
    counts: Counts = field(init=False)
    tables: Tables = field(init=False)
    _number: int = field(default=-1, init=False)
    _sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.counts = Counts.of(self.shape)

    @property
    def is_due(self) -> bool:
        """Whether the next message brings tables."""
        return is_renewal(self._sent, self.lifespan)

    def begin(self) -> bytes:
        """The first bytes of the next message, which `counts` has; it is coded with `tables`."""
        is_due = self.is_due
        self._sent += 1
        if not is_due:
            return bytes([self._number])
        self._number = (self._number + 1) % _NUMBERS
        self.tables = fitted(self.counts)
        self.counts.forget()
        inner_CS = self.tables.starts_CE[:, 1:-1].astype("<u2")
        parts = self.tables.chance_C.astype("<u2").tobytes() + inner_CS.tobytes()
        return bytes([_FOLLOW | self._number]) + parts

    def restart(self) -> None:
        """Send tables with the next message: who receives it may have none."""
        self.counts.forget()
        self._sent = 0


@final
@dataclass(slots=True)
class TableReceiver:
    """Keeps the tables that a `TableSender` has sent, for the messages that need them.

    Attributes:
        shape: of the tables.
        beside: bytes that come with them.
    """

    shape: Shape
    beside: int = 0
    _number: int = field(default=-1, init=False)
    _tables: Tables | None = field(default=None, init=False)

    def begin(self, section: Section) -> tuple[Tables, memoryview | None, memoryview]:
        """Tables of a message, the bytes beside them, None if they are not new, and what follows.

        Raises:
            SectionError: it was coded with tables that never came, or has none where they follow.
        """
        payload = memoryview(section.payload)
        if not len(payload):
            raise section.error("it is empty: it names no tables")
        follow, number = divmod(payload[0], _FOLLOW)
        payload, beside = payload[1:], None
        if follow:
            flags, contexts, symbols = self.shape
            size = 2 * (flags + contexts * (symbols - 1))
            end = size + self.beside
            if len(payload) < end:
                raise section.error(f"{len(payload)} bytes hold no tables of {end}")
            self._tables = self._read(np.frombuffer(payload[:size], "<u2"), section)
            self._number = number
            beside, payload = payload[size:end], payload[end:]
        if self._tables is None or number != self._number:
            present = "none" if self._tables is None else f"number {self._number}"
            raise section.error(f"it was coded with tables {number}; this rank has {present}")
        return self._tables, beside, payload

    def forget(self) -> None:
        """Read nothing until tables come, since what came with the last ones was no good."""
        self._tables = None

    def _read(self, numbers: Halves, section: Section) -> Tables:
        flags, contexts, symbols = self.shape
        starts_CE = np.zeros((contexts, symbols + 1), np.uint16)
        starts_CE[:, 1:-1] = numbers[flags:].reshape(contexts, symbols - 1)
        starts_CE[:, -1] = SCALE
        tables = Tables(numbers[:flags].astype(np.uint16), starts_CE)
        is_rising = (np.diff(starts_CE.astype(np.int64), axis=1) > 0).all()
        if not is_rising or not ((tables.chance_C > 0) & (tables.chance_C < SCALE)).all():
            raise section.error("its tables are no probabilities")
        return tables
