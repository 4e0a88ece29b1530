"""What both ends remember of the rows that one trainer asks for, and what is sent in their place.

    holder of a table                                trainer that looks up
    copies                                           copies, residuals
    row - copy, in whole steps   ── levels ──▶       copy + levels × step
    levels × step, the gradient  ◀── levels ──       gradient + residual, in whole steps

Both ends move their copies by the same arithmetic, so these are equal bit for bit, and after every
answer no element of a copy is further from the row's than half a step. What rounding leaves of a
gradient is sent later, exactly.

A step is a power of two near a fraction of the root mean square of what one trainer looks up, or
of its gradients. The trainer renews both steps and names them in its messages; sums are exact, so
they do not depend on who holds which table.

Shapes: K rows of a message, table after table, distinct and increasing in each; L tables; S slots;
D width of the widest table (see `Widths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, fsum, ldexp
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Bools, Float32s, Int32s, Int64s
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.kernels.levels.row_levels import (
    WAYS,
    add_squares,
    clear_slots,
    find_slots,
    gradient_levels,
    row_levels,
    rows_of_levels,
    scale_levels,
    take_slots,
)
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.frequencies import is_renewal

MOST_EXPONENT = 60  # of a step, up or down


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LevelOptions:
    """How finely rows and gradients are sent, and how many rows are remembered.

    Attributes:
        row_error: bound of the error of an element, over the root mean square of a trainer's rows.
        gradient_error: the same of gradients.
        copies_rows: rows of each table that a trainer remembers.
        lifespan: batches after which steps are renewed at the latest.
    """

    row_error: float
    gradient_error: float
    copies_rows: int
    lifespan: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Distinct rows of some tables.

    Attributes:
        ids_K: table after table, increasing in each.
        counts_L: how many are of each table.
    """

    ids_K: Int64s
    counts_L: Int64s

    def of_tables(self, some_L: Bools) -> tuple[Rows, Bools]:
        """The rows of some of the tables, and which of all rows (K,) they are."""
        some_K = np.repeat(some_L, self.counts_L)
        return Rows(self.ids_K[some_K], self.counts_L * some_L), some_K


@final
class Slots:
    """Which rows of some tables are remembered, and where; see `kernels.levels.row_levels`."""

    def __init__(self, rows_L: Sequence[int], most: int) -> None:
        sets_L = np.array([-(-min(rows, most) // WAYS) for rows in rows_L], np.int64)
        ends_L = np.cumsum(WAYS * sets_L)
        firsts_L = ends_L - WAYS * sets_L
        self._tables_L2 = np.stack([firsts_L, sets_L], axis=1)
        self.of_table = list(map(slice, firsts_L.tolist(), ends_L.tolist()))
        self.held_S2 = np.zeros((WAYS * int(sets_L.sum()), 2), np.int64)
        self.messages = 0

    def take(self, rows: Rows) -> tuple[Int64s, Int64s]:
        """The slots of the rows of the next message, and all slots that change their row for it."""
        self.messages += 1
        slots_K, fresh_K = np.empty_like(rows.ids_K), np.empty_like(rows.ids_K)
        where = (self._tables_L2, self.messages, self.held_S2)
        fresh = take_slots(rows.ids_K, rows.counts_L, *where, slots_K, fresh_K)
        return slots_K, fresh_K[:fresh]

    def find(self, rows: Rows) -> Int64s:
        """The slots of rows that may have been asked for some messages ago."""
        slots_K = np.empty_like(rows.ids_K)
        find_slots(rows.ids_K, rows.counts_L, self._tables_L2, self.held_S2, slots_K)
        return slots_K


@final
class Step:
    """A step that follows the root mean square of some values.

    It is renewed before messages 0, 1, 2, 4 … and every `lifespan`, by all values since; see
    `wire.frequencies.is_renewal`.

    Args:
        fraction: of the root mean square, that is half a step.
        lifespan: messages.
        square: of an element, to begin with.
    """

    def __init__(self, fraction: float, lifespan: int, square: float) -> None:
        self._factor = (2 * fraction) ** 2
        self._lifespan = lifespan
        self.exponent = self._nearest(square)
        self.messages = 0

    def renew_if_due(self, sums: Sequence[Sum]) -> None:
        """Renew the step before a message, if due; `sums` are of all squares since."""
        number, self.messages = self.messages, self.messages + 1
        if not is_renewal(number, self._lifespan):
            return
        if count := sum(s.count for s in sums):
            self.exponent = self._nearest(fsum(x for s in sums for x in s.squares_L) / count)
        for s in sums:
            s.forget()

    def _nearest(self, square: float) -> int:
        """The exponent for a mean square; exact, so the same on every machine."""
        _, exponent = frexp(square * self._factor)
        return min(max(exponent // 2, -MOST_EXPONENT), MOST_EXPONENT)


@final
class Sum:
    """Squares of the elements of some tables' rows, by table, and their number."""

    def __init__(self, widths: Widths) -> None:
        self._widths = widths
        self.squares_L = np.zeros(len(widths.dims))
        self.count = 0

    def add(self, rows: Rows, values_KD: Float32s) -> None:
        """Add the squares of a message's rows."""
        add_squares(values_KD, rows.counts_L, self.squares_L)
        self.count += self._widths.elements(rows.counts_L)

    def forget(self) -> None:
        """Begin again at 0."""
        self.squares_L[:] = 0
        self.count = 0


def first_exponent(table_rows: Sequence[int], options: LevelOptions) -> int:
    """The exponent of the first step of rows: by the initial values of all tables."""
    square = fsum(1 / (3 * rows) for rows in table_rows) / max(len(table_rows), 1)
    return Step(options.row_error, options.lifespan, square).exponent


@final
class Copies:
    """One end's copies of the rows of some tables, for one trainer."""

    def __init__(self, rows_L: Sequence[int], dim: int, most: int) -> None:
        self.slots = Slots(rows_L, most)
        self.values_SD = np.zeros((len(self.slots.held_S2), dim), np.float32)

    def send(
        self, rows: Rows, values_KD: Float32s, exponent: int
    ) -> tuple[Int32s, Float32s, Int64s]:
        """Make the copies of some rows like them.

        Returns:
            the levels, the copies, and the slots that change their row.

        Raises:
            DivergedError: a row is not finite, or too large.
        """
        slots_K, fresh = self._take(rows)
        levels_KD, view_KD = np.empty(values_KD.shape, np.int32), np.empty_like(values_KD)
        where = (slots_K, self.values_SD, levels_KD, view_KD)
        bad = row_levels(values_KD, ldexp(1.0, exponent), *where)
        if bad >= 0:
            raise DivergedError(_fault("row", rows, bad, values_KD, exponent))
        return levels_KD, view_KD, fresh

    def receive(self, rows: Rows, levels_KD: Int32s, exponent: int) -> tuple[Float32s, Int64s]:
        """Move the copies of some rows; returns them, and the slots that change their row."""
        slots_K, fresh = self._take(rows)
        view_KD = np.empty(levels_KD.shape, np.float32)
        rows_of_levels(levels_KD, ldexp(1.0, exponent), slots_K, self.values_SD, view_KD)
        return view_KD, fresh

    def _take(self, rows: Rows) -> tuple[Int64s, Int64s]:
        slots_K, fresh = self.slots.take(rows)
        self.values_SD[fresh] = 0
        return slots_K, fresh


@final
class Residuals:
    """What rounding has left of the gradients of some tables' rows."""

    def __init__(self, slots: Slots, dim: int) -> None:
        self._slots = slots
        self.values_SD = np.zeros((len(slots.held_S2), dim), np.float32)
        self._lost_1 = np.zeros(1, np.int64)

    @property
    def lost(self) -> int:
        """Rows whose residual was forgotten, because others took their slots."""
        return int(self._lost_1[0])

    def forget(self, fresh: Int64s) -> None:
        """Clear the residuals of the rows that had these slots before."""
        self._lost_1[0] += clear_slots(fresh, self.values_SD)

    def round(self, rows: Rows, sum_KD: Float32s, exponent: int) -> Int32s:
        """The levels of some rows' gradients.

        Raises:
            DivergedError: a gradient is not finite, or too large.
        """
        levels_KD = np.empty(sum_KD.shape, np.int32)
        where = (self._slots.find(rows), self.values_SD, levels_KD, self._lost_1)
        bad = gradient_levels(sum_KD, ldexp(1.0, exponent), *where)
        if bad >= 0:
            raise DivergedError(_fault("gradient", rows, bad, sum_KD, exponent))
        return levels_KD


def values_of(levels_KD: Int32s, exponent: int) -> Float32s:
    """The values of levels of gradients (K, D)."""
    values_KD = np.empty(levels_KD.shape, np.float32)
    scale_levels(levels_KD, ldexp(1.0, exponent), values_KD)
    return values_KD


def _fault(what: str, rows: Rows, bad: int, values_KD: Float32s, exponent: int) -> str:
    largest = np.abs(values_KD[bad]).max()
    return (
        f"the {what} of id {rows.ids_K[bad]} has an element of {largest}, which is no number of "
        f"steps of 2**{exponent}"
    )
