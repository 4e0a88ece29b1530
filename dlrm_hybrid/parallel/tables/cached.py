"""Tables on table servers, with a row cache in the trainer; gradients are written back.

    prefetch   the ids that the cache lacks           LOOKUP  →
    lookup     waits for their rows, keeps them               ←  ROWS
    update     of rows that leave the cache now: ids, and
               sums of their gradients since they came UPDATE  →

A row does not change while it is kept: even its own trainer's gradients show when it is fetched
again. Checkpoints hold the kept rows and sums; the tables lack the sums until rows leave, as dense
weights lack a compressor's residual.

Shapes: B batch, F tables, D embedding dimension, K distinct ids, M of them fetched, L rows that
leave, N rows kept, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.kernels.gaps import merge_rows, part_rows
from dlrm_hybrid.model.embeddings import DistinctIds, distinct_ids
from dlrm_hybrid.model.tables import Served
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.parallel.tables.lookups import (
    SplitIds,
    first_no_row,
    ids_of,
    keys_of,
    lookups_of,
    split_batch,
    split_ids,
)
from dlrm_hybrid.parallel.tables.served import TableClient
from dlrm_hybrid.types import BatchNumber, DataError, Group, Version


@final
@dataclass(frozen=True, slots=True, eq=False)
class CacheTurn:
    """The changes that one batch makes to a cache.

    Attributes:
        before_N4: rows kept before.
        slots_K: slots of the batch's rows.
        fetched_M: indices of the batch's rows that must be fetched.
        left_L4: rows that leave after the batch, by key.
        slots: S; the slots of rows that leave are free from the next batch on.
    """

    before_N4: Int64s
    slots_K: Int64s
    fetched_M: Int64s
    left_L4: Int64s
    slots: int


@final
class RowCache:
    """The rows that one trainer caches: keys, ages and slots.

    Bookkeeping without values. A row fetched for batch b is used until batch b + batches. It leaves
    after that batch, or earlier: beyond `rows` rows the least recently used leave, ties in order of
    keys. So what is fetched depends on the ids of the batches and on nothing else.

    Attributes:
        kept_N4: rows kept after the last turn, by key; never written to.
    """

    def __init__(self, keys: Served) -> None:
        self._keys = keys
        self.restart(np.empty((0, 4), np.int64))

    def turn(self, batch: int, keys_K: Int64s) -> CacheTurn:
        """Enter the rows of the next batch; returns the changes.

        Args:
            batch: its number.
            keys_K: keys of its rows, increasing.
        """
        if missing := max(len(keys_K) - len(self._free_S), 0):
            more = max(missing, self._slots)
            self._free_S = np.append(self._free_S, np.arange(self._slots, self._slots + more))
            self._slots += more
        before_N4 = self.kept_N4
        rows_M4 = np.empty((len(before_N4) + len(keys_K), 4), np.int64)
        where_K2 = np.empty((len(keys_K), 2), np.int64)
        fetched = merge_rows(before_N4, keys_K, batch, self._free_S, rows_M4, where_K2)
        slots_K, fetched_M = where_K2[:, 0].copy(), where_K2[:fetched, 1].copy()
        rows_M4 = rows_M4[: len(before_N4) + fetched]
        left_M4 = np.empty_like(rows_M4)
        count = part_rows(rows_M4, batch, self._keys.cache_batches, self._keys.cache_rows, left_M4)
        left_L4 = left_M4[: len(rows_M4) - count].copy()
        self.kept_N4 = rows_M4[:count]
        self._free_S = np.concatenate([self._free_S[fetched:], left_L4[:, 3]])
        return CacheTurn(before_N4, slots_K, fetched_M, left_L4, self._slots)

    def restart(self, kept_N4: Int64s) -> None:
        """Start anew with these rows."""
        self.kept_N4 = kept_N4
        self._slots = 1 + int(kept_N4[:, 3].max(initial=-1))
        self._free_S = np.setdiff1d(np.arange(self._slots), kept_N4[:, 3])


@final
class CachedTables(Tables):
    """One trainer's access to tables on table servers.

    A batch is updated before the next one is looked up: schedules with delays need more.

    Args:
        client: messages of the worker.
        averaged: number of trainers whose losses an update averages.
        keys: the section `embedding`, with the limits of the cache.
    """

    def __init__(self, client: TableClient, averaged: int, keys: Served) -> None:
        self._client = client
        self._averaged = averaged
        self._keys = keys
        self._cache = RowCache(keys)
        self._rows_SD = torch.zeros(0, client.dim)
        self._sums_SD = torch.zeros(0, client.dim)  # 0 in free slots
        self.remembered = client.remembered
        self._flying: dict[BatchNumber, tuple[DistinctIds, CacheTurn]] = {}

    @override
    def prefetch(self, batch: BatchNumber, bags: Bags[Tensor]) -> None:
        if batch in self._flying:
            return
        with self._client.looking_up:
            ids = distinct_ids(bags, np.arange(bags.tables))
            keys_K = keys_of(Rows(ids.ids_K, ids.counts_F))
            turn = self._cache.turn(batch, keys_K)
            self._flying[batch] = ids, turn
            self._client.ask(batch, self._split(keys_K[turn.fetched_M], ids))

    @override
    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        self.prefetch(batch, bags)
        fetched_MD = yield from self._client.receive(batch)
        ids, turn = self._flying[batch]
        with self._client.looking_up:
            self._make_room(turn.slots)
            slots_K = torch.from_numpy(turn.slots_K)
            self._rows_SD[slots_K[torch.from_numpy(turn.fetched_M)]] = fetched_MD
            return ids.pool(self._rows_SD.index_select(0, slots_K))

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        yield from ()
        with self._client.looking_up:
            ids, turn = self._flying.pop(batch)
            sum_KD = ids.sum_by_id(mean_part(gradient_BFD, self._averaged))
            self._sums_SD.index_add_(0, torch.from_numpy(turn.slots_K), sum_KD)
            left_L4 = turn.left_L4
            slots_L = torch.from_numpy(left_L4[:, 3])
            left_LD = self._sums_SD.index_select(0, slots_L)
            self._sums_SD.index_fill_(0, slots_L, 0.0)
            self._client.update(self._split(left_L4[:, 0], ids), batch, left_LD)

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        return self._client.predict(bags)

    @override
    def state_ahead(self) -> Program[list[Piece]]:
        ahead = yield from self._client.state_ahead()
        kept_N4 = self._kept()
        slots_N = torch.from_numpy(kept_N4[:, 3])
        # Relative to the current batch, since a resumed trainer may count anew.
        ages_N2 = self._client.updated - kept_N4[:, 1:3]
        state = {
            "keys": torch.from_numpy(kept_N4[:, 0].copy()),
            "ages": torch.from_numpy(ages_N2),
            "rows": self._rows_SD.index_select(0, slots_N),
            "sums": self._sums_SD.index_select(0, slots_N),
        }
        head = self._client.prefix
        named = {f"{head}{name}": part for name, part in state.items() if len(part)}
        return ahead + full_pieces(named, Group.LOOKUPS)

    @override
    def flush(self) -> Program[None]:
        """Send the sums of all rows kept, as the update of a batch without lookups."""
        kept_N4, batch = self._kept(), BatchNumber(self._client.updated)
        if not len(kept_N4):
            return
        ids, split = split_batch(self._client.nothing, self._client.servers)
        self._client.ask(batch, split)
        yield from self._client.receive(batch)
        slots_N = torch.from_numpy(kept_N4[:, 3].copy())
        sums_ND = self._sums_SD.index_select(0, slots_N)
        self._client.update(self._split(kept_N4[:, 0], ids), batch, sums_ND)
        self._sums_SD.index_fill_(0, slots_N, 0.0)
        self._cache.restart(kept_N4[:0])

    @override
    def settle(self) -> Program[None]:
        self._cache.restart(self._kept())
        self._flying.clear()
        return self._client.settle()

    @override
    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        saved = self._saved(values)
        self._rows_SD, self._sums_SD = saved["rows"].clone(), saved["sums"].clone()
        self._flying.clear()
        self._client.restart(version, values)
        slots_N = np.arange(len(saved["keys"]))
        columns = (saved["keys"].numpy(), *(version - saved["ages"].numpy()).T, slots_N)
        self._cache.restart(np.stack(columns, axis=1))

    def _saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors of this trainer's cache, checked because kernels trust them.

        Raises:
            DataError: they do not fit such a cache; names tensor, value and bound.
        """
        head, integers = self._client.prefix, torch.zeros(0, dtype=torch.int64)
        none = torch.zeros(0, self._client.dim)
        expected = {"keys": integers, "ages": integers.view(0, 2), "rows": none, "sums": none}
        saved = {name: values.get(f"{head}{name}", tensor) for name, tensor in expected.items()}
        for name, tensor in saved.items():
            like = expected[name]
            fits = tensor.dim() == like.dim() and tensor.shape[1:] == like.shape[1:]
            if tensor.dtype != like.dtype or not fits:
                shape = ["N", *like.shape[1:]]
                raise DataError(
                    f"{head}{name}: {tensor.dtype} of shape {list(tensor.shape)}, expected "
                    f"{like.dtype} of [{', '.join(map(str, shape))}]"
                )
        sizes = {len(saved[name]) for name in ("keys", "ages", "rows", "sums")}
        if len(sizes) > 1:
            raise DataError(
                f"{head}*: {len(saved['keys'])} keys and other numbers of ages, rows or sums"
            )
        self._check_kept(saved["keys"].numpy(), saved["ages"].numpy())
        return saved

    def _check_kept(self, keys_N: Int64s, ages_N2: Int64s) -> None:
        head = self._client.prefix
        if (wrong := first_no_row(keys_N, self._client.table_rows)) is not None:
            raise DataError(
                f"{head}keys[{wrong}] = {keys_N[wrong]}: is no row of a table, or not after the "
                "one before it"
            )
        keys = self._keys
        if len(keys_N) > keys.cache_rows:
            raise DataError(
                f"{head}keys: {len(keys_N)} of embedding.cache_rows = {keys.cache_rows}"
            )
        fetched_N, used_N = ages_N2.T
        is_age_N = (used_N >= 1) & (used_N <= fetched_N) & (fetched_N <= keys.cache_batches)
        if not is_age_N.all():
            wrong = int(np.flatnonzero(~is_age_N)[0])
            raise DataError(
                f"{head}ages[{wrong}] = {ages_N2[wrong].tolist()}: batches since it was fetched, "
                f"and used, with embedding.cache_batches = {keys.cache_batches}"
            )

    def _kept(self) -> Int64s:
        """The rows kept after the last update, without the turns of later batches."""
        for _, turn in self._flying.values():
            return turn.before_N4
        return self._cache.kept_N4

    def _split(self, keys_K: Int64s, batch: DistinctIds) -> SplitIds:
        """Rows by server, with the lookup counts of a batch, or as many as there are rows."""
        ids, servers = ids_of(keys_K, len(batch.counts_F)), self._client.servers
        most = max(batch.most, int(ids.counts_L.max(initial=0)))
        owned_S = np.bincount(ids.ids_K % servers, minlength=servers)
        return split_ids(ids, most, np.maximum(lookups_of(batch, servers), owned_S))

    def _make_room(self, slots: int) -> None:
        if more := max(slots - len(self._rows_SD), 0):
            room = torch.zeros(more, self._client.dim)
            self._rows_SD = torch.cat([self._rows_SD, room])
            self._sums_SD = torch.cat([self._sums_SD, room])
