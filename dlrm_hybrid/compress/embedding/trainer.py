"""Both ends of rows that travel as levels: what one trainer remembers, and its holders of it.

A trainer remembers all tables, in parts that different holders have. In a checkpoint that is
tensors `levels.<trainer>.<name>`, of which holders read what they need.

Shapes: K rows of a message, L tables, P holders, D width of the widest table (see `Widths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s
from dlrm_hybrid.compress.embedding.ends import (
    Held,
    HolderEnd,
    Message,
    Numbers,
    Read,
    RowFormat,
    TrainerEnd,
)
from dlrm_hybrid.compress.embedding.memory import (
    MOST_EXPONENT,
    Copies,
    LevelOptions,
    Residuals,
    Rows,
    Step,
    Sum,
    first_exponent,
    values_of,
)
from dlrm_hybrid.compress.embedding.messages import LevelReceiver, LevelSender
from dlrm_hybrid.types import DataError
from dlrm_hybrid.wire.section import Dtype

Array = NDArray[np.generic]

STEPS, LEVELS_PREFIX = "steps", "levels."
COPIES = ("slots", "copies")  # of each table, at both ends
# Bounds of the numbers in STEPS: messages, exponents, their messages, counts.
MOST_STEPS = (1 << 62, MOST_EXPONENT, MOST_EXPONENT, *(1 << 62,) * 4)
LEAST_STEPS = (0, -MOST_EXPONENT, -MOST_EXPONENT, 0, 0, 0, 0)
MOST_SQUARES = 1e300  # their sum over tables is finite
ROW_EXPONENTS, GRADIENT_EXPONENTS = 1, 2
SENT, LOST = "rows.levels", "rows.lost_residuals"


@final
class Part:
    """What a trainer remembers of tables that one holder has; its ends of their messages."""

    def __init__(self, held: Held, options: LevelOptions) -> None:
        self.tables, rows_L, self.widths = held
        self.copies = Copies(rows_L, self.widths.widest, options.copies_rows)
        self.residuals = Residuals(self.copies.slots, self.widths.widest)
        self.of_rows, self.of_gradients = Sum(self.widths), Sum(self.widths)
        self.sender = LevelSender(self.widths, options.lifespan)
        self.receiver = LevelReceiver(self.widths, ROW_EXPONENTS)

    def take(self, rows: Rows, view_KD: Float32s, fresh: Int64s) -> Float32s:
        """Take rows that were received; `fresh` are the slots that change their row by it."""
        self.residuals.forget(fresh)
        self.of_rows.add(rows, view_KD)
        return view_KD


@final
class TrainerMemory(TrainerEnd):
    """What the trainer with a number remembers.

    Attributes:
        row_step: in which the next rows are to be sent to this trainer.
        gradient_step: of the last gradients.
    """

    dtype = Dtype.UINT8

    def __init__(
        self, trainer: int, held_P: Sequence[Held], table_rows: Sequence[int], options: LevelOptions
    ) -> None:
        self.parts = [Part(held, options) for held in held_P]
        self._head = f"{LEVELS_PREFIX}{trainer}."
        self.row_step = Step(options.row_error, options.lifespan, 0.0)
        self.row_step.exponent = first_exponent(table_rows, options)
        self.gradient_step = Step(options.gradient_error, options.lifespan, 0.0)
        self._rows = self._elements = self._sent = self._last_lost = 0

    @property
    def lost(self) -> int:
        """Rows whose residuals were forgotten, because others took their slots."""
        return sum(part.residuals.lost for part in self.parts)

    @override
    def read(self, place: int, rows: Rows, message: Message) -> Read:
        part = self.parts[place]
        if not part.tables:
            return np.empty((0, part.widths.widest), np.int32), 0
        levels_KD, (exponent,) = part.receiver.decode(memoryview(message), rows.counts_L)
        return levels_KD, exponent

    @override
    def take(self, place: int, rows: Rows, read: Read) -> Float32s:
        part = self.parts[place]
        view_KD, fresh = part.copies.receive(rows, *read)
        return part.take(rows, view_KD, fresh)

    @override
    def own_rows(self, place: int, rows: Rows, values_KD: Float32s) -> Float32s:
        part = self.parts[place]
        _, view_KD, fresh = part.copies.send(rows, values_KD, self.row_step.exponent)
        return part.take(rows, view_KD, fresh)

    @override
    def round(self, rows: Sequence[Rows], sums: Sequence[Float32s]) -> list[Int32s]:
        """Levels of gradients; renews both steps where that is due."""
        for part, part_rows, sum_KD in zip(self.parts, rows, sums, strict=True):
            part.of_gradients.add(part_rows, sum_KD)
        self.gradient_step.renew_if_due([part.of_gradients for part in self.parts])
        self.row_step.renew_if_due([part.of_rows for part in self.parts])
        rounded = [
            part.residuals.round(part_rows, sum_KD, self.gradient_step.exponent)
            for part, part_rows, sum_KD in zip(self.parts, rows, sums, strict=True)
        ]
        self._rows += sum(map(len, rounded))
        self._elements += sum(
            part.widths.elements(own.counts_L) for part, own in zip(self.parts, rows, strict=True)
        )
        self._sent += sum(int(np.count_nonzero(levels_KD)) for levels_KD in rounded)
        return rounded

    @override
    def encode(self, place: int, rows: Rows, rounded_KD: Numbers) -> bytes:
        part, exponents = self.parts[place], [self.gradient_step.exponent, self.row_step.exponent]
        return part.sender.encode(rounded_KD, rows.counts_L, exponents) if part.tables else b""

    @override
    def values(self, rounded_KD: Numbers) -> Float32s:
        return values_of(rounded_KD, self.gradient_step.exponent)

    @override
    def counts(self) -> dict[str, tuple[int, int]]:
        """Since the last call: elements and those sent; rows and those of lost residuals."""
        lost = self.lost
        counts = {SENT: (self._elements, self._sent), LOST: (self._rows, lost - self._last_lost)}
        self._rows = self._elements = self._sent = 0
        self._last_lost = lost
        return counts

    @override
    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, the same whoever holds a table: `<table>.slots` …"""
        arrays = {STEPS: self._steps(), **self._arrays()}
        return {f"{self._head}{name}": torch.from_numpy(x) for name, x in arrays.items()}

    @override
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Resume from a checkpoint, if it holds this state; DataError if that does not fit."""
        saved = _below(self._head, values)
        for part in self.parts:
            part.sender.restart()
        if not saved:
            return
        for name, view in self._arrays().items():
            copy_into(view, saved, name)
            if name.endswith("_squares") and not 0 <= view.item() <= MOST_SQUARES:
                raise DataError(f"levels {name}: {view.item()}, expected 0 to {MOST_SQUARES:g}")
        messages, *of_steps = _steps_of(saved)
        for part in self.parts:
            part.copies.slots.messages = messages
            part.of_rows.count = part.of_gradients.count = 0
        # Sums of numbers of elements are as good in one part as in many.
        self.parts[0].of_rows.count, self.parts[0].of_gradients.count = of_steps[4:]
        self.row_step.exponent, self.gradient_step.exponent = of_steps[:2]
        self.row_step.messages, self.gradient_step.messages = of_steps[2:4]

    def _arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for part in self.parts:
            for place, table in enumerate(part.tables):
                arrays |= {f"{table}.{what}": view for what, view in _of_table(part, place).items()}
        return arrays

    def _steps(self) -> Int64s:
        counts = [
            sum(part.of_rows.count for part in self.parts),
            sum(part.of_gradients.count for part in self.parts),
        ]
        steps = (self.row_step, self.gradient_step)
        return np.array(
            [
                # A part without tables is never asked.
                max(part.copies.slots.messages for part in self.parts),
                *(step.exponent for step in steps),
                *(step.messages for step in steps),
                *counts,
            ]
        )


@final
class RowResponder(HolderEnd):
    """A holder's end for the trainer with a number, whose first rows have this exponent's step."""

    dtype = Dtype.UINT8

    def __init__(self, trainer: int, held: Held, exponent: int, options: LevelOptions) -> None:
        self._head = f"{LEVELS_PREFIX}{trainer}."
        self._tables, rows_L, self._widths = held
        self.copies = Copies(rows_L, self._widths.widest, options.copies_rows)
        self.exponent = exponent
        self._sender = LevelSender(self._widths, options.lifespan)
        self._receiver = LevelReceiver(self._widths, GRADIENT_EXPONENTS)

    @override
    def rows(self, rows: Rows, values_KD: Float32s, exponent: int) -> bytes:
        if not self._tables:
            return b""
        levels_KD, _, _ = self.copies.send(rows, values_KD, exponent)
        return self._sender.encode(levels_KD, rows.counts_L, [exponent])

    @override
    def sent(self, rows: Rows, read: Read) -> None:
        self.copies.receive(rows, *read)

    @override
    def gradients(self, rows: Rows, message: Message) -> Float32s:
        if not self._tables:
            return np.empty((0, self._widths.widest), np.float32)
        levels_KD, exponents = self._receiver.decode(memoryview(message), rows.counts_L)
        exponent, self.exponent = exponents
        return values_of(levels_KD, exponent)

    @override
    def load(self, values: Mapping[str, Tensor]) -> None:
        saved = _below(self._head, values)
        self._sender.restart()
        if not saved:
            return
        for place, table in enumerate(self._tables):
            for what, view in _of_copies(self.copies, place).items():
                copy_into(view, saved, f"{table}.{what}")
        self.copies.slots.messages, self.exponent, *_ = _steps_of(saved)


@final
@dataclass(frozen=True, slots=True)
class LevelFormat(RowFormat):
    """Rows and gradients as whole numbers of steps, of a model with these tables."""

    options: LevelOptions
    table_rows: tuple[int, ...]

    @override
    def trainer(self, trainer: int, held_P: Sequence[Held]) -> TrainerMemory:
        return TrainerMemory(trainer, held_P, self.table_rows, self.options)

    @override
    def holder(self, trainer: int, held: Held) -> RowResponder:
        exponent = first_exponent(self.table_rows, self.options)
        return RowResponder(trainer, held, exponent, self.options)


def suffixes_of_copies(tables: Iterable[int]) -> tuple[str, ...]:
    """Suffixes of the names of what a holder of some tables remembers of its trainers."""
    return (f".{STEPS}", *(f".{table}.{what}" for table in tables for what in COPIES))


def copy_into(target: Array, values: Mapping[str, Tensor], name: str) -> None:
    """Copy the value of this name; raises DataError if it does not fit or is missing."""
    saved, view = values.get(name), torch.from_numpy(target)
    if saved is None or saved.shape != view.shape or saved.dtype != view.dtype:
        actual = "nothing" if saved is None else f"{saved.dtype} {[*saved.shape]}"
        raise DataError(f"levels {name}: {actual}, expected {view.dtype} {[*view.shape]}")
    view.copy_(saved)


def _steps_of(saved: Mapping[str, Tensor]) -> list[int]:
    """The numbers that `TrainerMemory` has saved; raises DataError if they are no such."""
    steps = np.zeros(len(MOST_STEPS), np.int64)
    copy_into(steps, saved, STEPS)
    numbers: list[int] = steps.tolist()
    if not all(a <= x <= b for a, x, b in zip(LEAST_STEPS, numbers, MOST_STEPS, strict=True)):
        raise DataError(f"levels {STEPS}: {numbers}, expected {[*LEAST_STEPS]} to {[*MOST_STEPS]}")
    return numbers


def _of_copies(copies: Copies, place: int) -> dict[str, Array]:
    where = copies.slots.of_table[place]
    views = (copies.slots.held_S2[where], copies.values_SD[where])
    return dict(zip(COPIES, views, strict=True))


def _of_table(part: Part, place: int) -> dict[str, Array]:
    where = part.copies.slots.of_table[place]
    return {
        **_of_copies(part.copies, place),
        "residuals": part.residuals.values_SD[where],
        "row_squares": part.of_rows.squares_L[place : place + 1],
        "gradient_squares": part.of_gradients.squares_L[place : place + 1],
    }


def _below(head: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of the name."""
    return {name.removeprefix(head): x for name, x in values.items() if name.startswith(head)}
