"""The embedding tables of one process, with the optimizer fused into backward.

FBGEMM holds them where all learn and it knows optimizer and width (`Embedding.fit_fbgemm`).

A batch's ids are looked up as they are, or without repetition: then each row is looked up once, and
the gradients of equal ids are summed.

Shapes: B rows of a batch, F tables, D width of the widest (see `Widths`), K distinct ids, T
trainers, L tables looked up, N bags of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags, require_offsets, shares_of_means, table_offsets
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.compress.host import require_cpu
from dlrm_hybrid.kernels.gaps import bag_offsets, sum_rows, unique_ids
from dlrm_hybrid.kernels.rows import Gradients, sort_by_row
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.rows.kernels import (
    SMALL_IDS,
    KeyedRows,
    PlainRows,
    SmallBatches,
    TableKernel,
    fbgemm_kernel,
    own_kernel,
)
from dlrm_hybrid.model.rows.optimizer import key_shift
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tables import Embedding

BITS_OF_AN_ID = 31


@final
class Embeddings:
    """All tables of a model; backward updates the rows, at the rate last set.

    Not a torch module: its tensors are views which no other optimizer may find among parameters.

    Args:
        placement: device of the tables, of looked-up rows and of gradients; ids are on the host.
    """

    def __init__(self, spec: ModelShape, options: Embedding, placement: Placement = HOST) -> None:
        self._names = spec.table_names
        self._widths = spec.widths
        rows, dims = spec.table_rows, self._widths.dims
        self._rows_F = np.array(rows, np.int64)
        fits = options.fit_fbgemm(*dims) and not spec.frozen and not placement.is_apart
        self._kernel: TableKernel = (
            fbgemm_kernel(rows, dims, options)
            if fits
            else own_kernel(rows, dims, options, spec.frozen, placement)
        )
        self._offsets = torch.arange(1)
        self._lr = 0.0
        self._distinct = DistinctLookup(self._kernel, self._widths)
        keyed = self._kernel.keyed()
        self._small = SmallBatches(keyed, rows) if isinstance(keyed, PlainRows) else None

    def __call__(self, bags: Bags[Tensor]) -> Tensor:
        """Look up the ids of a batch → float32 (B, F, D), 0 for empty bags.

        Raises:
            RuntimeError: an id is not a row of its table.
            ValueError: the ids are on another device.
        """
        ids_FB = require_ids_on_cpu(bags).values
        if bags.offsets is not None:
            return self._look_up(ids_FB, bags.offsets, bags.weights)
        if self._small is not None and ids_FB.numel() <= SMALL_IDS:
            return self._small(ids_FB, self._lr)
        return self._look_up(ids_FB.view(-1), self._offsets_of(ids_FB.numel()))

    def pooled(self, bags: DistinctBags) -> Tensor:
        """Look up bags of all tables, in their order → float32 (N, F * D); raises as a call."""
        return self._look_up(bags.ids_K, bags.offsets).flatten(1)

    def look_up_distinct(self, ids_K: Int64s, counts_TF: Int64s) -> DistinctRows:
        """Look up the distinct ids of several batches; see `DistinctLookup`.

        Raises:
            RuntimeError: an id is not a row of its table.
        """
        tables_K = np.repeat(np.indices(counts_TF.shape)[1].reshape(-1), counts_TF.reshape(-1))
        bad_K = (ids_K < 0) | (ids_K >= self._rows_F[tables_K])
        if bad_K.any():
            bad = int(bad_K.argmax())
            rows, table = self._rows_F[tables_K[bad]], tables_K[bad] + 1
            raise RuntimeError(f"id {ids_K[bad]} is out of bounds: table {table} has {rows} rows")
        return self._distinct(ids_K, counts_TF, self._lr)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for the rows of the next lookups."""
        self._lr = lr

    def weights(self) -> dict[str, Tensor]:
        """Views (rows, width) of all tables: `embedding.1.weight` …; writing to one changes it."""
        return {name: view for name, view in self._tensors().items() if name.endswith(".weight")}

    def optimizer_state(self) -> dict[str, Tensor]:
        """Views of the optimizer's state: `embedding.1.sum` …; none for `sgd`.

        (rows, width), or (rows,) of one number for each row, or (1,) of `embedding.1.step`.
        """
        return {key: view for key, view in self._tensors().items() if not key.endswith(".weight")}

    def _tensors(self) -> dict[str, Tensor]:
        pairs = zip(self._names, self._kernel.tensors(), strict=True)
        return {f"{name}.{kind}": view for name, views in pairs for kind, view in views.items()}

    def _look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        self._kernel.set_lr(self._lr)
        return self._widths.padded(self._kernel(ids, offsets, weights))

    def _offsets_of(self, num_ids: int) -> Tensor:
        if len(self._offsets) != num_ids + 1:
            self._offsets = torch.arange(num_ids + 1)
        return self._offsets


@final
@dataclass(frozen=True, slots=True, eq=False)
class DistinctIds:
    """The distinct ids of one trainer's batch.

    Attributes:
        ids_K: the ids, table after table, ascending in each.
        counts_F: number of ids per table, in the same order.
        inverse: int64, the index in `ids_K` of each id of the batch: (B, F) if every bag has one
            id, else (N,) in the order of the bags.
        most: largest number of ids of any table in the batch.
    """

    ids_K: Int64s
    counts_F: Int64s
    inverse: Tensor
    bags: Bags[Tensor]
    most: int

    def pool(self, rows_KD: Tensor) -> Tensor:
        """Sum rows of the distinct ids (K, D), times weights, to the batch's bags (B, F, D)."""
        shape = (self.bags.tables, self.bags.rows, rows_KD.shape[1])
        if self.bags.offsets is None:
            rows_BFD = rows_KD.index_select(0, self.inverse.view(-1))
            return rows_BFD.view(shape[1], shape[0], shape[2])
        pooled_FBD = functional.embedding_bag(
            *(self.inverse, rows_KD, self.bags.offsets),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=self.bags.weights,
        )
        return pooled_FBD.view(shape).transpose(0, 1).contiguous()

    def sum_by_id(self, gradient_BFD: Tensor) -> Tensor:
        """Sum gradients of bags by distinct id (K, D): float32, in the order of the batch."""
        sum_KD = gradient_BFD.new_zeros(len(self.ids_K), gradient_BFD.shape[2])
        inverse_BF = self.inverse
        if self.bags.offsets is not None:  # each id on its own: a batch of one table
            gradient_ND = _by_id(gradient_BFD, self.bags.offsets)
            if self.bags.weights is not None:
                gradient_ND *= self.bags.weights.unsqueeze(1)
            gradient_BFD = gradient_ND.unsqueeze(1)
            inverse_BF = self.inverse.unsqueeze(1)
        sum_rows(gradient_BFD.contiguous().numpy(), inverse_BF.numpy(), sum_KD.numpy())
        return sum_KD


def _by_id(gradient_BFD: Tensor, offsets: Tensor) -> Tensor:
    """Repeat the gradient of each bag for its ids: (N, D)."""
    rows, tables, dim = gradient_BFD.shape
    bags_FB = torch.arange(rows * tables).view(rows, tables).t().reshape(-1)
    bags_N = bags_FB.repeat_interleave(offsets.diff())
    return gradient_BFD.reshape(-1, dim).index_select(0, bags_N)


def with_means(sum_BFD: Tensor, bags: Bags[Tensor] | None) -> Tensor:
    """Divide sums of rows, or their gradients, by the sizes of the bags that are averaged."""
    share_BF1 = None if bags is None else shares_of_means(bags.map(Tensor.numpy))
    if share_BF1 is None:
        return sum_BFD
    return sum_BFD * torch.from_numpy(share_BF1).to(sum_BFD.device, non_blocking=True)


def tensor_bags(bags: Bags[Int64s]) -> Bags[Tensor]:
    """View bags of arrays as bags of tensors."""
    return bags.map(lambda array: torch.from_numpy(array))


def require_ids_on_cpu(bags: Bags[Tensor]) -> Bags[Tensor]:
    """Return the bags; ValueError if they are on another device or have invalid offsets."""
    require_cpu(bags.values, "bags", "an embedding lookup")
    if bags.offsets is not None:
        require_offsets(bags.map(Tensor.numpy))
    return bags


def sorted_keys(ids_FB: Tensor) -> tuple[Int64s, int]:
    """Combine ids with their row in the batch to keys, ascending in each table.

    Args:
        ids_FB: int64; at most 2**31.

    Returns:
        id << shift | row, and the shift.
    """
    num_rows = ids_FB.shape[1]
    shift = num_rows.bit_length()
    keys_FB = (ids_FB.numpy() << shift) | np.arange(num_rows)
    keys_FB.sort(axis=1)
    return keys_FB, shift


def distinct_ids(bags: Bags[Tensor], order_F: Int64s) -> DistinctIds:
    """Find the distinct ids of a batch.

    Args:
        bags: ids, at most 2**31.
        order_F: order in which to list the tables.

    Raises:
        ValueError: the ids are on another device.
    """
    ids_FB = require_ids_on_cpu(bags).values
    if bags.offsets is not None:
        return _distinct_of_jagged(bags, order_F)
    num_tables, num_rows = ids_FB.shape
    keys_FB, shift = sorted_keys(ids_FB)
    ids_K = np.empty(ids_FB.numel(), np.int64)
    counts_F = np.empty(num_tables, np.int64)
    inverse_BF = torch.empty(num_rows, num_tables, dtype=torch.int64)
    num_ids = unique_ids(keys_FB, shift, order_F, ids_K, counts_F, inverse_BF.numpy())
    return DistinctIds(ids_K[:num_ids], counts_F, inverse_BF, bags, num_rows)


def _distinct_of_jagged(bags: Bags[Tensor], order_F: Int64s) -> DistinctIds:
    """Find the distinct ids of all tables at once, by position of the table in the order and id."""
    counts_F = np.diff(table_offsets(bags.map(Tensor.numpy)))
    values_N = bags.values.numpy()
    bits, shift = int(values_N.max(initial=0)).bit_length(), len(values_N).bit_length()
    if values_N.min(initial=0) < 0 or bits > BITS_OF_AN_ID:
        raise RuntimeError("an id is out of bounds: below 0, or no table has so many rows")
    place_F = np.argsort(order_F)
    keys_N = np.repeat(place_F << bits, counts_F) | values_N
    if len(order_F).bit_length() + bits + shift < 64:  # keys that hold their index sort faster
        keys_N = keys_N << shift | np.arange(len(keys_N))
        keys_N.sort()
        sorting_N, keys_N = keys_N & ((1 << shift) - 1), keys_N >> shift
    else:
        sorting_N = np.argsort(keys_N)
        keys_N = keys_N[sorting_N]
    is_first_N = np.ones(len(keys_N), bool)
    np.not_equal(keys_N[1:], keys_N[:-1], out=is_first_N[1:])
    inverse_N = np.empty_like(values_N)
    inverse_N[sorting_N] = np.cumsum(is_first_N) - 1
    keys_K = keys_N[is_first_N]
    return DistinctIds(
        ids_K=keys_K & ((1 << bits) - 1),
        counts_F=np.bincount(keys_K >> bits, minlength=len(order_F)),
        inverse=torch.from_numpy(inverse_N),
        bags=bags,
        most=int(counts_F.max(initial=0)),
    )


@final
@dataclass(frozen=True, slots=True, eq=False)
class DistinctBags:
    """One bag for each distinct id of each trainer, N per table, as FBGEMM takes them.

    The bags of a table are in trainer order, so the gradients of a row that several looked up are
    summed in it; empty bags are padding.

    Attributes:
        ids_K: int64, the ids, table after table.
        offsets: int64 (L * N + 1,), begin of each bag in `ids_K`.
        bags_K: int64, each id's bag in an array (N, L), in the order in which ids came.
    """

    ids_K: Tensor
    offsets: Tensor
    bags_K: Tensor

    def gather(self, pooled_NW: Tensor, embedding_dim: int) -> Tensor:
        """Select the rows (K, D), in the order in which ids came, from all bags' (N, L * D)."""
        return pooled_NW.view(-1, embedding_dim).index_select(0, self.bags_K)

    def scatter(self, gradient_KD: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Spread gradients of ids to all bags, in `shape` (N, L * D); zero for empty ones."""
        gradient_NW = gradient_KD.new_zeros(shape)
        gradient_NW.view(-1, gradient_KD.shape[1]).index_copy_(0, self.bags_K, gradient_KD)
        return gradient_NW


def distinct_bags(ids_K: Int64s, counts_TL: Int64s) -> DistinctBags:
    """Make the bags of ids that come trainer after trainer, table after table."""
    tables = counts_TL.shape[1]
    most = int(counts_TL.sum(0).max(initial=0))
    bags = DistinctBags(
        ids_K=torch.empty(len(ids_K), dtype=torch.int64),
        offsets=torch.empty(tables * most + 1, dtype=torch.int64),
        bags_K=torch.empty(len(ids_K), dtype=torch.int64),
    )
    bag_offsets(ids_K, counts_TL, bags.ids_K.numpy(), bags.offsets.numpy(), bags.bags_K.numpy())
    return bags


class DistinctRows(Protocol):
    """Rows of the distinct ids of each trainer, which wait for their gradients.

    Attributes:
        rows_KD: the rows, in the order in which ids came, without autograd.
    """

    rows_KD: Tensor

    def update(self, gradient_KD: Tensor) -> None:
        """Update the rows by the gradients for the ids, summed in trainer order."""
        ...


@final
class DistinctLookup:
    """Looks up ids that come trainer after trainer, table after table, each once per trainer.

    Args:
        kernel: of the tables; None if there are none.
        widths: of the tables.
    """

    def __init__(self, kernel: TableKernel | None, widths: Widths) -> None:
        self._kernel, self._widths = kernel, widths
        self._keyed = kernel.keyed() if kernel is not None and widths.is_uniform else None

    def __call__(self, ids_K: Int64s, counts_TL: Int64s, lr: float) -> DistinctRows:
        """Look up rows of tables by their ids.

        Args:
            ids_K: ids of all trainers; rows of their tables.
            counts_TL: number of ids per trainer and table.
            lr: learning rate of the rows.
        """
        if self._keyed is not None:
            return _KeyedLookup(self._keyed, ids_K, counts_TL, lr)
        if self._kernel is None:
            return _NoRows(torch.empty(0, self._widths.widest))
        self._kernel.set_lr(lr)
        bags = distinct_bags(ids_K, counts_TL)
        pooled_NC = self._kernel(bags.ids_K, bags.offsets)
        return _BagLookup(bags, self._widths.padded(pooled_NC).flatten(1), self._widths.widest)


@final
class _KeyedLookup(DistinctRows):
    """Rows that were looked up one by one."""

    def __init__(self, rows: KeyedRows, ids_K: Int64s, counts_TL: Int64s, lr: float) -> None:
        starts_TL = np.broadcast_to(rows.starts_F, counts_TL.shape)
        self._places_K = ids_K + np.repeat(starts_TL.reshape(-1), counts_TL.reshape(-1))
        self._rows, self._lr = rows, lr
        self.rows_KD = rows.weights_RD.index_select(0, torch.from_numpy(self._places_K))

    @override
    def update(self, gradient_KD: Tensor) -> None:
        shift = key_shift(len(self._rows.weights_RD), len(gradient_KD))
        keys_K = self._places_K << shift | np.arange(len(gradient_KD))
        keys_K = sort_by_row(keys_K, len(self._rows.weights_RD), shift)
        self._rows.update(Gradients(keys_K, shift, gradient_KD.contiguous().numpy()), self._lr)


@final
class _BagLookup(DistinctRows):
    """Rows that were looked up as bags of one id."""

    def __init__(self, bags: DistinctBags, pooled_NW: Tensor, dim: int) -> None:
        self._bags, self._pooled_NW = bags, pooled_NW
        self.rows_KD = bags.gather(pooled_NW.detach(), dim)

    @override
    def update(self, gradient_KD: Tensor) -> None:
        self._pooled_NW.backward(self._bags.scatter(gradient_KD, self._pooled_NW.shape))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _NoRows(DistinctRows):
    """The rows of no tables."""

    rows_KD: Tensor

    @override
    def update(self, gradient_KD: Tensor) -> None:
        pass
