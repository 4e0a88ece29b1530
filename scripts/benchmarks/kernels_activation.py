"""CPU time of the activation kernels against the layer that they serve, and against torch.topk.

All contestants take turns on the same numbers in one thread, and every ratio is taken turn by
turn, so load on the machine touches it little. Time is CPU time of the thread.

Shapes: B rows of a micro-batch, N width of the boundary, K elements kept of all B * N.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import product
from statistics import median

import numpy as np
import torch
from table import Progress, Row, silent, told
from torch import Tensor

from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count
from dlrm_hybrid.kernels.rows import decode_rows, encode_rows, gather

WIDTH = 256
ROWS = (128, 512, 2048)
SPARSITIES = (0.75, 0.9, 0.95)
TURN_ROWS = 2048  # a turn is this many rows, for small batches end within microseconds
SEED = 0

Turn = Callable[[], object]


def measure_activation(repeats: int, progress: Progress = silent) -> list[Row]:
    """A row for every batch size, sparsity and kind of input; medians over `repeats` turns.

    A pass is one `y.add_(x)` of B x 256 float32; the layer is a product B x 256 by 256 x 256.
    `torch.topk` finds the largest magnitudes of every row and gathers the values.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _measure(*case, repeats)
            for case in told(
                "activations", list(product(ROWS, SPARSITIES, (False, True))), progress
            )
        ]
    finally:
        torch.set_num_threads(threads)


def _measure(rows: int, sparsity: float, rectified: bool, repeats: int) -> Row:
    generator = torch.Generator().manual_seed(SEED)
    x_BN = torch.randn(rows, WIDTH, generator=generator)
    x_BN = x_BN.relu() if rectified else x_BN
    turns = _turns(x_BN, keep_count(WIDTH, sparsity), generator)
    times = TURN_ROWS // rows
    for turn in turns.values():
        turn()  # the first turn pages memory in and is not counted
    rounds = [{name: _seconds(turn, times) for name, turn in turns.items()} for _ in range(repeats)]

    def ratio(above: str, below: str) -> float:
        return median(one[above] / one[below] for one in rounds)

    return {
        "rows": rows,
        "sparsity": sparsity,
        "input": "after ReLU" if rectified else "Gaussian",
        "pass, µs": 1e6 * median(one["pass"] for one in rounds),
        "encode, µs": 1e6 * median(one["encode"] for one in rounds),
        "topk / encode": ratio("topk", "encode"),
        "encode / layer": ratio("encode", "layer"),
        "decode / pass": ratio("decode", "pass"),
        "gather / pass": ratio("gather", "pass"),
    }


def _turns(x_BN: Tensor, keep: int, generator: torch.Generator) -> Mapping[str, Turn]:
    """What is compared, each on memory of its own."""
    weight_NM = torch.randn(WIDTH, WIDTH, generator=generator)
    sum_BN, left_BM = torch.zeros_like(x_BN), torch.empty_like(x_BN)
    indices_N = np.empty(x_BN.numel(), np.int32)
    values_N, out_N = np.empty(x_BN.numel(), np.float32), torch.empty_like(x_BN)
    tau_B = np.empty(x_BN.shape[0], np.float32)

    def encode() -> int:
        rows, width = x_BN.shape
        return encode_rows(x_BN.data_ptr(), rows, width, keep, indices_N, values_N, tau_B)

    kept = encode()
    indices_K, values_K = indices_N[:kept].copy(), values_N[:kept].copy()
    gathered_K = np.empty_like(values_K)

    def topk() -> Tensor:
        return x_BN.gather(1, torch.topk(x_BN.abs(), keep, dim=1, sorted=False).indices)

    return {
        "pass": lambda: sum_BN.add_(x_BN),
        "layer": lambda: torch.mm(x_BN, weight_NM, out=left_BM),
        "topk": topk,
        "encode": encode,
        "decode": lambda: decode_rows(indices_K, values_K, out_N.data_ptr(), out_N.numel()),
        "gather": lambda: gather(x_BN.data_ptr(), x_BN.numel(), indices_K, gathered_K),
    }


def _seconds(turn: Turn, times: int) -> float:
    """CPU seconds of one call, mean of a few in a row."""
    start = time.thread_time()
    for _ in range(times):
        turn()
    return (time.thread_time() - start) / times
