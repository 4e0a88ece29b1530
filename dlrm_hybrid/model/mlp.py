"""A chain of fully connected layers, written out by hand: one node in the autograd graph.

Shapes: B batch, N width of a layer's input, M width of its output.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast, final

import torch
from torch import Tensor, nn


class Precision(StrEnum):
    """In which type the hidden layers multiply; parameters and gradients are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@final
class _Chain(torch.autograd.Function):
    """ReLU(x W^T + b), layer after layer; the last `ReLU` only where asked for.

    The graph of separate layers costs about 0.2 ms in a step of 6 ms at batch 128.
    In bfloat16 all layers but the last multiply in bfloat16 with float32 accumulation. The last one
    is small, slow in bfloat16, and its output would lose all but three digits.
    """

    @staticmethod
    def forward(ctx: Any, relu_last: bool, half: bool, x_BN: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[0::2], parameters[1::2]
        last = len(weights) - 1
        saved: list[Tensor] = []
        for layer, (weight_MN, bias_M) in enumerate(zip(weights, biases, strict=True)):
            kind = torch.bfloat16 if half and layer < last else torch.float32
            x_BN, weight_MN = x_BN.to(kind), weight_MN.to(kind)
            saved += (x_BN, weight_MN)
            x_BN = torch.addmm(bias_M.to(kind), x_BN, weight_MN.t())
            if layer < last or relu_last:
                x_BN.relu_()
        ctx.relu_last = relu_last
        ctx.save_for_backward(*saved, x_BN)
        return x_BN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BM,) = gradients
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        y_BM = saved[-1]
        of_parameters: list[Tensor] = []
        wants_input = ctx.needs_input_grad[2]
        count = len(saved) // 2
        for layer in reversed(range(count)):
            x_BN, weight_MN = saved[2 * layer], saved[2 * layer + 1]
            g_BM = g_BM.to(x_BN.dtype)
            if layer < count - 1 or ctx.relu_last:
                g_BM = torch.ops.aten.threshold_backward(g_BM, y_BM.to(x_BN.dtype), 0)
            of_parameters += (g_BM.sum(0, dtype=torch.float32), g_BM.t().mm(x_BN).float())
            if layer > 0 or wants_input:
                g_BM = g_BM.mm(weight_MN)
            y_BM = x_BN
        return (None, None, g_BM.float() if wants_input else None, *reversed(of_parameters))


@final
class Layer(nn.Module):
    """The parameters of one layer: `weight` (M, N) and `bias` (M,), float32, zero until drawn."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(fan_out, fan_in))
        self.bias = nn.Parameter(torch.zeros(fan_out))


@final
class Mlp(nn.Module):
    """Layers `1`, `2`, …: x_BN float32 → float32 (B, widths[-1]), ReLU after every layer.

    Args:
        widths: of the input and of every layer.
        relu_last: whether ReLU follows the last layer too.
        precision: type of the products of all layers but the last.
    """

    def __init__(self, widths: tuple[int, ...], *, relu_last: bool, precision: Precision) -> None:
        super().__init__()
        self._relu_last = relu_last
        self._half = precision is Precision.BFLOAT16
        parameters: list[nn.Parameter] = []
        for number, (fan_in, fan_out) in enumerate(zip(widths, widths[1:], strict=False), start=1):
            layer = Layer(fan_in, fan_out)
            self.add_module(str(number), layer)
            parameters += (layer.weight, layer.bias)
        self._flat = tuple(parameters)

    def forward(self, x_BN: Tensor) -> Tensor:
        """The chain's output, (B, M of the last layer)."""
        return cast(Tensor, _Chain.apply(self._relu_last, self._half, x_BN, *self._flat))
