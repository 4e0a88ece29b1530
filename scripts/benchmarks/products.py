"""CPU time of a step's matrix products alone: what a step on these libraries cannot go below.

    python scripts/benchmarks/products.py

The three products of every fully connected layer of the paper's model, one after the other, as
training calls them, in a loop with warm caches; the model's input needs no gradient. Prints a
Markdown table: microseconds per sample, median (lowest - highest) of the repeats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from step import criteo_bench
from table import render, spread
from torch import Tensor

from dlrm_hybrid.model.layers import affine, gradient_of_input, gradient_of_weight
from dlrm_hybrid.telemetry.machine import describe

ROWS = 8192
REPEATS = 9
Layer = tuple[Tensor, Tensor, Tensor, Tensor]


def main() -> None:
    """Measure, print the table."""
    torch.set_num_threads(1)
    rows = [
        {
            "batch": batch,
            "precision": str(dtype).removeprefix("torch."),
            "products, µs per sample": spread([1e6 * one for one in seconds(batch, dtype)], 1),
        }
        for batch in (128, 2048)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    print(
        render("Matrix products alone", describe(), "python scripts/benchmarks/products.py", rows)
    )


def seconds(batch: int, dtype: torch.dtype) -> list[float]:
    """CPU seconds per sample of each repeat."""
    layers = _layers(batch, dtype)
    _multiply(layers)
    found: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(ROWS // batch):
            _multiply(layers)
        found.append((time.process_time() - began) / ROWS)
    return found


def _layers(batch: int, dtype: torch.dtype) -> list[Layer]:
    spec = criteo_bench(1).spec
    return [
        (
            torch.randn(batch, fan_in, dtype=dtype),
            torch.randn(fan_out, fan_in, dtype=dtype),
            torch.randn(fan_out, dtype=dtype),
            torch.randn(batch, fan_out, dtype=dtype),
        )
        for mlp in (spec.bottom, spec.top_widths)
        for fan_in, fan_out in pairwise(mlp)
    ]


def _multiply(layers: Sequence[Layer]) -> None:
    with torch.no_grad():
        for number, (x_BN, weight_MN, bias_M, gradient_BM) in enumerate(layers):
            affine(x_BN, weight_MN, bias_M, relu=True)
            gradient_of_weight(gradient_BM, x_BN, weight_MN)
            if number > 0:
                gradient_of_input(gradient_BM, weight_MN)


if __name__ == "__main__":
    main()
