"""Whether bfloat16 makes the matrix products of a model faster on this processor.

Few processors multiply bfloat16 (AMX, AVX512-BF16); others widen it first, at half of float32's
speed. Shapes: B batch, N width of a layer's input, M width of its output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dlrm_hybrid.model.products import affine, gradient_of_input, gradient_of_weight

MEASURE_SECONDS = 0.4
_TYPES = (torch.float32, torch.bfloat16)


def bfloat16_speed(layers: Sequence[tuple[int, int]], batch: int) -> float:
    """How many times as fast all products of these layers are in bfloat16 as in float32.

    The best of many short rounds of each, in turn, so that another program's load weighs on both.
    Draws no random numbers.

    Args:
        layers: N and M of each.
        batch: B.
    """
    rounds = [[_layer(n, m, batch, dtype) for n, m in layers] for dtype in _TYPES]
    best = [float("inf"), float("inf")]
    for _ in range(2):  # the first one sets oneDNN up
        best = [float("inf"), float("inf")]
        until = time.perf_counter() + MEASURE_SECONDS / 2
        while time.perf_counter() < until or best[1] == float("inf"):
            for place, tensors in enumerate(rounds):
                begin = time.perf_counter()
                for x_BN, weight_MN, bias_M, g_BM in tensors:
                    affine(x_BN, weight_MN, bias_M, relu=True)
                    gradient_of_input(g_BM, weight_MN)
                    gradient_of_weight(g_BM, x_BN, weight_MN)
                best[place] = min(best[place], time.perf_counter() - begin)
    return best[0] / best[1]


def _layer(n: int, m: int, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shapes = ((batch, n), (m, n), (m,), (batch, m))
    return tuple(torch.full(shape, 0.5, dtype=dtype) for shape in shapes)
