"""Rows of embedding tables, updated by their optimizer when they were looked up.

On a device by torch's own operations, for none of which the host waits. How many distinct rows a
batch has is known there alone. So each id computes the new values of its row, from the sum of all
gradients of that row: equal ids write equal values.

Shapes: F tables, R rows of all, D embedding dimension; G gradients of rows or of bags, K ids; C = D
numbers of state for each row, or one for the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Bools, Float64s, Int64s
from dlrm_hybrid.kernels.rows import (
    AdamRates,
    Gradients,
    update_adagrad,
    update_adam,
    update_sgd,
)
from dlrm_hybrid.model.optimizer import STEP
from dlrm_hybrid.model.placement import Placement
from dlrm_hybrid.model.row_storage import IN_MEMORY, RowStorage
from dlrm_hybrid.model.tables import Embedding
from dlrm_hybrid.types import ResourceError

KEY_BITS = 63


@final
class UpdatedRows:
    """Rows of tables, one table after the other, with their optimizer's state; all initially 0.

    Args:
        rows_F: rows per table; may be 0.
        frozen: whether the rows of each table never change; empty if all learn.

    Attributes:
        starts_F: first row of each table.
        ends_F: one past the last row of each table.
        state: state of the optimizer, in the order of `Embedding.row_state`: (R, D) or (R, 1).
    """

    def __init__(
        self,
        rows_F: Sequence[int],
        dim: int,
        options: Embedding,
        storage: RowStorage = IN_MEMORY,
        frozen: Sequence[bool] = (),
    ) -> None:
        self.learns_F = learning(frozen, len(rows_F))
        self.options = options
        self._storage = storage
        self.ends_F: Int64s = np.cumsum(np.array(rows_F, np.int64))
        self.starts_F: Int64s = self.ends_F - np.array(rows_F, np.int64)
        self.weights_RD = storage.zeros(sum(rows_F), dim)
        self.state = [
            storage.zeros(sum(rows_F), 1 if is_rowwise else dim)
            for is_rowwise in options.row_state.values()
        ]
        self._steps_F = torch.zeros(len(rows_F)) if "exp_avg" in options.row_state else None

    def tensors(self, table: int) -> dict[str, Tensor]:
        """Views of a table: `weight`, its state by name, and `step` if updates are counted."""
        rows = slice(self.starts_F[table], self.ends_F[table])
        pairs = zip(self.options.row_state.items(), self.state, strict=True)
        state = {
            name: full[rows, 0] if is_rowwise else full[rows] for (name, is_rowwise), full in pairs
        }
        step = {} if self._steps_F is None else {STEP: self._steps_F[table : table + 1]}
        return {"weight": self.weights_RD[rows], **state, **step}

    def update(self, batch: Gradients, lr: float) -> None:
        """Update each row once by the sum of its gradients; counts as one update of every table.

        Args:
            batch: gradients with sorted keys of `row_keys`.
        """
        options, weights_RD = self.options, self.weights_RD.numpy()
        if not self.learns_F.all():
            tables_K = np.searchsorted(self.ends_F, batch.keys_K >> batch.shift, side="right")
            batch = batch._replace(keys_K=batch.keys_K[self.learns_F[tables_K]])
        if self._storage.is_paged:
            for tensor in self.state:
                self._storage.touch(tensor, torch.from_numpy(batch.keys_K >> batch.shift))
        state = [tensor.numpy() for tensor in self.state]
        decay = options.weight_decay
        if (rates_F2 := self.next_rates(lr)) is not None:
            rates = AdamRates(self.ends_F, rates_F2, *options.betas)
            means_RD, squares_RC = state
            update_adam(weights_RD, means_RD, squares_RC, batch, rates, decay)
        elif state:
            update_adagrad(weights_RD, state[0], batch, lr, options.eps, decay)
        else:
            update_sgd(weights_RD, batch, lr, decay)

    def next_rates(self, lr: float) -> Float64s | None:
        """Count an update; per table the corrected factor of m and term added to the root of v.

        None for an optimizer that counts no updates.
        """
        if self._steps_F is None:
            return None
        self._steps_F += torch.from_numpy(self.learns_F)
        (first, second), eps = self.options.betas, self.options.eps
        is_torch = self.options.optimizer == "adam"  # adds eps before
        corrected: list[tuple[float, float]] = []
        for step in map(int, self._steps_F.clamp(min=1)):  # frozen tables count none
            root = sqrt(1 - second**step)
            corrected.append((lr * root / (1 - first**step), eps if is_torch else eps * root))
        return np.array(corrected, np.float64).reshape(-1, 2)


def learning(frozen: Sequence[bool], tables: int) -> Bools:
    """Whether the rows of each table change; `frozen` is empty if all do."""
    return ~np.array(frozen or [False] * tables, bool)


def row_keys(rows_K: Int64s, gradients_K: Int64s) -> tuple[Int64s, int]:
    """Make keys that sort the gradients of a row together; they are not sorted yet.

    Args:
        rows_K: numbers among the rows of all tables.
        gradients_K: number of each row's gradient.

    Returns:
        row << shift | gradient, and the shift.
    """
    shift = key_shift(int(rows_K.max(initial=0)) + 1, int(gradients_K.max(initial=0)) + 1)
    return rows_K << shift | gradients_K, shift


def key_shift(rows: int, gradients: int) -> int:
    """Number of bits for a gradient's number in a key; ResourceError if a key has too few."""
    shift = gradients.bit_length()
    if rows.bit_length() + shift > KEY_BITS:
        raise ResourceError(
            f"{rows:,} rows of tables in one process and {gradients:,} gradients in one update: "
            f"their numbers have more than {KEY_BITS} bits together; needs smaller batches"
        )
    return shift


def update_on_device(
    rows: UpdatedRows,
    keys_K: Tensor,
    shift: int,
    gradient_GD: Tensor,
    lr: float,
    placement: Placement,
) -> None:
    """Update each row once by the sum of its gradients, as `UpdatedRows.update` does on the host.

    Args:
        keys_K: row << shift | gradient, in any order, on the device.
        shift: 2**shift is at least G.
        gradient_GD: gradients of rows, or of bags of several rows, on the device.
    """
    rates_F2 = rows.next_rates(lr)
    if not len(keys_K):
        return
    keys_K = keys_K.sort().values
    rows_K = keys_K >> shift
    weight_KD = rows.weights_RD.index_select(0, rows_K)
    gradient_KD = gradient_GD.index_select(0, keys_K & ((1 << shift) - 1))
    sum_KD = _summed(gradient_KD, rows_K)
    if rows.options.weight_decay:
        sum_KD.add_(weight_KD, alpha=rows.options.weight_decay)
    state = [tensor.index_select(0, rows_K) for tensor in rows.state]
    if rates_F2 is not None:
        ends_F = placement.up(torch.from_numpy(rows.ends_F))
        table_K = torch.bucketize(rows_K, ends_F, right=True)
        rates_K2 = placement.up(torch.from_numpy(rates_F2).float()).index_select(0, table_K)
        _adam(weight_KD, state[0], state[1], sum_KD, rates_K2, rows.options.betas)
    elif state:
        square_KC = _squares(sum_KD, state[0].shape[1])
        root_KC = state[0].add_(square_KC).sqrt().add_(rows.options.eps)
        weight_KD.addcdiv_(sum_KD, root_KC, value=-lr)
    else:
        weight_KD.add_(sum_KD, alpha=-lr)
    for tensor, values in zip((rows.weights_RD, *rows.state), (weight_KD, *state), strict=True):
        tensor.index_copy_(0, rows_K, values)


def _summed(gradient_KD: Tensor, rows_K: Tensor) -> Tensor:
    """For each id the sum of the gradients of its row; equal rows are neighbours."""
    number_K = rows_K.diff(prepend=rows_K[:1]).ne(0).cumsum(0)
    # An embedding's backward sums in a fixed order, fast where a row has most of the gradients.
    backward = torch.ops.aten.embedding_dense_backward
    sum_KD = cast(Tensor, backward(gradient_KD, number_K, len(rows_K), -1, False))
    return sum_KD.index_select(0, number_K)


def _squares(sum_KD: Tensor, columns: int) -> Tensor:
    square_KD = sum_KD.square()
    return square_KD if columns > 1 else square_KD.mean(1, keepdim=True)


def _adam(
    weight_KD: Tensor,
    mean_KD: Tensor,
    square_KC: Tensor,
    sum_KD: Tensor,
    rates_K2: Tensor,
    betas: tuple[float, float],
) -> None:
    """Change weights and means of rows; see `kernels.rows.update_adam`."""
    mean_KD.lerp_(sum_KD, 1 - betas[0])
    square_KC.lerp_(_squares(sum_KD, square_KC.shape[1]), 1 - betas[1])
    root_KC = square_KC.sqrt().add_(rates_K2[:, 1:])
    weight_KD.sub_(mean_KD.mul(rates_K2[:, :1]).div_(root_KC))
