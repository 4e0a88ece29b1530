"""The dense layers: matrix products, MLPs as one autograd node, dot interaction; bfloat16's speed.

torch multiplies float32 with MKL, whose AVX2 kernels on AMD reach half of what oneDNN's AVX-512
kernels do (105 against 205 GFLOP/s on one Zen 5 core at batch 128), but for tiny layers. bfloat16
goes to oneDNN in any case. Which library multiplies depends on the layer's shape alone, so the same
batch gives the same bits in every process of a machine. On other devices torch multiplies.

Shapes: B batch, N width of a layer's input, M width of its output; F vectors of a row (bottom MLP
first, then the tables), D their width, P = F(F-1)/2 pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

ONEDNN_ELEMENTS = 4096  # of a weight: below, oneDNN's set-up costs more than it saves
NARROW = 32  # inputs: a product with so few columns is better computed transposed


def affine(x_BN: Tensor, weight_MN: Tensor, bias_M: Tensor, *, relu: bool) -> Tensor:
    """x W^T + b, cut at 0 if `relu`: (B, M); all of one type."""
    if _onednn_is_faster(weight_MN) or _onednn_fuses_relu(weight_MN):
        return _onednn(x_BN, weight_MN, bias_M, relu=relu)
    y_BM = functional.linear(x_BN, weight_MN, bias_M)
    return y_BM.relu_() if relu else y_BM


def gradient_of_input(g_BM: Tensor, weight_MN: Tensor) -> Tensor:
    """G W: (B, N)."""
    if _onednn_is_faster(weight_MN):
        return _onednn(g_BM, weight_MN.t(), None, relu=False)
    return g_BM.mm(weight_MN)


def gradient_of_weight(g_BM: Tensor, x_BN: Tensor, weight_MN: Tensor) -> Tensor:
    """G^T X: (M, N); of `weight_MN` only the shape matters."""
    if not _onednn_is_faster(weight_MN):
        return g_BM.t().mm(x_BN)
    if x_BN.shape[1] < NARROW:
        return _onednn(x_BN.t(), g_BM.t(), None, relu=False).t()
    return _onednn(g_BM.t(), x_BN.t(), None, relu=False)


def _onednn_is_faster(weight_MN: Tensor) -> bool:
    return (
        weight_MN.dtype == torch.float32
        and weight_MN.numel() >= ONEDNN_ELEMENTS
        and weight_MN.is_cpu
        and _has_onednn()
    )


def _onednn_fuses_relu(weight_MN: Tensor) -> bool:
    return weight_MN.dtype == torch.bfloat16 and weight_MN.is_cpu and _has_onednn()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    product: Tensor = _operator()(x, weight, bias, "relu" if relu else "none", [], "")
    return product


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available()


@cache
def _operator() -> Any:
    # The operator that torch.compile calls for linear layers; any strides will do.
    return torch.ops.mkldnn._linear_pointwise.default


class Precision(StrEnum):
    """In which type the hidden layers multiply; parameters and gradients are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one layer computes."""

    dtype: torch.dtype
    relu: bool


@final
class _Chain(torch.autograd.Function):
    """x W^T + b, layer after layer, each in its own type and with its own ReLU or none.

    A layer computes the same bits whatever chain it is in: results that leave a chain as
    float32 lose nothing, so a chain may be cut between any two layers.
    """

    @staticmethod
    def forward(ctx: Any, kinds: tuple[_Kind, ...], x_BN: Tensor, *parameters: Tensor) -> Tensor:
        saved: list[Tensor] = []
        for kind, weight_MN, bias_M in zip(kinds, parameters[0::2], parameters[1::2], strict=True):
            x_BN, weight_MN = _cast(x_BN, kind.dtype), _cast(weight_MN, kind.dtype)
            saved += (x_BN, weight_MN)
            x_BN = affine(x_BN, weight_MN, _cast(bias_M, kind.dtype), relu=kind.relu)
        ctx.kinds = kinds
        ctx.save_for_backward(*saved, x_BN)
        return _cast(x_BN, torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BM,) = gradients
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        kinds: tuple[_Kind, ...] = ctx.kinds
        wants_input = ctx.needs_input_grad[1]
        of_parameters: list[Tensor] = []
        for layer in reversed(range(len(kinds))):
            x_BN, weight_MN, y_BM = saved[2 * layer : 2 * layer + 3]
            kind = kinds[layer]
            g_BM = _cast(g_BM, kind.dtype)
            if kind.relu:
                mask, y_BM = torch.ops.aten.threshold_backward, _cast(y_BM, kind.dtype)
                if layer == len(kinds) - 1:  # what arrived belongs to the caller
                    g_BM = mask.default(g_BM, y_BM, 0)
                else:
                    mask.grad_input(g_BM, y_BM, 0, grad_input=g_BM)
            of_weight_MN = _cast(gradient_of_weight(g_BM, x_BN, weight_MN), torch.float32)
            of_parameters += (g_BM.sum(0, dtype=torch.float32), of_weight_MN)
            if layer > 0 or wants_input:
                g_BM = gradient_of_input(g_BM, weight_MN)
        of_input = _cast(g_BM, torch.float32) if wants_input else None
        return (None, of_input, *reversed(of_parameters))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A step would call `to` forty times without need.
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


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
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        *,
        relu_last: bool,
        precision: Precision,
        layers: range | None = None,
    ) -> None:
        super().__init__()
        last = len(widths) - 1
        layers = range(1, last + 1) if layers is None else layers
        hidden = torch.bfloat16 if precision is Precision.BFLOAT16 else torch.float32
        self._kinds = tuple(
            _Kind(torch.float32, relu_last) if number == last else _Kind(hidden, relu=True)
            for number in layers
        )
        for number in layers:
            self.add_module(str(number), Layer(widths[number - 1], widths[number]))
        self._flat = tuple(self.parameters())

    def forward(self, x_BN: Tensor) -> Tensor:
        """The chain's output, (B, M of the last layer)."""
        return cast(Tensor, _Chain.apply(self._kinds, x_BN, *self._flat))


@final
class _PairDots(torch.autograd.Function):
    """Forward one batched product and one gather; backward one gather and one batched product."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, e_BED: Tensor, pair_P: Tensor, column_FF: Tensor) -> Tensor:
        z_BFD = torch.cat((x_BD.unsqueeze(1), e_BED), 1)
        dots_BFF = torch.bmm(z_BFD, z_BFD.transpose(1, 2))
        ctx.save_for_backward(z_BFD, column_FF)
        return torch.cat((x_BD, dots_BFF.flatten(1).index_select(1, pair_P)), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BW,) = gradients
        z_BFD, column_FF = ctx.saved_tensors
        num_rows, num_vectors, dim = z_BFD.shape
        # d(z z^T) is symmetric with an empty diagonal: every pair's gradient is in it twice.
        # The diagonal reads some column and is cleared.
        g_BFF = g_BW.index_select(1, column_FF).view(num_rows, num_vectors, num_vectors)
        g_BFF.diagonal(dim1=1, dim2=2).zero_()
        g_BFD = torch.bmm(g_BFF, z_BFD)
        return g_BFD[:, 0] + g_BW[:, :dim], g_BFD[:, 1:], None, None


@final
class DotInteraction(nn.Module):
    """x_BD and e_BED → (B, D + P): x, then the dots of i with j for i < F, for j < i.

    The order of the pairs and the absence of self-pairs as facebookresearch/dlrm.
    """

    _pairs: Tensor
    _columns: Tensor

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        position_FF = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        position_FF[row, column] = torch.arange(dim, dim + len(row))
        position_FF += position_FF.t().clone()
        self.register_buffer("_pairs", row * num_vectors + column, persistent=False)
        self.register_buffer("_columns", position_FF.flatten(), persistent=False)

    def forward(self, x_BD: Tensor, e_BED: Tensor) -> Tensor:
        """The input of the top MLP, float32 (B, D + P)."""
        return cast(Tensor, _PairDots.apply(x_BD, e_BED, self._pairs, self._columns))


MEASURE_SECONDS = 0.4
LIMIT_SECONDS = 1.0  # wanted on a busy machine, or one that multiplies bfloat16 very slowly
ROUND_FLOPS = 1e9  # of all layers once, a few hundredths of a second; larger batches are cut
LEAST_ROWS = 64  # fewer measure memory, not arithmetic
_TYPES = (torch.float32, torch.bfloat16)
LayerInputs = Sequence[tuple[torch.Tensor, ...]]
"""Of each layer, see `layer_inputs`."""


@dataclass(frozen=True, slots=True)
class Bfloat16:
    """How fast bfloat16 products are on this processor, beside float32.

    Attributes:
        speed: of its matrix products; that of float32 is 1.
        repeats: how often each was measured.
    """

    speed: float
    repeats: int


def measure_bfloat16(layers: Sequence[tuple[int, int]], batch: int) -> Bfloat16:
    """How many times as fast all products of these layers are in bfloat16 as in float32.

    Few processors multiply bfloat16 (AMX, AVX512-BF16); others widen it first, at half of float32's
    speed.

    The best of many short rounds of each, in turn, so that another program's load weighs on both.
    Takes less than a second, or one round of each where `LEAST_ROWS` rows take longer: seconds for
    layers thousands wide. Draws no random numbers.

    Args:
        layers: N and M of each.
        batch: B.
    """
    row_flops = 6 * sum(n * m for n, m in layers)
    rows = min(batch, max(LEAST_ROWS, int(ROUND_FLOPS / row_flops)))
    both = [[layer_inputs(n, m, rows, dtype) for n, m in layers] for dtype in _TYPES]
    begin = time.perf_counter()
    first = _repeated(both, begin + MEASURE_SECONDS / 2)  # sets oneDNN up
    if time.perf_counter() - begin > LIMIT_SECONDS / 2:
        return first
    return _repeated(both, begin + MEASURE_SECONDS)


def _repeated(both: Sequence[LayerInputs], until: float) -> Bfloat16:
    best = [float("inf"), float("inf")]
    repeats = 0
    while not repeats or time.perf_counter() < until:
        for kind, layers in enumerate(both):
            begin = time.perf_counter()
            multiply(layers)
            best[kind] = min(best[kind], time.perf_counter() - begin)
        repeats += 1
    return Bfloat16(best[0] / best[1], repeats)


def multiply(layers: LayerInputs, input_gradients_from: int = 0) -> None:
    """The three products of each layer, one after the other, as training calls them.

    Args:
        layers: what each multiplies.
        input_gradients_from: the first layer whose input needs a gradient.
    """
    for number, (x_BN, weight_MN, bias_M, g_BM) in enumerate(layers):
        affine(x_BN, weight_MN, bias_M, relu=True)
        if number >= input_gradients_from:
            gradient_of_input(g_BM, weight_MN)
        gradient_of_weight(g_BM, x_BN, weight_MN)


def layer_inputs(n: int, m: int, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Input (B, N), weight (M, N), bias (M) and the output's gradient (B, M) of one layer."""
    shapes = ((batch, n), (m, n), (m,), (batch, m))
    return tuple(torch.full(shape, 0.5, dtype=dtype) for shape in shapes)
