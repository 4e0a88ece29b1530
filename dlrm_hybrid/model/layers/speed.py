"""Measures the speed of bfloat16 products on this processor.

Shapes: B batch, N width of a layer's input, M width of its output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dlrm_hybrid.model.layers.products import affine, gradient_of_input, gradient_of_weight

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
        speed: that of its matrix products; float32 has 1.
        repeats: number of measurements of each.
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
    """Run the three products of each layer in turn, as training does.

    Args:
        layers: operands of each.
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
