"""CPU time of DEFT's selection by the slowest of n trainers, against the top k of all (figure 9).

Shapes: N elements of all layers, L fragments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import numpy as np
import torch
from kernels_encode import Gradients
from kernels_gradient import DENSITIES, seconds
from table import Progress, Row, silent, told
from torch import Tensor

from dlrm_hybrid.compress.gradient.deft import choose, norms_of
from dlrm_hybrid.compress.gradient.deft_plan import (
    Fragments,
    allocate,
    costs,
    exact_budget,
    partition,
)
from dlrm_hybrid.compress.gradient.selector import largest

TRAINERS = (2, 4, 8, 16)

Parts = Sequence[tuple[slice, int]]


def measure_fragments(
    made: Sequence[Gradients], repeats: int, progress: Progress = silent
) -> list[Row]:
    """A row for every density and number of trainers; medians over the last `repeats` steps."""
    counts = [gradient.numel() for gradient in made[0].values()]
    steps = [torch.cat([one.reshape(-1) for one in step.values()]) for step in made[-repeats:]]
    return [
        _row(steps, partition(counts, trainers), density, trainers)
        for density, trainers in told("fragments", list(product(DENSITIES, TRAINERS)), progress)
    ]


def _row(steps: Sequence[Tensor], fragments: Fragments, density: float, trainers: int) -> Row:
    keep = int(density * steps[0].numel())
    rounds: list[tuple[float, float, float, float]] = []
    for values in (steps[0], *steps):  # the first pages memory in and is not counted
        values_N, sizes = values.numpy(), values.abs()
        norms_L = norms_of(values_N, fragments)
        keeps_L = exact_budget(norms_L, fragments.sizes_L, keep)
        bins_L = allocate(costs(fragments.sizes_L, keeps_L), trainers)
        parts = list(zip(fragments.slices(), keeps_L.tolist(), strict=True))
        shares: list[Parts] = [
            [parts[place] for place in np.flatnonzero(bins_L == share).tolist()]
            for share in range(trainers)
        ]
        rounds.append(
            (
                seconds(lambda sizes=sizes: torch.topk(sizes, keep, sorted=False)),
                seconds(lambda values_N=values_N: largest(values_N, keep)),
                _slowest(lambda own, values_N=values_N: choose(values_N, own), shares),
                _slowest(lambda own, sizes=sizes: _topk(sizes, own), shares),
            )
        )
    topk, all_of_ours, ours, their = zip(*rounds[1:], strict=True)
    speed = _ratio(topk, ours)
    return {
        "density": density,
        "trainers": trainers,
        "topk of all, µs": 1e6 * median(topk),
        "slowest trainer, µs": 1e6 * median(ours),
        "topk / slowest": speed,
        "goal": float(trainers),
        "reached": "yes" if speed >= trainers else "no",
        "both by topk": _ratio(topk, their),
        "both by counting": _ratio(all_of_ours, ours),
    }


def _slowest(select: Callable[[Parts], object], shares: Sequence[Parts]) -> float:
    return max(seconds(lambda own=own: select(own)) for own in shares)


def _topk(sizes: Tensor, own: Parts) -> None:
    for part, keep in own:
        torch.topk(sizes[part], keep, sorted=False)


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True))
