"""The matrix products of a layer, each by the library that is fastest for its shape.

torch multiplies float32 with MKL, whose AVX2 kernels on AMD reach half of what oneDNN's AVX-512
kernels do (105 against 205 GFLOP/s on one Zen 5 core at batch 128), except for tiny layers.
bfloat16 goes to oneDNN if there is AVX-512 for it; else, as on AMD's before Zen 4, operands
are widened to float32 and the product is rounded: torch's own loops are far slower. Which library
multiplies depends on processor and shape alone, so the same batch gives the same bits in every
process of a machine. On other devices torch multiplies.

Shapes: B batch, N width of a layer's input, M width of its output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ONEDNN_ELEMENTS = 4096  # in smaller weights oneDNN's set-up costs more than it saves
NARROW = 32  # inputs: a product with so few columns is better computed transposed


def affine(x_BN: Tensor, weight_MN: Tensor, bias_M: Tensor | None, *, relu: bool) -> Tensor:
    """Compute x W^T + b, with ReLU if `relu`: (B, M); all of one type, b may be None."""
    if _is_widened(x_BN):
        wide_M = None if bias_M is None else bias_M.float()
        return affine(x_BN.float(), weight_MN.float(), wide_M, relu=relu).to(weight_MN.dtype)
    if _onednn_is_faster(x_BN, weight_MN.numel()) or _is_bfloat16(x_BN):
        return _onednn(x_BN, weight_MN, bias_M, relu=relu)
    y_BM = functional.linear(x_BN, weight_MN, bias_M)
    return y_BM.relu_() if relu else y_BM


def gradient_of_input(g_BM: Tensor, weight_MN: Tensor) -> Tensor:
    """Compute the gradient of a layer's input, G W: (B, N)."""
    if _is_widened(g_BM):
        return gradient_of_input(g_BM.float(), weight_MN.float()).to(weight_MN.dtype)
    if _onednn_is_faster(g_BM, weight_MN.numel()):
        return _onednn(g_BM, weight_MN.t(), None, relu=False)
    return g_BM.mm(weight_MN)


def gradient_of_weight(g_BM: Tensor, x_BN: Tensor) -> Tensor:
    """Compute the gradient of a layer's weight, G^T X: (M, N)."""
    if _is_widened(x_BN):
        return gradient_of_weight(g_BM.float(), x_BN.float()).to(x_BN.dtype)
    if not _onednn_is_faster(x_BN, g_BM.shape[1] * x_BN.shape[1]):
        return g_BM.t().mm(x_BN)
    if x_BN.shape[1] < NARROW:
        return _onednn(x_BN.t(), g_BM.t(), None, relu=False).t()
    return _onednn(g_BM.t(), x_BN.t(), None, relu=False)


def _onednn_is_faster(operand: Tensor, weight_elements: int) -> bool:
    return (
        operand.dtype == torch.float32
        and weight_elements >= ONEDNN_ELEMENTS
        and operand.is_cpu
        and _has_onednn()
    )


def _is_bfloat16(operand: Tensor) -> bool:
    """Whether a product is oneDNN's, which fuses ReLU, or must be widened."""
    return operand.dtype == torch.bfloat16 and operand.is_cpu


def _is_widened(operand: Tensor) -> bool:
    return _is_bfloat16(operand) and not _multiplies_bfloat16()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    product: Tensor = _operator()(x, weight, bias, "relu" if relu else "none", [], "")
    return product


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available()


@cache
def _multiplies_bfloat16() -> bool:
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _operator() -> Any:
    # The operator that torch.compile calls for linear layers; it takes any strides.
    return torch.ops.mkldnn._linear_pointwise.default


class Precision(StrEnum):
    """Type in which hidden layers multiply; parameters and gradients are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def hidden_type(precision: Precision) -> torch.dtype:
    """The torch type in which the hidden layers multiply."""
    return torch.bfloat16 if precision is Precision.BFLOAT16 else torch.float32


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor, unless it has the type."""
    # A step would call `to` forty times for nothing.
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


MEASURE_SECONDS = 0.4
LIMIT_SECONDS = 1.0  # guards busy machines, and those very slow at bfloat16
ROUND_FLOPS = 1e9  # all layers once, a few hundredths of a second; larger batches are cut
LEAST_ROWS = 64  # fewer measure memory, not arithmetic
_TYPES = (torch.float32, torch.bfloat16)
LayerInputs = Sequence[tuple[torch.Tensor, ...]]
"""One tuple per layer, see `layer_inputs`."""


@dataclass(frozen=True, slots=True)
class Bfloat16:
    """Speed of bfloat16 products on this processor, relative to float32.

    Attributes:
        speed: speed of its matrix products; float32 has 1.
    """

    speed: float
    repeats: int


def measure_bfloat16(layers: Sequence[tuple[int, int]], batch: int) -> Bfloat16:
    """Measure how many times as fast these layers' products are in bfloat16 as in float32.

    Few processors multiply bfloat16 (AMX, AVX512-BF16); others widen it, at half the speed.

    It takes the best of many short rounds of each, in turn, so that another program's load weighs
    on both: less than a second, or one round of each if `LEAST_ROWS` rows take longer (seconds for
    layers thousands wide). Draws no random numbers.

    Args:
        layers: N and M per layer.
    """
    row_flops = 6 * sum(n * m for n, m in layers)
    rows = min(batch, max(LEAST_ROWS, int(ROUND_FLOPS / row_flops)))
    inputs = [[layer_inputs(n, m, rows, dtype) for n, m in layers] for dtype in _TYPES]
    begin = time.perf_counter()
    first = _repeated(inputs, begin + MEASURE_SECONDS / 2)  # sets oneDNN up
    if time.perf_counter() - begin > LIMIT_SECONDS / 2:
        return first
    return _repeated(inputs, begin + MEASURE_SECONDS)


def _repeated(inputs: Sequence[LayerInputs], until: float) -> Bfloat16:
    best = [float("inf"), float("inf")]
    repeats = 0
    while not repeats or time.perf_counter() < until:
        for kind, layers in enumerate(inputs):
            begin = time.perf_counter()
            multiply(layers)
            best[kind] = min(best[kind], time.perf_counter() - begin)
        repeats += 1
    return Bfloat16(best[0] / best[1], repeats)


def multiply(layers: LayerInputs, input_gradients_from: int = 0) -> None:
    """Run the three products of each layer in turn, as training does.

    Args:
        input_gradients_from: the first layer whose input needs a gradient.
    """
    for number, (x_BN, weight_MN, bias_M, g_BM) in enumerate(layers):
        affine(x_BN, weight_MN, bias_M, relu=True)
        if number >= input_gradients_from:
            gradient_of_input(g_BM, weight_MN)
        gradient_of_weight(g_BM, x_BN)


def layer_inputs(n: int, m: int, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Make input (B, N), weight (M, N), bias (M) and output gradient (B, M) of one layer."""
    shapes = ((batch, n), (m, n), (m,), (batch, m))
    return tuple(torch.full(shape, 0.5, dtype=dtype) for shape in shapes)
