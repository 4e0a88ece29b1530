"""The loaders of a world's trainers, which the program's process reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.process import interrupts_wait
from dlrm_hybrid.types import DataError
from dlrm_hybrid.world.batches import Columns, Loader


@final
class Loaders:
    """The next batches of all trainers, each from an iterable of its own.

    Args:
        loader: makes the iterable of a trainer for one epoch.
        columns: columns that batches must have.
        trainers: number of trainers.
    """

    def __init__(self, loader: Loader, columns: Columns, trainers: int) -> None:
        self._sources = [_Source(loader, columns, trainer, trainers) for trainer in range(trainers)]
        self._fault: DataError | None = None

    def take(self) -> list[Batch] | None:
        """The next batch of each trainer; None if a trainer has no more in this epoch.

        Raises:
            DataError: loaders failed, or batches are malformed, of some trainers; the batches of
                the others wait for the next call.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        self._fill()
        batches = [source.waiting for source in self._sources if source.waiting is not None]
        if len(batches) < len(self._sources):
            return None
        for source in self._sources:
            source.waiting = None
        return batches

    def read_ahead(self) -> None:
        """Read the batches of the next call; a fault waits for it."""
        try:
            self._fill()
        except DataError as fault:
            self._fault = fault

    def end_epoch(self) -> list[int]:
        """Start all iterables anew; returns the trainers whose waiting batch is dropped."""
        return [source.trainer for source in self._sources if source.end_epoch()]

    def _fill(self) -> None:
        faults = list[DataError]()
        with interrupts_wait():  # Ctrl-C would end a loader that is a generator
            for source in self._sources:
                try:
                    source.fill()
                except DataError as fault:
                    faults.append(fault)
            if len(faults) > 1:
                raise DataError("\n".join(map(str, faults))) from faults[0]
            if faults:
                raise faults[0]


@dataclass(slots=True)
class _Source:
    """The batches of one trainer, the next of which may wait here."""

    loader: Loader
    columns: Columns
    trainer: int
    trainers: int
    waiting: Batch | None = None
    _epoch: int = 0
    _taken: int = 0
    _batches: Iterator[Any] | None = None

    def fill(self) -> None:
        """Read a batch unless one waits, or none is left."""
        if self.waiting is not None:
            return
        try:
            if self._batches is None:
                self._epoch, self._taken = self._epoch + 1, 0
                self._batches = iter(self.loader(self.trainer, self.trainers))
            data = next(self._batches)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(f"{self._title}: the loader failed: {error!r:.2000}") from error
        title = self._title
        self._taken += 1  # also if malformed: the loader goes on after it
        self.waiting = self.columns.batch(data, title, self.columns.batch_size)

    def end_epoch(self) -> bool:
        left_out = self.waiting is not None
        self.waiting = self._batches = None
        return left_out

    @property
    def _title(self) -> str:
        return f"trainer {self.trainer}, epoch {self._epoch}, batch {self._taken}"
