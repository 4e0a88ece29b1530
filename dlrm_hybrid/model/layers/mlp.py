"""MLPs as one autograd node.

Shapes: B batch, N width of a layer's input, M width of its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_hybrid.model.layers.norm import Norm, Normed
from dlrm_hybrid.model.layers.products import (
    Precision,
    affine,
    as_type,
    gradient_of_input,
    gradient_of_weight,
    hidden_type,
)
from dlrm_hybrid.rng import fold, splitmix64

LEVELS = 1 << 16  # 16 random bits for each activation
PER_WORD = 4  # activations


@final
@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of one layer in training (Srivastava et al., 2014), scaled as torch.nn.Dropout.

    Masks depend on the row alone, however batches are split. Rows are numbered over the run, batch
    after batch and trainer after trainer: row r of trainer t's batch n is (n T + t) B + r. So
    micro-batches, stages, processes and resumed runs drop the same activations, and T trainers with
    batches of B the same as one with T B.

    Attributes:
        stream: seed of the layer's random bits.
        share: share of its activations dropped, in steps of 1 / 65,536.
    """

    stream: int
    share: float

    @classmethod
    def of(cls, layer: str, share: float, seed: int) -> Dropout:
        """Make the dropout of the layer of this name, `top.1`, in a run with this seed."""
        return cls(fold(seed, "dropout", layer), round(share * LEVELS) / LEVELS)

    @property
    def scale(self) -> float:
        """Factor of kept activations, which preserves their mean."""
        return 1 / (1 - self.share)

    def dropped(self, rows: range, width: int) -> Tensor:
        """Draw the mask of activations that become 0, bool (b, M).

        Args:
            rows: consecutive numbers of the rows.
            width: M.
        """
        words = -(-width // PER_WORD)
        bits = splitmix64(self.stream, len(rows) * words, first=rows.start * words)
        bits_bM = bits.view(np.uint16).reshape(len(rows), -1)[:, :width]
        return torch.from_numpy(bits_bM < np.uint16(self.share * LEVELS))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Type of a layer's products, and the norm, ReLU and dropout after them."""

    dtype: torch.dtype
    relu: bool
    dropout: Dropout | None
    norm: Norm | None

    @property
    def follows(self) -> torch.dtype:
        """Type in which all that follows the product is computed."""
        return self.dtype if self.norm is None else torch.float32


@final
class _Chain(torch.autograd.Function):
    """x W^T + b, layer after layer, each in its own type, with ReLU or without.

    A layer gives the same bits in any chain: float32 outputs lose nothing, so a chain may be cut
    between any two layers. No dropout mask is kept for backward: what is dropped is 0, like what
    ReLU cuts. A layer with batch norm has the norm's `weight` and `bias` instead of b.
    """

    @staticmethod
    def forward(
        ctx: Any, kinds: tuple[_Kind, ...], rows: range | None, x_BN: Tensor, *parameters: Tensor
    ) -> Tensor:
        operands: list[Tensor] = []
        of_norms: list[Tensor] = []
        rest = iter(parameters)
        for kind in kinds:
            x_BN, weight_MN = as_type(x_BN, kind.dtype), as_type(next(rest), kind.dtype)
            operands += (x_BN, weight_MN)
            if kind.norm is None:
                x_BN = affine(x_BN, weight_MN, as_type(next(rest), kind.dtype), relu=kind.relu)
            else:
                x_BN = as_type(affine(x_BN, weight_MN, None, relu=False), torch.float32)
                x_BN, norm = kind.norm.normed(x_BN, next(rest), next(rest), trains=rows is not None)
                x_BN.relu_()
                of_norms += norm
            if kind.dropout is not None and rows is not None:
                dropped = kind.dropout.dropped(rows, x_BN.shape[1])
                mask = dropped.to(x_BN.device, non_blocking=True)
                x_BN.masked_fill_(mask, 0).mul_(kind.dropout.scale)
        ctx.kinds, ctx.trains = kinds, rows is not None
        ctx.save_for_backward(*operands, x_BN, *of_norms)
        return as_type(x_BN, torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BM,) = gradients
        kinds: tuple[_Kind, ...] = ctx.kinds
        products = 2 * len(kinds) + 1
        operands: tuple[Tensor, ...] = ctx.saved_tensors[:products]
        of_norms: list[Tensor] = list(ctx.saved_tensors[products:])
        wants_input = ctx.needs_input_grad[2]
        of_parameters: list[Tensor] = []
        for layer in reversed(range(len(kinds))):
            x_BN, weight_MN, y_BM = operands[2 * layer : 2 * layer + 3]
            kind = kinds[layer]
            g_BM = as_type(g_BM, kind.follows)
            if kind.relu:
                mask, y_BM = torch.ops.aten.threshold_backward, as_type(y_BM, kind.follows)
                if layer == len(kinds) - 1:  # this gradient belongs to the caller
                    g_BM = mask.default(g_BM, y_BM, 0)
                else:
                    mask.grad_input(g_BM, y_BM, 0, grad_input=g_BM)
                if kind.dropout is not None and ctx.trains:
                    g_BM.mul_(kind.dropout.scale)
            if kind.norm is None:
                of_parameters.append(g_BM.sum(0, dtype=torch.float32))
            else:
                norm = Normed(*of_norms[-len(Normed._fields) :])
                del of_norms[-len(Normed._fields) :]
                g_BM, of_scale_M, of_shift_M = kind.norm.gradients(g_BM, norm, trains=ctx.trains)
                of_parameters += (of_shift_M, of_scale_M)
                g_BM = as_type(g_BM, kind.dtype)
            of_parameters.append(as_type(gradient_of_weight(g_BM, x_BN), torch.float32))
            if layer > 0 or wants_input:
                g_BM = gradient_of_input(g_BM, weight_MN)
        of_input = as_type(g_BM, torch.float32) if wants_input else None
        return (None, None, of_input, *reversed(of_parameters))


@final
class Layer(nn.Module):
    """The parameters of one layer: `weight` (M, N) and `bias` (M,), float32, zero until drawn.

    With batch norm, `norm` replaces `bias`, which normalising would cancel.
    """

    def __init__(self, fan_in: int, fan_out: int, *, has_norm: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(fan_out, fan_in))
        self.norm = Norm(fan_out) if has_norm else None
        if self.norm is None:
            self.bias = nn.Parameter(torch.zeros(fan_out))


@final
class Mlp(nn.Module):
    """Consecutive layers `1`, `2`, … of an MLP: float32 x_BN → float32 (B, M), each with ReLU.

    In bfloat16 the last layer still multiplies in float32: it is small, slower in bfloat16, and
    its output would have only three digits.

    Args:
        widths: widths of the input and of every layer.
        relu_last: whether ReLU follows the last layer too.
        precision: type of the products of all layers but the last.
        layers: numbers of consecutive layers to hold; None for all. Each keeps its name and type
            of the full MLP.
        dropout: dropout of each layer by number.
        normed: numbers of the layers with batch norm; ReLU follows them all.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        *,
        relu_last: bool,
        precision: Precision,
        layers: range | None = None,
        dropout: Mapping[int, Dropout] | None = None,
        normed: range = range(0),
    ) -> None:
        super().__init__()
        last = len(widths) - 1
        layers = range(1, last + 1) if layers is None else layers
        hidden = hidden_type(precision)
        kinds: list[_Kind] = []
        for number in layers:
            layer = Layer(widths[number - 1], widths[number], has_norm=number in normed)
            self.add_module(str(number), layer)
            dtype = torch.float32 if number == last else hidden
            relu, drops = relu_last or number < last, (dropout or {}).get(number)
            kinds.append(_Kind(dtype, relu, drops, layer.norm))
        self._kinds = tuple(kinds)
        self._flat = tuple(self.parameters())

    def forward(self, x_BN: Tensor, rows: range | None = None) -> Tensor:
        """Compute the last layer's output, (B, M).

        Args:
            x_BN: float32.
            rows: numbers of the rows of a training batch, for dropout; None for inference, without
                dropout and with running statistics.
        """
        return cast(Tensor, _Chain.apply(self._kinds, rows, x_BN, *self._flat))


def hidden_dropout(mlp: str, layers: range, share: float, seed: int) -> dict[int, Dropout]:
    """Make the dropout of some layers, by their number.

    Args:
        mlp: `bottom`, `top` …, for the names of its layers.
        share: share of their activations dropped; 0 drops nothing.
    """
    if not share:
        return {}
    return {number: Dropout.of(f"{mlp}.{number}", share, seed) for number in layers}
