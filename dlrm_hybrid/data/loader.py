"""Batches from shards: shuffled for training, in file order for evaluation.

Training reads runs of consecutive rows in a seeded order. As many runs as fit in memory make a
block, whose rows are shuffled together; a batch may span blocks. So shuffling needs no scattered
reads, a batch mixes rows of all days, and the position of the loader is three integers.

Shapes: R rows of a block, B rows of a batch, I dense columns, F categorical columns, L labels if
there are several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int64s, Words
from dlrm_hybrid.bags import Bags, in_order, jagged, joined, lengths_of, part, weights_of_all
from dlrm_hybrid.data.shards import ListRecords, Shards, bad_weights
from dlrm_hybrid.kernels.criteo import gather, pack
from dlrm_hybrid.rng import fold, splitmix64
from dlrm_hybrid.types import DataError


class Outcomes(NamedTuple):
    """Labels, weights and groups of rows, in the order of arguments of `BinaryMetrics.add`."""

    label_B: Float32s
    weight_B: Float32s | None
    group_B: Int64s | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of rows for the model; the receiver owns the arrays.

    Attributes:
        dense_BI: float32, transformed dense columns.
        bags: int64, ids: row numbers of the embedding tables.
        label_B: float32, 0 or 1; (B, L) if there are several labels.
        weight_B: float32, how much each row counts in losses and scores; None for 1 each.
        group_B: int64, hashes of the rows' groups, 0 without one; None but in evaluations of rows
            with a column of groups.
    """

    dense_BI: Float32s
    bags: Bags[Int64s]
    label_B: Float32s
    weight_B: Float32s | None = None
    group_B: Int64s | None = None

    @property
    def outcomes(self) -> Outcomes:
        """The labels, weights and groups that predictions are scored against."""
        return Outcomes(self.label_B, self.weight_B, self.group_B)

    def part(self, rows: slice) -> Batch:
        """The batch of some of the rows; arrays are views where they can be."""
        return Batch(
            dense_BI=self.dense_BI[rows],
            bags=part(self.bags, rows),
            label_B=self.label_B[rows],
            weight_B=None if self.weight_B is None else self.weight_B[rows],
            group_B=None if self.group_B is None else self.group_B[rows],
        )


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Position where the next global batch begins, equal on every trainer.

    Attributes:
        epoch: number of the epoch, from 0.
        block: blocks of this epoch's order that are used up.
        row: rows of the next block's order that are used up.
    """

    epoch: int
    block: int
    row: int


START = LoaderState(epoch=0, block=0, row=0)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The order of one epoch: its runs, and for each block the number of rows before it."""

    number: int
    runs: Words
    starts: list[int]

    def position(self, rows_before: int) -> tuple[int, int]:
        """Block and row in it that follow this many rows of the epoch."""
        block = bisect_right(self.starts, rows_before) - 1
        return block, rows_before - self.starts[block]


Read = Callable[[LoaderState], tuple[Batch, LoaderState]]
"""Signature of `Loader.read`: the batch at a position, and the position after it."""


class Loader:
    """Reads batches of the training rows, epoch after epoch.

    The order is a pure function of (seed, epoch). Every epoch gives every row at most once; rows
    that do not fill a global batch at its end are dropped, different ones in each epoch. Holds one
    block in memory; not thread-safe.

    Attributes:
        watch: called with the ids of each batch that is read, if not None.
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
            batch_size: rows of each trainer's batch (`train.batch_size`).
            shuffle: False gives file order (`data.shuffle`).
            shuffle_block_rows: rows of a block (`data.shuffle_block_rows`).
            shuffle_read_rows: rows of a run (`data.shuffle_read_rows`).
            trainer: index of the trainer, which reads this part of each global batch.
            trainers: number of trainers; a global batch has `trainers * batch_size` rows.

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
        self.watch: Callable[[Bags[Int64s]], None] | None = None

    def read(self, state: LoaderState) -> tuple[Batch, LoaderState]:
        """Read this trainer's batch at `state`, and the state after it; raises like `part`."""
        return self.part(state, self._trainer), self.after(state)

    def part(self, state: LoaderState, trainer: int) -> Batch:
        """Read the batch of any trainer at `state`.

        Raises:
            DataError: `state` points past the rows, so belongs to other data or options; or a row
                is damaged: `prepare` does not write such rows.
        """
        epoch, start = self._find(state)
        batch = _empty_batch(self._shards, self._batch_size)
        number, row = epoch.position(start + trainer * self._batch_size)
        count, lists = 0, list[ListBags]()
        while count < self._batch_size:
            order_B = self._order_of_block(epoch, number)[row : row + self._batch_size - count]
            if not self._records.gather(order_B, count, batch):
                rows = list(chain.from_iterable(self._runs(epoch, number)))
                raise self._shards.fault(rows[int(row)] for row in order_B)
            lists.append(self._records.lists(order_B))
            count += len(order_B)
            number, row = number + 1, 0
        batch = self._records.with_lists(batch, lists)
        if self.watch is not None:
            self.watch(batch.bags)
        return batch

    def after(self, state: LoaderState) -> LoaderState:
        """The position after the global batch at `state`; raises DataError if past the rows."""
        epoch, start = self._find(state)
        if self._rows - start < 2 * self._global_rows:
            return LoaderState(epoch.number + 1, 0, 0)
        return LoaderState(epoch.number, *epoch.position(start + self._global_rows))

    def _find(self, state: LoaderState) -> tuple[_Epoch, int]:
        """Epoch of the batch at a state, and the number of its rows before the batch."""
        epoch, start = self._located(state)
        if self._rows - start >= self._global_rows:
            return epoch, start
        return self._located(LoaderState(state.epoch + 1, 0, 0))  # saved with a smaller batch

    def _located(self, state: LoaderState) -> tuple[_Epoch, int]:
        """Order of the state's epoch, and the number of its rows before the state's batch."""
        if self._epoch is None or self._epoch.number != state.epoch:
            self._epoch = self._plan(state.epoch)
        epoch = self._epoch
        start = -1
        if 0 <= state.block < len(epoch.starts) - 1:
            start = epoch.starts[state.block] + state.row
        if state.epoch < 0 or start < 0 or epoch.position(start) != (state.block, state.row):
            raise DataError(
                f"{state} does not fit {self._rows} training rows in blocks of"
                f" {len(self._records)} (data.shuffle_block_rows)"
            )
        return epoch, start

    def _plan(self, number: int) -> _Epoch:
        count = -(-self._rows // self._run_rows)
        runs = self._order(count, number, "runs")
        sizes = np.full(count, self._run_rows, np.int64)
        sizes[runs == count - 1] = self._rows - (count - 1) * self._run_rows
        block_sizes = np.add.reduceat(sizes, np.arange(0, count, self._runs_per_block))
        return _Epoch(number, runs, [0, *np.cumsum(block_sizes).tolist()])

    def _order_of_block(self, epoch: _Epoch, number: int) -> Words:
        """Read a block into memory, unless it is there, and return the order of its rows."""
        if self._loaded != (epoch.number, number):
            self._loaded = None  # while the previous block is overwritten
            count = 0
            for rows in self._runs(epoch, number):
                self._records.put(count, rows)
                count += len(rows)
            self._order_R = self._order(count, epoch.number, number)
            self._loaded = (epoch.number, number)
        return self._order_R

    def _runs(self, epoch: _Epoch, number: int) -> Iterator[range]:
        first_run = number * self._runs_per_block
        for run in epoch.runs[first_run : first_run + self._runs_per_block].tolist():
            first = run * self._run_rows
            yield range(first, min(first + self._run_rows, self._rows))

    def _order(self, count: int, epoch: int, name: str | int) -> Words:
        if not self._shuffle:
            return np.arange(count, dtype=np.uint32)
        return permutation(fold(self._seed, "loader", epoch, name), count)


class Ahead(NamedTuple):
    """A batch, with those read ahead.

    Attributes:
        coming: the batches after it, in order.
    """

    batch: Batch
    after: LoaderState
    coming: Sequence[Batch]


def with_coming(batches: Iterable[Batch], ahead: int) -> Iterator[tuple[Batch, tuple[Batch, ...]]]:
    """Yield each batch with the next `ahead` batches, fewer at the end."""
    window: deque[Batch] = deque()
    for batch in batches:
        window.append(batch)
        if len(window) > ahead:
            yield window.popleft(), tuple(window)
    while window:
        yield window.popleft(), tuple(window)


@final
class ReadAhead:
    """Reads batches before they are due, so that their ids can be announced.

    Args:
        ahead: number of batches read after the one asked for.
    """

    def __init__(self, read: Read, ahead: int) -> None:
        self._read = read
        self._ahead = ahead
        self._held: deque[tuple[LoaderState, Batch, LoaderState]] = deque()

    def __call__(self, at: LoaderState) -> Ahead:
        """The batch at a position; continues from the previous call where that is possible."""
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
    """Yield consecutive rows in batches, in file order; the last batch may be smaller.

    Memory is for at most `len(rows)` rows, however large `batch_size` is.

    Raises:
        DataError: a row is damaged: `prepare` does not write such rows.
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
        batch = records.with_lists(batch, [records.lists(order_B[: stop - start])])
        group_R = shards.rows.group_R
        yield replace(batch, group_B=None if group_R is None else group_R[start:stop].copy())


def _empty_batch(shards: Shards, rows: int) -> Batch:
    """A batch with room for all but the lists of multi-hot columns."""
    return Batch(
        dense_BI=np.empty((rows, shards.schema.num_dense), np.float32),
        bags=Bags(np.empty((shards.rows.ids_RF.shape[1], rows), np.int64)),
        label_B=np.empty((rows, *shards.rows.label_R.shape[1:]), np.float32),
        weight_B=None if shards.rows.weight_R is None else np.empty(rows, np.float32),
    )


ListBags = list[Bags[Int64s]]  # the bags of some rows, by multi-hot column


@final
class _Records:
    """A buffer of rows as 4-byte words side by side: label, dense values, ids.

    Lists, weights and several labels, which few tables have, lie beside it.
    """

    def __init__(self, shards: Shards, rows: int) -> None:
        single, self._multi_hot = shards.schema.single, shards.schema.multi_hot
        self._shards = shards
        self._floats_RW = np.empty((rows, 1 + shards.schema.num_dense + len(single)), np.float32)
        self._integers_RW = self._floats_RW.view(np.int32)
        rows_F = shards.manifest.table_rows
        self._table_rows_F = np.array([rows_F[column] for column in single], np.int64)
        weighted, self._averaged = shards.schema.weighted, shards.schema.averaged
        self._lists = [ListRecords(rows, column in weighted) for column in self._multi_hot]
        self._weight_R = np.empty(rows if shards.rows.weight_R is not None else 0, np.float32)
        self._label_RL = np.empty((rows, len(shards.schema.loss_weights)), np.float32)
        self._order_F = np.argsort([*single, *self._multi_hot])

    def __len__(self) -> int:
        return len(self._floats_RW)

    def put(self, first: int, rows: range) -> None:
        """Copy rows in from record `first` on, the only ones if 0; DataError if lists are bad."""
        source = self._shards.read(rows)
        label_R = source.label_R
        if label_R.ndim > 1:
            self._label_RL[first : first + len(rows)] = label_R
            label_R = np.zeros(len(rows), np.float32)
        pack(label_R, *source[1:3], first, self._floats_RW, self._integers_RW)
        if source.weight_R is not None:
            self._weight_R[first : first + len(rows)] = source.weight_R
        if self._shards.bad_lists(source):
            raise self._shards.fault(rows)
        for records, lists in zip(self._lists, source.lists, strict=True):
            records.put(first, lists)

    def lists(self, order_B: Words) -> ListBags:
        return [records.bags(order_B) for records in self._lists]

    def with_lists(self, batch: Batch, parts: Sequence[ListBags]) -> Batch:
        """Add the multi-hot bags of a batch's consecutive parts; expand tables with `expand_to`."""
        bags = batch.bags
        if self._multi_hot:
            tables = [joined(lists) for lists in zip(*parts, strict=True)]
            if len(bags.values):  # bags of no tables do not know their rows
                single = jagged(bags.values.reshape(-1), np.ones(bags.values.shape, np.int64))
                tables = [single, *tables]
            values_N = np.concatenate([table.values for table in tables])
            lengths_FB = np.concatenate([lengths_of(table) for table in tables])
            bags = jagged(values_N, lengths_FB, (), weights_of_all(tables))
            bags = in_order(bags, self._order_F)
            bags = replace(bags, averaged=self._averaged)
        return replace(batch, bags=self._shards.preprocessing.expanded(bags))

    def gather(self, order_B: Words, first: int, batch: Batch) -> bool:
        """Copy records to a batch from its row `first` on; False if a model cannot take one."""
        is_good, rows = True, slice(first, first + len(order_B))
        if batch.weight_B is not None:
            weight_B = self._weight_R[order_B]
            is_good = not bad_weights(weight_B).any()
            batch.weight_B[rows] = weight_B
        label_B = batch.label_B
        if label_B.ndim > 1:
            label_BL = self._label_RL[order_B]
            is_good &= bool(((label_BL == 0) | (label_BL == 1)).all())
            label_B[rows] = label_BL
            label_B = np.empty(len(label_B), np.float32)
        return is_good and gather(
            self._floats_RW,
            self._integers_RW,
            order_B,
            first,
            batch.dense_BI,
            batch.bags.values,
            label_B,
            self._table_rows_F,
        )


def permutation(seed: int, count: int) -> Words:
    """A permutation of 0 … count - 1 that depends on `seed` and `count` alone.

    Sorts the numbers by a hash of (seed, number). The number replaces the hash's lowest bits, so
    keys are distinct, every sorting algorithm gives the same result, and integers are sorted alone.

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
