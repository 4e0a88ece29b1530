"""MLPs as one autograd node.

Shapes: B batch, N width of a layer's input, M width of its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from dlrm_hybrid.model.layers.dropout import Dropout
from dlrm_hybrid.model.layers.products import (
    Precision,
    affine,
    as_type,
    gradient_of_input,
    gradient_of_weight,
    hidden_type,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Type of a layer's products, and whether ReLU and dropout follow."""

    dtype: torch.dtype
    relu: bool
    dropout: Dropout | None


@final
class _Chain(torch.autograd.Function):
    """x W^T + b, layer after layer, each in its own type and with its own ReLU or none.

    A layer computes the same bits whatever chain it is in: results that leave a chain as
    float32 lose nothing, so a chain may be cut between any two layers. Of what is dropped nothing
    is kept for backward: like what ReLU cuts it is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, kinds: tuple[_Kind, ...], rows: range | None, x_BN: Tensor, *parameters: Tensor
    ) -> Tensor:
        saved: list[Tensor] = []
        for kind, weight_MN, bias_M in zip(kinds, parameters[0::2], parameters[1::2], strict=True):
            x_BN, weight_MN = as_type(x_BN, kind.dtype), as_type(weight_MN, kind.dtype)
            saved += (x_BN, weight_MN)
            x_BN = affine(x_BN, weight_MN, as_type(bias_M, kind.dtype), relu=kind.relu)
            if kind.dropout is not None and rows is not None:
                dropped = kind.dropout.dropped(rows, x_BN.shape[1])
                x_BN.masked_fill_(dropped.to(x_BN.device), 0).mul_(kind.dropout.scale)
        ctx.kinds, ctx.drops = kinds, rows is not None
        ctx.save_for_backward(*saved, x_BN)
        return as_type(x_BN, torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BM,) = gradients
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        kinds: tuple[_Kind, ...] = ctx.kinds
        wants_input = ctx.needs_input_grad[2]
        of_parameters: list[Tensor] = []
        for layer in reversed(range(len(kinds))):
            x_BN, weight_MN, y_BM = saved[2 * layer : 2 * layer + 3]
            kind = kinds[layer]
            g_BM = as_type(g_BM, kind.dtype)
            if kind.relu:
                mask, y_BM = torch.ops.aten.threshold_backward, as_type(y_BM, kind.dtype)
                if layer == len(kinds) - 1:  # what arrived belongs to the caller
                    g_BM = mask.default(g_BM, y_BM, 0)
                else:
                    mask.grad_input(g_BM, y_BM, 0, grad_input=g_BM)
                if kind.dropout is not None and ctx.drops:
                    g_BM.mul_(kind.dropout.scale)
            of_weight_MN = as_type(gradient_of_weight(g_BM, x_BN, weight_MN), torch.float32)
            of_parameters += (g_BM.sum(0, dtype=torch.float32), of_weight_MN)
            if layer > 0 or wants_input:
                g_BM = gradient_of_input(g_BM, weight_MN)
        of_input = as_type(g_BM, torch.float32) if wants_input else None
        return (None, None, of_input, *reversed(of_parameters))


@final
class Layer(nn.Module):
    """The parameters of one layer: `weight` (M, N) and `bias` (M,), float32, zero until drawn."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(fan_out, fan_in))
        self.bias = nn.Parameter(torch.zeros(fan_out))


@final
class Mlp(nn.Module):
    """Layers `1`, `2`, … or some of them: x_BN float32 → float32 (B, M), each with ReLU.

    In bfloat16 the last layer still multiplies in float32: it is small, slower in bfloat16, and
    its output would have three digits only.

    Args:
        widths: of the input and of every layer.
        relu_last: whether ReLU follows the last layer too.
        precision: type of the products of all layers but the last.
        layers: numbers of consecutive layers to hold; None for all. Each keeps the name and the
            type that it has in the full MLP.
        dropout: of each layer by its number.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        *,
        relu_last: bool,
        precision: Precision,
        layers: range | None = None,
        dropout: Mapping[int, Dropout] | None = None,
    ) -> None:
        super().__init__()
        last = len(widths) - 1
        layers = range(1, last + 1) if layers is None else layers
        hidden = hidden_type(precision)
        self._kinds = tuple(
            _Kind(
                torch.float32 if number == last else hidden,
                relu_last or number < last,
                (dropout or {}).get(number),
            )
            for number in layers
        )
        for number in layers:
            self.add_module(str(number), Layer(widths[number - 1], widths[number]))
        self._flat = tuple(self.parameters())

    def forward(self, x_BN: Tensor, rows: range | None = None) -> Tensor:
        """The chain's output, (B, M of the last layer).

        Args:
            x_BN: float32.
            rows: numbers of the rows, for dropout; None drops nothing.
        """
        return cast(Tensor, _Chain.apply(self._kinds, rows, x_BN, *self._flat))


def hidden_dropout(mlp: str, layers: range, share: float, seed: int) -> dict[int, Dropout]:
    """Of the layers with these numbers.

    Args:
        mlp: `bottom`, `top` …, for the names of its layers.
        layers: those that drop.
        share: of their activations; 0 drops nothing.
        seed: of the run.
    """
    if not share:
        return {}
    return {number: Dropout.of(f"{mlp}.{number}", share, seed) for number in layers}
