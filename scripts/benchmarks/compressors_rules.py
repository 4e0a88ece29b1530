"""CPU time and quality of every rule that finds a threshold, against libraries and one pass.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import numpy as np
import torch
from kernels_gradient import DENSITIES, SEED, SHIFT, libraries, seconds
from numpy.typing import NDArray
from table import Progress, Row, silent, told
from torch import Tensor

from dlrm_hybrid.compress.gradient.methods.thresholds import (
    GaussianSettings,
    RedsyncSettings,
    SampleSettings,
    SidcoSettings,
)
from dlrm_hybrid.compress.gradient.thresholds.dgc import Dgc
from dlrm_hybrid.compress.gradient.thresholds.exact import Exact
from dlrm_hybrid.compress.gradient.thresholds.gaussian import Gaussian
from dlrm_hybrid.compress.gradient.thresholds.histogram import Histogram
from dlrm_hybrid.compress.gradient.thresholds.redsync import Redsync
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.compress.gradient.thresholds.sidco import Sidco

Float32s = NDArray[np.float32]
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

SETTLING = 6  # calls before the first that counts: SIDCo adapts at the fifth
# Of SIDCo with exponential fits, from this size on.
GOAL, GOAL_SIZE, GOAL_DENSITIES = 2.5, 1_000_000, (0.1, 0.01)
NEAR = (0.8, 1.2)


SIDCO = SidcoSettings(
    distribution="exponential",
    adaptation="best",
    window=5,
    tolerance=0.2,
    first_density=0.25,
    gamma="exact",
)
WITH_GOAL = "sidco, exponential"
RULES: Mapping[str, ThresholdRule] = {
    "exact": Exact(),
    "histogram": Histogram(),
    "dgc": Dgc(SampleSettings(part=0.01, lowest=0.8, highest=1.3), SEED),
    "redsync, bisect": Redsync(RedsyncSettings(search="bisect")),
    "redsync, trim": Redsync(RedsyncSettings(search="trim")),
    "gaussian, signed": Gaussian(GaussianSettings(fit="signed")),
    "gaussian, magnitude": Gaussian(GaussianSettings(fit="magnitude")),
    "sidco, exponential": Sidco(SIDCO),
    "sidco, gamma": Sidco(replace(SIDCO, distribution="gamma")),
    "sidco, pareto": Sidco(replace(SIDCO, distribution="pareto")),
}
DRAWS: Mapping[str, Draw] = {
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "Student-3": lambda rng, size: rng.standard_t(3, size),
    "9 in 10 zero": lambda rng, size: rng.laplace(size=size) * (rng.random(size) < 0.1),
}


@dataclass(frozen=True, slots=True)
class _Turn:
    rule: float
    others: Mapping[str, float]
    one_pass: float
    quality: float
    error: float


def measure_rules(sizes: tuple[int, ...], repeats: int, progress: Progress = silent) -> list[Row]:
    """A row for every distribution, size, density and rule; medians over `repeats` turns."""
    turns = range(SETTLING + repeats)
    cases = list(product(DRAWS, sizes, DENSITIES, turns))
    rounds = told("rules", cases, progress, cost=lambda case: case[1])
    return [
        row
        for name, draw in DRAWS.items()
        for size in sizes
        for row in _of_values(name, draw, size, repeats, rounds)
    ]


def _of_values(
    name: str, draw: Draw, size: int, repeats: int, rounds: Iterator[object]
) -> Iterator[Row]:
    turns = SETTLING + repeats
    stream = draw(np.random.default_rng(SEED), size + SHIFT * turns).astype(np.float32)
    for density in DENSITIES:
        k = int(size * density)
        made: dict[str, list[_Turn]] = {rule: [] for rule in RULES}
        states = {label: rule.init() for label, rule in RULES.items()}
        for turn in range(turns):
            next(rounds)
            values_N = stream[SHIFT * turn :][:size]
            counts = turn >= SETTLING
            others, one_pass = _references(values_N, k) if counts else ({}, 0.0)
            for label, rule in RULES.items():
                tau, took = _timed(rule, values_N, k, states[label])
                if counts:
                    quality, error = _kept(values_N, k, tau)
                    made[label].append(_Turn(took, others, one_pass, quality, error))
        for label, measured in made.items():
            yield _row(name, size, density, label, measured)


def _references(values_N: Float32s, k: int) -> tuple[dict[str, float], float]:
    """Seconds of the libraries' ways to the threshold, and of adding the values to others."""
    residual, values = torch.zeros(values_N.size), torch.from_numpy(values_N.copy())
    others = libraries(np.abs(values_N), k)
    return others, seconds(lambda: residual.add_(values))


def _timed(
    rule: ThresholdRule, values_N: Float32s, k: int, state: Mapping[str, Tensor]
) -> tuple[float, float]:
    """The threshold, and the CPU seconds it took."""
    start = time.thread_time()
    tau = rule.tau(values_N, k, state)
    return tau, time.thread_time() - start


def _kept(values_N: Float32s, k: int, tau: float) -> tuple[float, float]:
    """What reaches a threshold as a part of k, zeros excepted, and the relative error."""
    leaves = (np.abs(values_N) >= np.float32(tau)) & (values_N != 0)
    wide_N = values_N.astype(np.float64)
    left = float(np.square(wide_N[~leaves]).sum())
    return np.count_nonzero(leaves) / k, (left / float(np.square(wide_N).sum())) ** 0.5


def _row(name: str, size: int, density: float, label: str, turns: list[_Turn]) -> Row:
    speeds = {
        library: median(turn.others[library] / turn.rule for turn in turns)
        for library in turns[0].others
    }
    qualities = [turn.quality for turn in turns]
    has_goal = label == WITH_GOAL and size >= GOAL_SIZE and density in GOAL_DENSITIES
    near = NEAR[0] <= median(qualities) <= NEAR[1]
    return {
        "values": name,
        "elements": size,
        "density": density,
        "rule": label,
        "µs": 1e6 * median(turn.rule for turn in turns),
        **{f"{library} / rule": speed for library, speed in speeds.items()},
        "rule / pass": median(turn.rule / turn.one_pass for turn in turns),
        "k̂ / k": median(qualities),
        "relative error": median(turn.error for turn in turns),
        "goal": GOAL if has_goal else None,
        "reached": ("yes" if speeds["topk"] >= GOAL and near else "no") if has_goal else None,
    }
