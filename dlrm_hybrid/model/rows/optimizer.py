"""Rows of embedding tables, updated by their optimizer when they were looked up.

Shapes: F tables, R rows of all, D embedding dimension; G gradients of rows or of bags, K ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import final

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
    """Number of bits for a gradient's number in a key.

    Raises:
        ResourceError: a row's and a gradient's bits exceed a key.
    """
    shift = gradients.bit_length()
    if rows.bit_length() + shift > KEY_BITS:
        raise ResourceError(
            f"{rows:,} rows of tables in one process and {gradients:,} gradients in one update: "
            f"their numbers have more than {KEY_BITS} bits together; needs smaller batches"
        )
    return shift
