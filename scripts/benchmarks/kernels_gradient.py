"""CPU time of selecting and of finding thresholds, against one pass over memory and libraries.

All contestants take turns on the same numbers in one thread, and every ratio is taken turn by
turn, so load on the machine touches it little. Time is CPU time of the thread.

Shapes: N elements of a tensor, K that leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import product
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from table import Progress, Row, silent, told
from torch import Tensor

from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.kernels.select import accumulate_select

SELECT_SIZES = (131_072, 1_000_000, 15_000_000)
THRESHOLD_SIZE = 1_000_000
DENSITIES = (0.1, 0.01, 0.001)
LARGE = 15_000_000
# Passes that a selection may take, by density: below LARGE elements, and from there.
SMALL_GOALS = {0.1: 4.0, 0.01: 3.0}
LARGE_GOALS = {0.1: 1.8, 0.01: 1.5}
TOPK_GOAL = 5.0
SHIFT = 61
SEED = 0

Float32s = NDArray[np.float32]


def measure_select(sizes: tuple[int, ...], repeats: int, progress: Progress = silent) -> list[Row]:
    """A row for every size and density; medians over `repeats` turns.

    A pass is one `residual.add_(gradient)`; "torch" does what the selection does in plain torch
    operations.
    """
    cases = list(product(sizes, DENSITIES))
    return [
        _select_row(size, density, repeats)
        for size, density in told("select", cases, progress, cost=lambda case: case[0])
    ]


def measure_threshold(
    tensors: Mapping[str, Float32s], repeats: int, progress: Progress = silent
) -> list[Row]:
    """A row for every tensor of `drawn` and of `tensors`, and every density.

    Libraries are given the magnitudes; the goal is against `torch.topk`.
    """
    cases = [
        (name, values_N, density)
        for name, values_N in {**drawn(THRESHOLD_SIZE), **tensors}.items()
        for density in DENSITIES
        if values_N.size * density >= 100
    ]
    return [
        _threshold_row(*case, repeats)
        for case in told("threshold", cases, progress, cost=lambda case: case[1].size)
    ]


def drawn(size: int) -> dict[str, Float32s]:
    """Values of four distributions, from light tails to heavy ones."""
    rng = np.random.default_rng(SEED)
    draws = {
        "normal": rng.standard_normal(size),
        "Laplace": rng.laplace(size=size),
        "gamma(½), either sign": rng.gamma(0.5, size=size) * rng.choice([-1, 1], size),
        "Student-3": rng.standard_t(3, size),
    }
    return {name: (1e-3 * values).astype(np.float32) for name, values in draws.items()}


def seconds(turn: Callable[[], object]) -> float:
    """CPU seconds of one call, of this thread."""
    start = time.thread_time()
    turn()
    return time.thread_time() - start


def libraries(sizes_N: Float32s, keep: int) -> dict[str, float]:
    """CPU seconds in which libraries find the magnitude that `keep` elements reach.

    Args:
        sizes_N: the magnitudes, which they are given.
        keep: 1 to N.
    """
    sizes, place = torch.from_numpy(sizes_N), sizes_N.size - keep
    return {
        "topk": seconds(lambda: torch.topk(sizes, keep, sorted=False)),
        "kthvalue": seconds(lambda: torch.kthvalue(sizes, place + 1)),
        "partition": seconds(lambda: np.partition(sizes_N, place)),
    }


def _select_row(size: int, density: float, repeats: int) -> Row:
    rng = np.random.default_rng(SEED)
    # Each round has other sums: a processor learns the branches of the same ones by heart.
    stream = rng.standard_normal(size + SHIFT * (repeats + 1), dtype=np.float32)
    before_N = rng.standard_normal(size, dtype=np.float32)
    tau = magnitude_of_rank(stream[:size] + before_N, int(size * density))
    gradient, residual = torch.empty(size), torch.empty(size)
    gradient_N, residual_N = gradient.numpy(), residual.numpy()
    indices_K, values_K = np.empty(size, np.int32), np.empty(size, np.float32)
    turns: dict[str, Callable[[], object]] = {
        "pass": lambda: residual.add_(gradient),
        "select": lambda: accumulate_select(gradient_N, residual_N, tau, indices_K, values_K),
        "torch": lambda: _plain_select(gradient, residual, tau),
    }

    def one_round(number: int) -> dict[str, float]:
        measured: dict[str, float] = {}
        np.copyto(gradient_N, stream[SHIFT * number :][:size])
        for name, turn in turns.items():
            np.copyto(residual_N, before_N)
            measured[name] = seconds(turn)
        return measured

    one_round(0)  # pages memory in and is not counted
    rounds = [one_round(number) for number in range(1, repeats + 1)]
    passes = median(one["select"] / one["pass"] for one in rounds)
    goal = (LARGE_GOALS if size >= LARGE else SMALL_GOALS).get(density)
    return {
        "elements": size,
        "kept": density,
        "pass, µs": 1e6 * median(one["pass"] for one in rounds),
        "select / pass": passes,
        "goal": goal,
        "reached": None if goal is None else _reached(passes <= goal),
        "torch / select": median(one["torch"] / one["select"] for one in rounds),
    }


def _plain_select(gradient: Tensor, residual: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    total = gradient + residual
    leaves = (total.abs() >= tau) & (total != 0)
    indices = leaves.nonzero().squeeze(1)
    values = total[indices]
    residual.copy_(total.masked_fill(leaves, 0))
    return indices.int(), values


def _threshold_row(name: str, values_N: Float32s, density: float, repeats: int) -> Row:
    keep = int(values_N.size * density)
    sizes_N = np.abs(values_N)

    def one_round() -> tuple[float, dict[str, float]]:
        ours = seconds(lambda: magnitude_of_rank(values_N, keep))
        return ours, libraries(sizes_N, keep)

    _, first = one_round()
    rounds = [one_round() for _ in range(repeats)]
    speeds = {name: median(others[name] / ours for ours, others in rounds) for name in first}
    return {
        "values": name,
        "elements": values_N.size,
        "kept": density,
        "k̂ / k": np.count_nonzero(np.abs(values_N) >= magnitude_of_rank(values_N, keep)) / keep,
        "threshold, µs": 1e6 * median(ours for ours, _ in rounds),
        **{f"{name} / threshold": speed for name, speed in speeds.items()},
        "goal": TOPK_GOAL,
        "reached": _reached(speeds["topk"] >= TOPK_GOAL),
    }


def _reached(is_so: bool) -> str:
    return "yes" if is_so else "no"
