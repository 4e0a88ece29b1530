"""The batches of one trainer, in the order in which it learns from them."""

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
    """Batches that wait to be learned from: handed over, or taken from a loader.

    Attributes:
        columns: that batches must have.
        trainer: whose they are.
        trainers: how many there are.
        loader: makes the iterable of each epoch; None where batches are handed over.
        epoch: which pass over the loader this is, from 1.
        taken: batches taken from the loader in this epoch.
        num_ids: ids of all batches that have been read.
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
        """Hand over the batch that is next; one that was taken ahead from the loader waits."""
        self._waiting.appendleft(batch)

    def fill(self) -> bool:
        """Whether a batch waits; takes one from the loader if none does.

        Raises:
            ConfigError: there is no loader.
            DataError: the loader has failed, or its batch is wrong.
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
        self.taken += 1  # also if it is wrong: the loader goes on after it
        self._waiting.append(self.columns.batch(given, title, self.columns.batch_size))
        return True

    @property
    def title(self) -> str:
        """Of the next batch of the loader."""
        return f"trainer {self.trainer}, epoch {self.epoch}, batch {self.taken}"

    def skip(self) -> None:
        """Leave out the batch that waits, if there is one."""
        self._waiting.clear()

    def end_epoch(self) -> bool:
        """Let the next batch be the first of a new pass; whether one that waited is left out."""
        left_out = bool(self._waiting)
        self._waiting.clear()
        self._batches = None
        return left_out

    def read(self, at: LoaderState) -> tuple[Batch, LoaderState]:
        """The batch that has waited longest, as `Loader.read` gives it; positions mean nothing."""
        batch = self._waiting.popleft()
        self.num_ids += batch.bags.num_ids
        return batch, START

    def checksum(self) -> str:
        """Of the next batch: all stages of a trainer must have the same one."""
        batch, digest = self._waiting[0], xxhash.xxh3_64()
        offsets = () if batch.bags.offsets is None else (batch.bags.offsets,)
        for array in (batch.dense_BI, batch.bags.values, *offsets, batch.label_B):
            digest.update(array.data)
        return digest.hexdigest()
