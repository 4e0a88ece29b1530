"""What one trainer remembers of all tables, in parts that are held by different ends.

In a checkpoint it is tensors `levels.<trainer>.<name>`.

Shapes: K rows of a message, L tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s
from dlrm_hybrid.compress.embedding.memory import (
    Copies,
    LevelOptions,
    Residuals,
    Rows,
    Step,
    Sum,
    first_exponent,
)
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.types import DataError

Array = NDArray[np.generic]

STEPS, LEVELS_PREFIX = "steps", "levels."
SENT, LOST = "rows.levels", "rows.lost_residuals"


@final
class Part:
    """What a trainer remembers of tables that one end holds."""

    def __init__(
        self, tables: Sequence[int], rows_L: Sequence[int], widths: Widths, most: int
    ) -> None:
        self.tables = tuple(tables)
        self.widths = widths
        self.copies = Copies(rows_L, widths.widest, most)
        self.residuals = Residuals(self.copies.slots, widths.widest)
        self.of_rows, self.of_gradients = Sum(widths), Sum(widths)

    def take(self, rows: Rows, view_KD: Float32s, fresh: Int64s) -> None:
        """Take rows that were received; `fresh` are the slots that change their row by it."""
        self.residuals.forget(fresh)
        self.of_rows.add(rows, view_KD)


@final
class TrainerMemory:
    """What a trainer remembers.

    Attributes:
        row_step: in which the next rows are to be sent to this trainer.
        gradient_step: of the last gradients.
    """

    def __init__(
        self, parts: Sequence[Part], table_rows: Sequence[int], options: LevelOptions
    ) -> None:
        self.parts = tuple(parts)
        self.row_step = Step(options.row_error, options.lifespan, 0.0)
        self.row_step.exponent = first_exponent(table_rows, options)
        self.gradient_step = Step(options.gradient_error, options.lifespan, 0.0)
        self._rows = self._elements = self._sent = self._last_lost = 0

    @classmethod
    def of_one_part(
        cls, table_rows: Sequence[int], widths: Widths, options: LevelOptions
    ) -> TrainerMemory:
        """The memory where one end holds all tables."""
        part = Part(range(len(table_rows)), table_rows, widths, options.copies_rows)
        return cls([part], table_rows, options)

    @property
    def lost(self) -> int:
        """Rows whose residuals were forgotten, because others took their slots."""
        return sum(part.residuals.lost for part in self.parts)

    def own_rows(self, place: int, rows: Rows, values_KD: Float32s) -> Float32s:
        """Round true rows of the part in this place, which this trainer holds itself."""
        part = self.parts[place]
        _, view_KD, fresh = part.copies.send(rows, values_KD, self.row_step.exponent)
        part.take(rows, view_KD, fresh)
        return view_KD

    def round(self, rows: Sequence[Rows], sums: Sequence[Float32s]) -> list[Int32s]:
        """The levels of the gradients of each part's rows; renews both steps where that is due.

        Raises:
            DivergedError: a gradient is not finite, or too large.
        """
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

    def counts(self) -> dict[str, tuple[int, int]]:
        """Since the last call: elements and those sent; rows and those of lost residuals."""
        lost = self.lost
        counts = {SENT: (self._elements, self._sent), LOST: (self._rows, lost - self._last_lost)}
        self._rows = self._elements = self._sent = 0
        self._last_lost = lost
        return counts

    def tensors(self) -> dict[str, Array]:
        """Arrays for a checkpoint, the same whoever holds a table: `<table>.slots` …"""
        arrays: dict[str, Array] = {STEPS: self._steps()}
        for part in self.parts:
            for place, table in enumerate(part.tables):
                arrays |= {f"{table}.{what}": view for what, view in _of_table(part, place).items()}
        return arrays

    def load(self, values: Mapping[str, Array]) -> None:
        """Go on from the `tensors` of a checkpoint; raises DataError if one does not fit."""
        for part in self.parts:
            for place, table in enumerate(part.tables):
                for what, view in _of_table(part, place).items():
                    copy_into(view, values, f"{table}.{what}")
        saved = np.zeros_like(self._steps())
        copy_into(saved, values, STEPS)
        messages, *of_steps = saved.tolist()
        for part in self.parts:
            part.copies.slots.messages = messages
            part.of_rows.count = part.of_gradients.count = 0
        # Sums of numbers of elements are as good in one part as in many.
        self.parts[0].of_rows.count, self.parts[0].of_gradients.count = of_steps[4:]
        self.row_step.exponent, self.gradient_step.exponent = of_steps[:2]
        self.row_step.messages, self.gradient_step.messages = of_steps[2:4]

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


def load_copies(copies: Copies, tables: Sequence[int], values: Mapping[str, Array]) -> int:
    """Make a holder's copies those that a trainer had; returns the exponent of the rows' step.

    Raises:
        DataError: an array does not fit.
    """
    for place, table in enumerate(tables):
        for what, view in _of_copies(copies, place).items():
            copy_into(view, values, f"{table}.{what}")
    copies.slots.messages = int(values[STEPS][0])
    return int(values[STEPS][1])


def copy_into(target: Array, values: Mapping[str, Array], name: str) -> None:
    """Copy the value of this name; raises DataError if it does not fit or is missing."""
    saved = values.get(name)
    if saved is None or saved.shape != target.shape or saved.dtype != target.dtype:
        actual = "nothing" if saved is None else f"{saved.dtype} {saved.shape}"
        raise DataError(f"levels {name}: {actual}, expected {target.dtype} {target.shape}")
    target[...] = saved


def _of_copies(copies: Copies, place: int) -> dict[str, Array]:
    where = copies.slots.of_table[place]
    return {"slots": copies.slots.held_S2[where], "copies": copies.values_SD[where]}


def _of_table(part: Part, place: int) -> dict[str, Array]:
    where = part.copies.slots.of_table[place]
    return {
        **_of_copies(part.copies, place),
        "residuals": part.residuals.values_SD[where],
        "row_squares": part.of_rows.squares_L[place : place + 1],
        "gradient_squares": part.of_gradients.squares_L[place : place + 1],
    }


def tensors_of(trainer: int, memory: TrainerMemory) -> dict[str, Tensor]:
    """The tensors of a trainer's memory, as a checkpoint names them."""
    head = f"{LEVELS_PREFIX}{trainer}."
    return {f"{head}{name}": torch.from_numpy(array) for name, array in memory.tensors().items()}


def values_of_trainer(trainer: int, values: Mapping[str, Tensor]) -> dict[str, Array]:
    """The arrays for `TrainerMemory.load` among the tensors of a checkpoint; may be none."""
    head = f"{LEVELS_PREFIX}{trainer}."
    tensors = {name: tensor for name, tensor in values.items() if name.startswith(head)}
    return {name.removeprefix(head): tensor.numpy() for name, tensor in tensors.items()}


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeptMemory:
    """A trainer's memory, as tables in one process save and load it.

    Attributes:
        trainer: its number.
        memory: what it remembers.
    """

    trainer: int
    memory: TrainerMemory

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors for a checkpoint."""
        return tensors_of(self.trainer, self.memory)

    def counts(self) -> dict[str, tuple[int, int]]:
        """See `TrainerMemory.counts`."""
        return self.memory.counts()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint, if that holds it."""
        if arrays := values_of_trainer(self.trainer, values):
            self.memory.load(arrays)
