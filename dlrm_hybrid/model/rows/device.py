"""Rows on a device, updated by torch's own operations; the host waits for none of them.

How many distinct rows a batch has is known on the device alone. So each id computes the new values
of its row, from the sum of all gradients of that row: equal ids write equal values.

Shapes: F tables, R rows of all, D embedding dimension; K ids of a batch, G gradients; C = D numbers
of state for each row, or one for the row.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dlrm_hybrid.model.placement import Placement
from dlrm_hybrid.model.rows.optimizer import UpdatedRows


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
