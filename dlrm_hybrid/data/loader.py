"""Batches from shards: shuffled for training, in file order for evaluation.

Training reads runs of consecutive rows, in a seeded order; as many runs as fit in memory make a
block, whose rows are shuffled together; batches run on over the ends of blocks. So shuffling costs
no scattered reads, rows from all days meet in a batch, and the position is three integers.

Shapes: R rows of a block, B rows of a batch, I dense columns, F categorical columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.bags import Bags, in_order, jagged, joined, lengths_of
from dlrm_hybrid.data.shards import ListRecords, Shards
from dlrm_hybrid.kernels.criteo import gather, pack
from dlrm_hybrid.rng import fold, splitmix64
from dlrm_hybrid.types import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for the model; the arrays belong to the receiver.

    Attributes:
        dense_BI: float32, dense columns, transformed.
        bags: int64, row numbers of the embedding tables.
        label_B: float32, 0 or 1.
    """

    dense_BI: npt.NDArray[np.float32]
    bags: Bags[npt.NDArray[np.int64]]
    label_B: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where the next global batch begins, alike on every trainer.

    Attributes:
        epoch: passes over the training rows before this one.
        block: blocks of this epoch, in its order, that are used up.
        row: rows of the next block, in its order, that are used up.
    """

    epoch: int
    block: int
    row: int


START = LoaderState(epoch=0, block=0, row=0)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The order of one epoch: the numbers of the runs, and the rows before each block of them."""

    number: int
    runs: npt.NDArray[np.uint32]
    starts: list[int]

    def position(self, rows_before: int) -> tuple[int, int]:
        """Block, and row in it, after so many rows of the epoch."""
        block = bisect_right(self.starts, rows_before) - 1
        return block, rows_before - self.starts[block]


Read = Callable[[LoaderState], tuple[Batch, LoaderState]]
"""`Loader.read`, of the batches of one trainer."""


class Loader:
    """Batches of the training rows, epoch after epoch.

    The order is a pure function of (seed, epoch). Every epoch gives every row at most once; the
    rows that do not fill a global batch at its end are left out (`dropped_rows`), others in every
    epoch. Holds one block in memory; not for use by two threads at once.

    Attributes:
        steps_per_epoch: global batches in one epoch.
        dropped_rows: rows left out at the end of each epoch.
        watch: is shown the ids of each batch that is read; None: nobody is.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        shuffle_block_rows: int,
        shuffle_read_rows: int,
        trainer: int = 0,
        trainers: int = 1,
    ) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            shards: opened rows.
            batch_size: rows of each trainer's batch (`train.batch_size`).
            seed: of the order (`train.seed`).
            shuffle: False gives file order (`data.shuffle`).
            shuffle_block_rows: rows in memory, shuffled together (`data.shuffle_block_rows`).
            shuffle_read_rows: consecutive rows read in one piece (`data.shuffle_read_rows`).
            trainer: which part of each global batch to read, 0 ≤ trainer < trainers.
            trainers: parts of a global batch of `trainers * batch_size` rows.

        Raises:
            ConfigError: the training rows do not fill one global batch.
        """
        self.steps_per_epoch = shards.steps_per_epoch(batch_size, trainers)
        rows, global_rows = len(shards.train_rows), trainers * batch_size
        self._shards = shards
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._run_rows = min(shuffle_read_rows, shuffle_block_rows, rows)
        self._runs_per_block = max(1, min(shuffle_block_rows, rows) // self._run_rows)
        self._trainer = trainer
        self._global_rows = global_rows
        self._rows = rows
        self._records = _Records(shards, self._run_rows * self._runs_per_block)
        self._epoch: _Epoch | None = None
        self._loaded: tuple[int, int] | None = None  # epoch and number of the block in memory
        self._order_R = np.empty(0, np.uint32)
        self.dropped_rows = rows % global_rows
        self.watch: Callable[[Bags[npt.NDArray[np.int64]]], None] | None = None

    def read(self, state: LoaderState) -> tuple[Batch, LoaderState]:
        """The batch at `state` and the state of the batch after it.

        Raises:
            DataError: see `part`.
        """
        return self.part(state, self._trainer), self.after(state)

    def part(self, state: LoaderState, trainer: int) -> Batch:
        """The batch of any trainer at `state`.

        Raises:
            DataError: `state` points past the rows; it belongs to other data or options. Or a row
                is none that `prepare` writes.
        """
        epoch, used = self._find(state)
        batch = _empty_batch(self._shards, self._batch_size)
        number, row = epoch.position(used + trainer * self._batch_size)
        filled, lists = 0, list[ListBags]()
        while filled < self._batch_size:
            order_B = self._order_of_block(epoch, number)[row : row + self._batch_size - filled]
            if not self._records.gather(order_B, filled, batch):
                rows = list(chain.from_iterable(self._runs(epoch, number)))
                raise self._shards.fault(rows[int(row)] for row in order_B)
            lists.append(self._records.lists(order_B))
            filled += len(order_B)
            number, row = number + 1, 0
        batch = self._records.with_lists(batch, lists)
        if self.watch is not None:
            self.watch(batch.bags)
        return batch

    def after(self, state: LoaderState) -> LoaderState:
        """Where the global batch after the one at `state` begins; reads nothing.

        Raises:
            DataError: `state` points past the rows.
        """
        epoch, used = self._find(state)
        if self._rows - used < 2 * self._global_rows:
            return LoaderState(epoch.number + 1, 0, 0)
        return LoaderState(epoch.number, *epoch.position(used + self._global_rows))

    def _find(self, state: LoaderState) -> tuple[_Epoch, int]:
        """The epoch that the batch at a state is of, and how many of its rows are used up."""
        epoch, used = self._located(state)
        if self._rows - used >= self._global_rows:
            return epoch, used
        return self._located(LoaderState(state.epoch + 1, 0, 0))  # saved with a smaller batch

    def _located(self, state: LoaderState) -> tuple[_Epoch, int]:
        """The order of the state's epoch, and how many of its rows are used up."""
        if self._epoch is None or self._epoch.number != state.epoch:
            self._epoch = self._plan(state.epoch)
        epoch = self._epoch
        used = -1
        if 0 <= state.block < len(epoch.starts) - 1:
            used = epoch.starts[state.block] + state.row
        if state.epoch < 0 or used < 0 or epoch.position(used) != (state.block, state.row):
            raise DataError(
                f"{state} does not fit {self._rows} training rows in blocks of"
                f" {len(self._records)} (data.shuffle_block_rows)"
            )
        return epoch, used

    def _plan(self, number: int) -> _Epoch:
        count = -(-self._rows // self._run_rows)
        runs = self._order(count, number, "runs")
        sizes = np.full(count, self._run_rows, np.int64)
        sizes[runs == count - 1] = self._rows - (count - 1) * self._run_rows
        block_sizes = np.add.reduceat(sizes, np.arange(0, count, self._runs_per_block))
        return _Epoch(number, runs, [0, *np.cumsum(block_sizes).tolist()])

    def _order_of_block(self, epoch: _Epoch, number: int) -> npt.NDArray[np.uint32]:
        """Read a block into memory, unless it is there; the order of its rows."""
        if self._loaded != (epoch.number, number):
            self._loaded = None  # until all is read: another block is overwritten
            filled = 0
            for rows in self._runs(epoch, number):
                self._records.put(filled, rows)
                filled += len(rows)
            self._order_R = self._order(filled, epoch.number, number)
            self._loaded = (epoch.number, number)
        return self._order_R

    def _runs(self, epoch: _Epoch, number: int) -> Iterator[range]:
        first_run = number * self._runs_per_block
        for run in epoch.runs[first_run : first_run + self._runs_per_block].tolist():
            first = run * self._run_rows
            yield range(first, min(first + self._run_rows, self._rows))

    def _order(self, count: int, epoch: int, name: str | int) -> npt.NDArray[np.uint32]:
        if not self._shuffle:
            return np.arange(count, dtype=np.uint32)
        return permutation(fold(self._seed, "loader", epoch, name), count)


class Ahead(NamedTuple):
    """A batch, and what comes after it.

    Attributes:
        batch: at the position asked for.
        after: position of the next one.
        coming: the batches after it, in their order.
    """

    batch: Batch
    after: LoaderState
    coming: Sequence[Batch]


def with_coming(batches: Iterable[Batch], ahead: int) -> Iterator[tuple[Batch, tuple[Batch, ...]]]:
    """Each batch, and as many of those after it, fewer at the end."""
    window: deque[Batch] = deque()
    for batch in batches:
        window.append(batch)
        if len(window) > ahead:
            yield window.popleft(), tuple(window)
    while window:
        yield window.popleft(), tuple(window)


@final
class ReadAhead:
    """Reads batches before they are due, so that others can be told their ids.

    Args:
        read: gives the batch at a position.
        ahead: how many batches after the one asked for are read.
    """

    def __init__(self, read: Read, ahead: int) -> None:
        self._read = read
        self._ahead = ahead
        self._held: deque[tuple[LoaderState, Batch, LoaderState]] = deque()

    def __call__(self, at: LoaderState) -> Ahead:
        """The batch at a position; reads on from the last one where it can."""
        if not self._held or self._held[0][0] != at:
            self._held.clear()
        position = self._held[-1][2] if self._held else at
        while len(self._held) <= self._ahead:
            batch, after = self._read(position)
            self._held.append((position, batch, after))
            position = after
        _, batch, after = self._held.popleft()
        return Ahead(batch, after, [later for _, later, _ in self._held])


def sequential_batches(shards: Shards, rows: range, batch_size: int) -> Iterator[Batch]:
    """Consecutive rows in their order, all of them; the last batch may be smaller.

    A batch of more rows than there are takes no more memory than these.

    Raises:
        DataError: a row is none that `prepare` writes.
    """
    batch_size = min(batch_size, max(1, len(rows)))
    order_B = np.arange(batch_size, dtype=np.uint32)
    records = _Records(shards, batch_size)
    for start in range(rows.start, rows.stop, batch_size):
        stop = min(start + batch_size, rows.stop)
        batch = _empty_batch(shards, stop - start)
        records.put(0, range(start, stop))
        if not records.gather(order_B[: stop - start], 0, batch):
            raise shards.fault(range(start, stop))
        yield records.with_lists(batch, [records.lists(order_B[: stop - start])])


def _empty_batch(shards: Shards, rows: int) -> Batch:
    """With room for all but the lists of multi-hot columns."""
    return Batch(
        dense_BI=np.empty((rows, shards.schema.num_dense), np.float32),
        bags=Bags(np.empty((shards.rows.ids_RF.shape[1], rows), np.int64)),
        label_B=np.empty(rows, np.float32),
    )


ListBags = list[Bags[npt.NDArray[np.int64]]]  # of some rows, of each multi-hot column


@final
class _Records:
    """Room for rows of 4-byte words side by side: label, dense values, ids; and for lists."""

    def __init__(self, shards: Shards, rows: int) -> None:
        single, self._multi_hot = shards.schema.single, shards.schema.multi_hot
        self._shards = shards
        self._floats_RW = np.empty((rows, 1 + shards.schema.num_dense + len(single)), np.float32)
        self._integers_RW = self._floats_RW.view(np.int32)
        self._table_rows_F = np.array([shards.table_rows[one] for one in single], np.int64)
        self._lists = [ListRecords(rows) for _ in self._multi_hot]
        self._order_F = np.argsort([*single, *self._multi_hot])

    def __len__(self) -> int:
        return len(self._floats_RW)

    def put(self, first: int, rows: range) -> None:
        """Take rows over, from record `first` on; from 0 on, they are the only ones.

        Raises:
            DataError: a list of ids is none that `prepare` writes.
        """
        stored = self._shards.read(rows)
        pack(*stored[:3], first, self._floats_RW, self._integers_RW)
        if self._shards.bad_lists(stored):
            raise self._shards.fault(rows)
        for records, lists in zip(self._lists, stored.lists, strict=True):
            records.put(first, lists)

    def lists(self, order_B: npt.NDArray[np.uint32]) -> ListBags:
        """The bags of multi-hot columns of records, in this order."""
        return [records.bags(order_B) for records in self._lists]

    def with_lists(self, batch: Batch, parts: Sequence[ListBags]) -> Batch:
        """A batch with the bags of multi-hot columns too, of its parts one after the other.

        Bags of expanded columns have all their ids then.
        """
        bags = batch.bags
        if self._multi_hot:
            tables = [joined(of_column) for of_column in zip(*parts, strict=True)]
            if len(bags.values):  # bags of no tables do not know their rows
                single = jagged(bags.values.reshape(-1), np.ones(bags.values.shape, np.int64))
                tables = [single, *tables]
            values_N = np.concatenate([one.values for one in tables])
            lengths_FB = np.concatenate([lengths_of(one) for one in tables])
            bags = in_order(jagged(values_N, lengths_FB), self._order_F)
        return replace(batch, bags=self._shards.expanded(bags))

    def gather(self, order_B: npt.NDArray[np.uint32], first: int, batch: Batch) -> bool:
        """Copy records to a batch, from its row `first` on; whether a model can take them."""
        return gather(
            self._floats_RW,
            self._integers_RW,
            order_B,
            first,
            batch.dense_BI,
            batch.bags.values,
            batch.label_B,
            self._table_rows_F,
        )


def permutation(seed: int, count: int) -> npt.NDArray[np.uint32]:
    """All of 0 … count - 1 in an order that depends on `seed` alone.

    Sorts the numbers by a hash of (seed, number). The number takes the hash's lowest bits, so no
    two keys are equal, every sort gives the same result, and sorting plain integers is enough.

    Args:
        seed: 0 ≤ seed < 2**64, from `rng.fold`.
        count: at most 2**32.
    """
    low_bits = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    keys = splitmix64(seed, count, first=0)
    keys &= ~low_bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & low_bits).astype(np.uint32)
