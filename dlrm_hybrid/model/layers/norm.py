"""Batch norm between a layer's product and its ReLU, as torch.nn.BatchNorm1d.

Training normalises by mean and variance of the trainer's own batch, which are not exchanged;
inference by running ones, which are no parameters: no gradient moves them.

Shapes: B rows of a trainer's batch, M width of a layer's output.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor, nn

EPS = 1e-5
RUNNING = (".norm.running_mean", ".norm.running_var")  # endings of the names of statistics
MOMENTUM = 0.1  # share of a batch in the running mean and variance


class Normed(NamedTuple):
    """The tensors that backward needs of a forward.

    Attributes:
        scale_M: the factor applied after normalising.
        mean_M: mean of the batch; empty outside training.
        inverse_M: inverse of the batch's standard deviation; empty outside training.
    """

    entered_BM: Tensor
    scale_M: Tensor
    mean_M: Tensor
    inverse_M: Tensor


@final
class Norm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ioffe and Szegedy, 2015, algorithm 1).

    `weight` (M,) and `bias` (M,) are parameters, `running_mean` and `running_var` (M,) buffers, all
    float32. The running variance is the unbiased one.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def normed(
        self, x_BM: Tensor, scale_M: Tensor, shift_M: Tensor, *, trains: bool
    ) -> tuple[Tensor, Normed]:
        """Normalise rows to float32 (B, M); returns also what `gradients` needs.

        Args:
            scale_M: `weight`.
            shift_M: `bias`.
            trains: normalise by the batch's own mean and variance and update the running ones; the
                batch must have at least two rows.
        """
        results = torch.ops.aten.native_batch_norm.default(
            x_BM, scale_M, shift_M, *self._running(), trains, MOMENTUM, EPS
        )
        y_BM, mean_M, inverse_M = results
        return y_BM, Normed(x_BM, scale_M, mean_M, inverse_M)

    def gradients(
        self, g_BM: Tensor, context: Normed, *, trains: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the input (B, M), `weight` and `bias` (M,), from the output's gradient."""
        results: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward.default(
            *(g_BM, context.entered_BM, context.scale_M, *self._running()),
            *(context.mean_M, context.inverse_M, trains, EPS, [True, True, True]),
        )
        return results

    def _running(self) -> tuple[Tensor, Tensor]:
        return self.running_mean, self.running_var


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """All running means and variances of a model by name: `top.1.norm.running_mean` …."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(RUNNING)}


def folded(
    weight_MN: Tensor, scale_M: Tensor, shift_M: Tensor, mean_M: Tensor, variance_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Fold batch norm into a layer: its weight and bias, equivalent after training."""
    factor_M = scale_M.double() / (variance_M.double() + EPS).sqrt()
    bias_M = shift_M.double() - factor_M * mean_M.double()
    return (weight_MN.double() * factor_M.unsqueeze(1)).float(), bias_M.float()
