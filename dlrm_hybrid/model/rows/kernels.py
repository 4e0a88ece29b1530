"""Tables of one process: FBGEMM's, with its optimizer fused into backward, and our own.

Shapes: F tables, R rows of all, D their width, C columns of all; B rows of a batch or bags of each
table, K ids, E = F B + 1 offsets of bags; G gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags, in_order
from dlrm_hybrid.kernels.rows import Gradients, bag_keys, look_up, sort_by_row, update_sgd
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.row_storage import InMemory
from dlrm_hybrid.model.rows.optimizer import UpdatedRows, key_shift, update_on_device
from dlrm_hybrid.model.tables import Embedding, TableOptimizer

if TYPE_CHECKING:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )


class KeyedRows(Protocol):
    """Rows of tables of one width on the host, one table after the other.

    Attributes:
        weights_RD: the rows.
        starts_F: first row of each table.
    """

    weights_RD: Tensor
    starts_F: Int64s

    def update(self, batch: Gradients, lr: float) -> None:
        """Update each row once by the sum of its gradients, whose keys are sorted."""
        ...


class TableKernel(Protocol):
    """Tables in this process, updated in backward."""

    def __call__(self, ids_K: Tensor, offsets_E: Tensor, weights_K: Tensor | None = None) -> Tensor:
        """Look up and sum the rows of bags, float32 (B, C), columns of one table after the other.

        Args:
            ids_K: int64, bags of one table after the other.
            offsets_E: int64, begin of each bag in them, and their number.
            weights_K: float32, factors of the rows; None for 1 each.
        """
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the rows of the next lookups."""
        ...

    def tensors(self) -> list[dict[str, Tensor]]:
        """Views of each table by name: `weight`, and its optimizer's state."""
        ...

    def keyed(self) -> KeyedRows | None:
        """The rows, if looked up and updated one by one they learn the same bits; else None."""
        return None


@final
class OwnKernel(TableKernel):
    """Tables of any one width and any optimizer: looked up by torch, updated by our kernels.

    On a device torch updates them too; ids come from the host, rows and their gradients are there.

    Args:
        rows_F: rows per table; may be 0.
        numbers: numbers of the tables, for messages; empty for 1, 2, ….
    """

    def __init__(
        self,
        rows_F: Sequence[int],
        dim: int,
        options: Embedding,
        frozen: Sequence[bool] = (),
        placement: Placement = HOST,
        numbers: Sequence[int] = (),
    ) -> None:
        self.placement = placement
        self.rows = UpdatedRows(rows_F, dim, options, InMemory(placement.device), frozen)
        self._numbers = numbers or range(1, len(rows_F) + 1)
        self._rows_F = np.array(rows_F, np.int64)
        self._offsets_E = self._offsets_there_E = torch.empty(0)
        self._lr = 0.0
        # Empty: it only makes autograd call backward.
        self._leaf = torch.empty(0, requires_grad=True)

    @override
    def __call__(self, ids_K: Tensor, offsets_E: Tensor, weights_K: Tensor | None = None) -> Tensor:
        bags = ids_K, offsets_E, weights_K
        return cast(Tensor, _BagLookup.apply(self._leaf, self, *bags, self._lr))

    @override
    def set_lr(self, lr: float) -> None:
        self._lr = lr

    @override
    def tensors(self) -> list[dict[str, Tensor]]:
        return [self.rows.tensors(table) for table in range(len(self._rows_F))]

    @override
    def keyed(self) -> KeyedRows | None:
        return None if self.placement.is_apart else self.rows

    def look_up(
        self, ids_K: Tensor, offsets_E: Tensor, weights_K: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Sum the rows of bags (B, F D); returns too the keys, weights and shift of the update."""
        tables, weights_RD = len(self._rows_F), self.rows.weights_RD
        bags = (len(offsets_E) - 1) // tables
        shift = key_shift(len(weights_RD), tables * bags)
        keys_K = np.empty(len(ids_K), np.int64)
        bad = bag_keys(
            *(ids_K.numpy(), offsets_E.numpy(), self.rows.starts_F, self._rows_F),
            *(bags, shift, keys_K),
        )
        if bad >= 0:
            table = int(np.searchsorted(offsets_E[::bags].numpy(), bad, side="right")) - 1
            raise RuntimeError(
                f"id {int(ids_K[bad])} is out of bounds: "
                f"table {self._numbers[table]} has {self._rows_F[table]} rows"
            )
        if offsets_E is not self._offsets_E:  # those of one id a bag come again and again
            self._offsets_E, self._offsets_there_E = offsets_E, self.placement.up(offsets_E)
        keys = self.placement.up(torch.from_numpy(keys_K))
        weights_K = None if weights_K is None else self.placement.up(weights_K)
        sums_FBD = functional.embedding_bag(
            *(keys >> shift, weights_RD, self._offsets_there_E),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=weights_K,
        ).view(tables, bags, weights_RD.shape[1])
        pooled_BFD = sums_FBD.transpose(0, 1).contiguous()
        if not self.rows.learns_F.all():
            ends = pairwise(offsets_E[:: max(1, bags)].numpy())
            parts = zip(ends, self.rows.learns_F, strict=False)
            learning = [slice(a, b) for (a, b), learns in parts if learns]
            keys = torch.cat([keys[:0], *(keys[span] for span in learning)])
            if weights_K is not None:
                weights_K = torch.cat([weights_K[:0], *(weights_K[span] for span in learning)])
        return pooled_BFD.view(bags, tables * weights_RD.shape[1]), keys, weights_K, shift

    def update(self, keys_K: Tensor, shift: int, gradient_GD: Tensor, lr: float) -> None:
        """Update the rows that `look_up` found by the gradients of their bags."""
        if self.placement.is_apart:
            update_on_device(self.rows, keys_K, shift, gradient_GD, lr, self.placement)
            return
        keys = sort_by_row(keys_K.numpy(), len(self.rows.weights_RD), shift)
        self.rows.update(Gradients(keys, shift, gradient_GD.numpy()), lr)


@final
class _BagLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _leaf: Tensor,
        kernel: OwnKernel,
        ids_K: Tensor,
        offsets_E: Tensor,
        weights_K: Tensor | None,
        lr: float,
    ) -> Tensor:
        pooled_BW, *learning, ctx.shift = kernel.look_up(ids_K, offsets_E, weights_K)
        ctx.keys_K, ctx.weights_K = learning
        ctx.kernel, ctx.lr = kernel, lr
        return pooled_BW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        weights_RD, keys, shift = ctx.kernel.rows.weights_RD, ctx.keys_K, ctx.shift
        gradient_GD = gradients[0].contiguous().view(-1, weights_RD.shape[1])
        if ctx.weights_K is not None:  # each id has a gradient of its own
            gradient_GD = gradient_GD[keys & ((1 << shift) - 1)] * ctx.weights_K.unsqueeze(1)
            rows, shift = keys >> shift, key_shift(len(weights_RD), len(keys))
            keys = rows << shift | torch.arange(len(keys), device=keys.device)
        ctx.kernel.update(keys, shift, gradient_GD, ctx.lr)
        return None, None, None, None, None, None


@final
class MixedKernel(TableKernel):
    """Tables of several widths: the tables of each width are an `OwnKernel`."""

    def __init__(
        self,
        rows_F: Sequence[int],
        dims_F: Sequence[int],
        options: Embedding,
        frozen: Sequence[bool] = (),
        placement: Placement = HOST,
    ) -> None:
        self._parts: list[tuple[list[int], OwnKernel]] = []
        for dim in dict.fromkeys(dims_F):
            tables = [table for table, width in enumerate(dims_F) if width == dim]
            numbers = [table + 1 for table in tables]
            rows = [rows_F[table] for table in tables]
            stays = [frozen[table] for table in tables] if frozen else ()
            self._parts.append((tables, OwnKernel(rows, dim, options, stays, placement, numbers)))
        self._tables = len(rows_F)
        ends_F: list[int] = np.cumsum(dims_F).tolist()
        columns = [
            column
            for table in self._order
            for column in range(ends_F[table] - dims_F[table], ends_F[table])
        ]
        self._columns_C = torch.argsort(torch.tensor(columns)).to(placement.device)

    @override
    def __call__(self, ids_K: Tensor, offsets_E: Tensor, weights_K: Tensor | None = None) -> Tensor:
        bags = Bags(ids_K, offsets_E, self._tables, weights=weights_K).map(Tensor.numpy)
        parts: list[Tensor] = []
        for tables, kernel in self._parts:
            part = in_order(bags, np.array(tables)).map(lambda array: torch.from_numpy(array))
            assert part.offsets is not None
            parts.append(kernel(part.values, part.offsets, part.weights))
        return torch.cat(parts, 1).index_select(1, self._columns_C)

    @override
    def set_lr(self, lr: float) -> None:
        for _, kernel in self._parts:
            kernel.set_lr(lr)

    @override
    def tensors(self) -> list[dict[str, Tensor]]:
        tensors = [views for _, kernel in self._parts for views in kernel.tensors()]
        return [tensors[self._order.index(table)] for table in range(self._tables)]

    @property
    def _order(self) -> list[int]:
        return [table for tables, _ in self._parts for table in tables]


def own_kernel(
    rows_F: Sequence[int],
    dims_F: Sequence[int],
    options: Embedding,
    frozen: Sequence[bool] = (),
    placement: Placement = HOST,
) -> OwnKernel | MixedKernel:
    """Make tables of these numbers of rows and widths, updated by our kernels."""
    if len(set(dims_F)) == 1:
        return OwnKernel(rows_F, dims_F[0], options, frozen, placement)
    return MixedKernel(rows_F, dims_F, options, frozen, placement)


# FBGEMM takes half a millisecond for a call, but prefetches. With 26 tables our kernels take a
# third of its time at batch 128; at batch 2048 neither is clearly ahead. Both give the same bits.
SMALL_IDS = 2**14

_OPTIMIZERS: Mapping[TableOptimizer, str] = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}


def fbgemm_arguments(options: Embedding) -> dict[str, Any]:
    """FBGEMM's arguments for options that fit; see `Embedding.fit_fbgemm`."""
    # Not everybody who needs other tables has FBGEMM.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    arguments: dict[str, Any] = {
        "optimizer": EmbOptimType[_OPTIMIZERS[options.optimizer]],
        "learning_rate": 0.0,
        # FBGEMM's default reads row 0 in place of an id outside its table, and warns.
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if options.optimizer != "sgd":
        arguments["eps"] = options.eps
    return arguments


@final
@dataclass(frozen=True, slots=True, eq=False)
class FbgemmKernel(TableKernel):
    """FBGEMM's tables as a `TableKernel`.

    Attributes:
        tables: made with `fbgemm_arguments`.
        is_plain: whether their optimizer is plain SGD.
    """

    tables: SplitTableBatchedEmbeddingBagsCodegen
    is_plain: bool

    @override
    def __call__(self, ids_K: Tensor, offsets_E: Tensor, weights_K: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.tables(ids_K, offsets_E, weights_K))

    @override
    def set_lr(self, lr: float) -> None:
        self.tables.set_learning_rate(lr)

    @override
    def tensors(self) -> list[dict[str, Tensor]]:
        weights: list[Tensor] = self.tables.split_embedding_weights()
        states: list[list[Tensor]] = self.tables.split_optimizer_states() or [[] for _ in weights]
        return [
            {"weight": weight, **({"sum": state[0]} if state else {})}
            for weight, state in zip(weights, states, strict=True)
        ]

    @override
    def keyed(self) -> KeyedRows | None:
        weights: list[Tensor] = self.tables.split_embedding_weights()
        is_uniform = len({weight.shape[1] for weight in weights}) == 1
        return PlainRows(weights) if self.is_plain and is_uniform else None


@final
class PlainRows(KeyedRows):
    """FBGEMM's rows with plain SGD, updated by our own kernel.

    Args:
        tables: all tables of one width, concatenated in memory.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        elements = tables[0].untyped_storage().nbytes() // tables[0].itemsize
        dim = tables[0].shape[1]
        self.weights_RD = tables[0].detach().as_strided((elements // dim, dim), (dim, 1), 0)
        self.starts_F = np.array([table.storage_offset() // dim for table in tables])

    @override
    def update(self, batch: Gradients, lr: float) -> None:
        update_sgd(self.weights_RD.numpy(), batch, lr, 0.0)


def fbgemm_kernel(rows_F: Sequence[int], dims_F: Sequence[int], options: Embedding) -> FbgemmKernel:
    """Make tables of these numbers of rows and widths, updated by FBGEMM."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        ComputeDevice,
        EmbeddingLocation,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    return FbgemmKernel(
        SplitTableBatchedEmbeddingBagsCodegen(
            [
                (rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for rows, dim in zip(rows_F, dims_F, strict=True)
            ],
            device=torch.device("cpu"),
            **fbgemm_arguments(options),
        ),
        is_plain=options.optimizer == "sgd",
    )


@final
class SmallBatches:
    """FBGEMM's tables with plain SGD, by our own kernels, for batches of at most `SMALL_IDS`.

    Args:
        rows: of all tables.
        rows_F: how many each table has.
    """

    def __init__(self, rows: PlainRows, rows_F: Sequence[int]) -> None:
        self._leaf = torch.empty(0, requires_grad=True)
        self._rows = rows
        self._dim = rows.weights_RD.shape[1]
        self._quads_N = rows.weights_RD.view(-1).numpy().view(np.complex128)
        self._starts_F = rows.starts_F * self._dim
        self._shift, self._keys_FB = 0, np.empty((0, 0), np.int64)
        self._rows_F = np.array(rows_F)

    def __call__(self, ids_FB: Tensor, lr: float) -> Tensor:
        """Look up rows of ids (B, F, D), which backward updates; RuntimeError if one has none."""
        return cast(Tensor, _RowLookup.apply(self._leaf, self, ids_FB, lr))

    def look_up(self, ids_FB: Tensor) -> Tensor:
        """Look up the row of each id, (B, F, D), without autograd."""
        num_tables, num_rows = ids_FB.shape
        out_BFD = torch.empty(num_rows, num_tables, self._dim)
        quads_BFQ = out_BFD.numpy().view(np.complex128)
        bad = look_up(self._quads_N, self._starts_F, self._rows_F, ids_FB.numpy(), quads_BFQ)
        if bad >= 0:
            table, row = divmod(bad, num_rows)
            raise RuntimeError(
                f"id {int(ids_FB[table, row])} is out of bounds: "
                f"table {table + 1} has {self._rows_F[table]} rows"
            )
        return out_BFD

    def apply_gradient(self, ids_FB: Tensor, gradient_BFD: Tensor, lr: float) -> None:
        """Subtract `lr` times the sum of its gradients from each row that was looked up."""
        if self._keys_FB.shape != ids_FB.shape:
            self._shift, self._keys_FB = self._keys_of_ids_0(*ids_FB.shape)
        shift = self._shift
        keys_FB = (ids_FB.numpy() << shift) + self._keys_FB
        keys_FB.sort(axis=1)
        gradient_GD = gradient_BFD.contiguous().view(-1, self._dim).numpy()
        self._rows.update(Gradients(keys_FB.reshape(-1), shift, gradient_GD), lr)

    def _keys_of_ids_0(self, num_tables: int, num_rows: int) -> tuple[int, Int64s]:
        """The shift of a batch's keys, and its keys if all ids were 0."""
        shift = key_shift(len(self._rows.weights_RD), num_tables * num_rows)
        gradients_FB = np.arange(num_tables)[:, None] + num_tables * np.arange(num_rows)
        return shift, (self._rows.starts_F[:, None] << shift) + gradients_FB


@final
class _RowLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _leaf: Tensor, tables: SmallBatches, ids_FB: Tensor, lr: float) -> Tensor:
        ctx.tables, ctx.ids_FB, ctx.lr = tables, ids_FB, lr
        return tables.look_up(ids_FB)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.tables.apply_gradient(ctx.ids_FB, gradients[0], ctx.lr)
        return None, None, None, None
