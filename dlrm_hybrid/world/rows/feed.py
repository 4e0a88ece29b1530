"""The batches of one trainer, in training order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import xxhash

from dlrm_hybrid.data.loader import START, Batch, LoaderState
from dlrm_hybrid.types import ConfigError, DataError
from dlrm_hybrid.world.rows.batches import Columns, Loader


@final
@dataclass(slots=True)
class Feed:
    """Batches that wait for training: handed over, or taken from a loader.

    Attributes:
        columns: columns that batches must have.
        trainer: number of the trainer.
        trainers: number of trainers.
        loader: makes the iterable of each epoch; None if batches are handed over.
        epoch: number of the pass over the loader, from 1.
        taken: number of batches taken from the loader in this epoch.
        num_ids: number of ids of all batches read.
    """

    columns: Columns
    trainer: int
    trainers: int
    loader: Loader | None = None
    epoch: int = 0
    taken: int = 0
    num_ids: int = 0
    _waiting: deque[Batch] = field(default_factory=deque[Batch])
    _batches: Iterator[Any] | None = None

    def put(self, batch: Batch) -> None:
        """Hand over the next batch; one that was taken from the loader ahead waits."""
        self._waiting.appendleft(batch)

    def fill(self) -> bool:
        """Take a batch from the loader unless one waits; False if the loader has no more.

        Raises:
            ConfigError: there is no loader.
            DataError: the loader failed, or its batch is malformed.
        """
        if self._waiting:
            return True
        if self.loader is None:
            raise ConfigError("loader = None: batches of a step must be given to it")
        try:
            if self._batches is None:
                self.epoch, self.taken = self.epoch + 1, 0
                self._batches = iter(self.loader(self.trainer, self.trainers))
            given = next(self._batches)
        except StopIteration:
            return False
        except Exception as error:
            raise DataError(f"{self.title}: the loader failed: {error!r:.2000}") from error
        title = self.title
        self.taken += 1  # also if malformed: the loader goes on after it
        self._waiting.append(self.columns.batch(given, title, self.columns.batch_size))
        return True

    @property
    def title(self) -> str:
        """Name of the next batch of the loader."""
        return f"trainer {self.trainer}, epoch {self.epoch}, batch {self.taken}"

    def skip(self) -> None:
        """Drop the waiting batch, if any."""
        self._waiting.clear()

    def end_epoch(self) -> bool:
        """Begin a new pass with the next batch; returns whether a waiting one is dropped."""
        left_out = bool(self._waiting)
        self._waiting.clear()
        self._batches = None
        return left_out

    def read(self, at: LoaderState) -> tuple[Batch, LoaderState]:
        """Take the batch that waits longest, as `Loader.read`; positions are not used."""
        batch = self._waiting.popleft()
        self.num_ids += batch.bags.num_ids
        return batch, START

    def checksum(self) -> str:
        """Checksum of the next batch, which all stages of a trainer must share."""
        batch, digest = self._waiting[0], xxhash.xxh3_64()
        offsets = () if batch.bags.offsets is None else (batch.bags.offsets,)
        for array in (batch.dense_BI, batch.bags.values, *offsets, batch.label_B):
            digest.update(array.data)
        return digest.hexdigest()
