"""Measures every gradient compressor on this processor: time, bytes, error (SIDCo, figure 1).

    python scripts/costs/compressors.py --repeats 3 --output compressors.md

First rules that find thresholds, then whole methods, on random tensors and on the paper's layers;
then DEFT's selection by the slowest of n trainers (DEFT, figure 9). Time is CPU time of one thread.

Shapes: N elements of a tensor, L fragments.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, product
from math import sqrt
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import encode_together
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import StageContext, module_of
from dlrm_hybrid.compress.gradient.fragments import (
    allocate,
    choose,
    costs,
    exact_budget,
    norms_of,
    partition,
    sizes_of,
)
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.compress.gradient.methods.dgc import Dgc, SampledThreshold
from dlrm_hybrid.compress.gradient.methods.gaussian import Gaussian
from dlrm_hybrid.compress.gradient.methods.redsync import RedSync
from dlrm_hybrid.compress.gradient.methods.sidco import Sidco
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold, ExactThreshold
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder
from dlrm_hybrid.compress.gradient.selector import largest
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.wire.section import Section
from dlrm_hybrid.wire.sparse import Elements, sparse_of
from dlrm_hybrid.wire.ternary import is_ternary, ternary_of

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import (
    DENSITIES,
    SEED,
    SHIFT,
    Calls,
    Float32s,
    Page,
    Part,
    Row,
    arguments,
    each,
    in_turns,
    microseconds,
    one_thread,
    publish,
    ratio,
    reached,
    seconds,
)
from plain_dlrm import Gradients, add, layer_gradients, specs_of

SIZES = (260_000, 2_600_000, 26_000_000)
BATCH = 128
TRAINERS = (2, 4, 8, 16)

SETTLING_CALLS = 6  # of a rule before the first that counts: SIDCo adapts at the fifth
SETTLING_STEPS = 8  # of a method
LIBRARIES = ("topk", "kthvalue", "partition")
WITH_GOAL = "sidco, exponential"
GOAL, GOAL_SIZE, GOAL_DENSITIES = 2.5, 1_000_000, (0.1, 0.01)
NEAR = (0.8, 1.2)

WORLD = ("parallel=hybrid", "parallel.trainers=1")
# The figures are those of the density that is asked for, not of a warm-up.
OPTIONS = {"dgc": ("gradient.warmup_steps=0",)}
LAYERS = "8 layers"

RULES_NOTE = """
CPU time of the thread, one thread, medians; contestants take turns on the same numbers, other ones
at every turn. Time is that of finding the threshold alone. topk, kthvalue and partition are
`torch.topk`, `torch.kthvalue` and `np.partition` of the magnitudes, which they are given; a pass is
one `residual.add_(gradient)`. Zeros never leave and are not in k̂. The relative error is the norm of
what stays to that of all. SIDCo's goal is 2.5 times faster than topk with k̂ / k of 0.8 to 1.2.
"""
METHODS_NOTE = """\
A whole step of one trainer, after 8 others: residual, threshold, selection, sections for the wire;
methods whose trainers agree first agree with themselves. Settings are defaults, so thresholds
of `dct` live on. The relative error is that of one step, the residual included."""
LAYERS_NOTE = """\
The same on gradients of the paper's 8 layers, 508,753 parameters, of a plain DLRM that learns from
random rows, batch 128."""
FRAGMENTS_NOTE = """\
DEFT on the same gradients: selecting k of all elements by `torch.topk`, which is given magnitudes,
against the time that the slowest of n trainers takes for its fragments, exactly. The last columns
compare the same way of selecting on both sides. Norms and allocation are not in it."""

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
Parts = Sequence[tuple[slice, int]]


RULES: Mapping[str, ThresholdFinder] = {
    "exact": ExactThreshold(),
    "histogram": CountedThreshold(),
    "dgc": SampledThreshold(Dgc(), SEED),
    "redsync, bisect": RedSync(search="bisect"),
    "redsync, trim": RedSync(search="trim"),
    "gaussian, signed": Gaussian(fit="signed"),
    "gaussian, magnitude": Gaussian(fit="magnitude"),
    "sidco, exponential": Sidco(),
    "sidco, gamma": Sidco(distribution="gamma"),
    "sidco, pareto": Sidco(distribution="pareto"),
}
DRAWS: Mapping[str, Draw] = {
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "Student-3": lambda rng, size: rng.standard_t(3, size),
    "9 in 10 zero": lambda rng, size: rng.laplace(size=size) * (rng.random(size) < 0.1),
}


def main() -> None:
    """Measure, print the page."""
    options = arguments(__doc__).parse_args()
    repeats: int = options.repeats

    def measure() -> Page:
        gradients = layer_gradients(SETTLING_STEPS + repeats, BATCH)
        of_drawn = [row for size in SIZES for row in drawn_rows(size, repeats)]
        return {
            "CPU time of the compressors of gradients": Part(rule_rows(repeats), RULES_NOTE),
            "Methods on synthetic gradients": Part(of_drawn, METHODS_NOTE),
            "Methods on gradients of a DLRM": Part(layer_rows(gradients), LAYERS_NOTE),
            "Selecting in fragments": Part(fragment_rows(gradients, repeats), FRAGMENTS_NOTE),
        }

    with one_thread():
        publish(measure, options.output, compiles=True)


def rule_rows(repeats: int, sizes: Sequence[int] = SIZES) -> list[Row]:
    """CPU time and quality of every rule that finds a threshold, against libraries and one pass."""
    cases = list(product(DRAWS, sizes, DENSITIES))
    return [row for case in each("rules", cases) for row in _rules(*case, repeats)]


def _rules(name: str, size: int, density: float, repeats: int) -> Iterator[Row]:
    calls = SETTLING_CALLS + repeats
    drawn = DRAWS[name](np.random.default_rng(SEED), size + SHIFT * calls).astype(np.float32)
    k = int(size * density)
    states = {label: rule.init() for label, rule in RULES.items()}
    turns: dict[str, list[dict[str, float]]] = {label: [] for label in RULES}
    for call in range(calls):
        values_N = drawn[SHIFT * call :][:size]
        others = _references(values_N, k) if call >= SETTLING_CALLS else {}
        for label, rule in RULES.items():
            start = time.thread_time()
            tau = rule.tau(values_N, k, states[label])
            took = time.thread_time() - start
            if others:
                turns[label].append({"rule": took, **others, **_quality(values_N, k, tau)})
    for label, own in turns.items():
        near = NEAR[0] <= median(turn["k̂ / k"] for turn in own) <= NEAR[1]
        speed = ratio(own, "topk", "rule")
        has_goal = label == WITH_GOAL and size >= GOAL_SIZE and density in GOAL_DENSITIES
        yield {
            "values": name,
            "elements": size,
            "density": density,
            "rule": label,
            "µs": microseconds(own, "rule"),
            **{f"{one} / rule": ratio(own, one, "rule") for one in LIBRARIES},
            "rule / pass": ratio(own, "rule", "pass"),
            "k̂ / k": median(turn["k̂ / k"] for turn in own),
            "relative error": median(turn["error"] for turn in own),
            "goal": GOAL if has_goal else None,
            "reached": reached(speed >= GOAL and near if has_goal else None),
        }


def libraries(magnitudes_N: Float32s, k: int) -> Calls:
    """Ways in which libraries find the magnitude that `k` of N elements reach."""
    magnitudes, rank = torch.from_numpy(magnitudes_N), magnitudes_N.size - k
    return {
        "topk": lambda: torch.topk(magnitudes, k, sorted=False),
        "kthvalue": lambda: torch.kthvalue(magnitudes, rank + 1),
        "partition": lambda: np.partition(magnitudes_N, rank),
    }


def _references(values_N: Float32s, k: int) -> dict[str, float]:
    """Seconds of the libraries' ways to the threshold, and of adding the values to others."""
    residual, values = torch.zeros(values_N.size), torch.from_numpy(values_N.copy())
    return in_turns({**libraries(np.abs(values_N), k), "pass": lambda: residual.add_(values)})


def _quality(values_N: Float32s, k: int, tau: float) -> dict[str, float]:
    """What reaches a threshold as a part of k, zeros excepted, and the relative error."""
    is_sent = (np.abs(values_N) >= np.float32(tau)) & (values_N != 0)
    squares_N = np.square(values_N.astype(np.float64))
    error = sqrt(float(squares_N[~is_sent].sum()) / float(squares_N.sum()))
    return {"k̂ / k": np.count_nonzero(is_sent) / k, "error": error}


def drawn_rows(size: int, repeats: int) -> list[Row]:
    """Every method at every density on a tensor of Laplacian values, others at every step."""
    steps = SETTLING_STEPS + repeats
    rng = np.random.default_rng(SEED)
    drawn = torch.from_numpy(rng.laplace(size=size + SHIFT * steps).astype(np.float32))
    given = torch.empty(size)

    def gradients() -> Iterator[Gradients]:
        for step in range(steps):
            yield {"drawn": given.copy_(drawn[SHIFT * step :][:size])}

    return _method_rows(f"{size:,}", gradients)


def layer_rows(made: Sequence[Gradients]) -> list[Row]:
    """Every method at every density on gradients of the paper's layers."""
    return _method_rows(LAYERS, lambda: iter(made))


def _method_rows(name: str, gradients: Callable[[], Iterator[Gradients]]) -> list[Row]:
    cases = list(product(DENSITIES, methods()))
    return [_method_row(name, *case, gradients()) for case in each(f"methods, {name}", cases)]


def _method_row(name: str, density: float, method: str, gradients: Iterator[Gradients]) -> Row:
    first = next(gradients)
    specs = specs_of(first)
    compressor = _compressor(method, density, specs)
    sums = [torch.zeros(spec.shape) for spec in specs]
    elements = sum(spec.count for spec in specs)
    turns: list[dict[str, float]] = []
    for step, given in enumerate(chain([first], gradients)):
        start = time.thread_time()
        (sent,) = encode_together([compressor.encode(given, step)], step, elements)
        sections = sent.sections()
        took = time.thread_time() - start
        if step >= SETTLING_STEPS:
            magnitudes = [one.abs().view(-1) for one in given.values()]
            turns.append(
                {
                    "encode": took,
                    "topk": seconds(partial(_topk, magnitudes, density)),
                    "pass": seconds(partial(add, sums, given)),
                    "sent": sum(_held(one).indices_K.size for one in sections.values()),
                    "bytes": sum(len(one.payload) for one in sections.values()),
                    "error": _error(compressor, given, sections),
                }
            )
    k = sum(max(1, int(density * spec.count)) for spec in specs)
    is_sparse = methods()[method].is_sparse
    return {
        "elements": name,
        "density": density,
        "method": method,
        "encode, µs": microseconds(turns, "encode"),
        "topk / encode": ratio(turns, "topk", "encode"),
        "encode / pass": ratio(turns, "encode", "pass"),
        "k̂ / k": median(turn["sent"] / k for turn in turns) if is_sparse else None,
        "bytes per element sent": median(turn["bytes"] / max(1, turn["sent"]) for turn in turns),
        "relative error": median(turn["error"] for turn in turns),
    }


def _compressor(method: str, density: float, specs: Sequence[Spec]) -> Compressor:
    """Of the only trainer."""
    config = _configured(method, density if methods()[method].is_sparse else None)
    context = StageContext(
        layout=Layout(specs),
        trainer=0,
        trainers=1,
        model_elements=sum(spec.count for spec in specs),
        last_layer=module_of(specs[-1].name),
        lr=build_model.dense_schedule(config, steps=1).lr,
        seed=config.train.seed,
    )
    return config.gradient.build(context)


@cache
def _configured(method: str, density: float | None) -> Config:
    sparse = () if density is None else (f"gradient.density={density}",)
    return validate(values_of([*WORLD, f"gradient={method}", *sparse, *OPTIONS.get(method, ())]))


def _topk(magnitudes: Sequence[Tensor], density: float) -> None:
    for one in magnitudes:
        torch.topk(one, max(1, int(density * one.numel())), sorted=False)


def _error(compressor: Compressor, gradients: Gradients, sections: Mapping[str, Section]) -> float:
    """The norm of what was not sent, relative to what might have been."""
    state = compressor.tensors()
    left = total = 0.0
    for name, one in sections.items():
        sent = _held(one)
        sent_N = np.zeros(one.count)
        sent_N[sent.indices_K] = sent.values_K
        residual = state.get(f"{name}.residual")
        if residual is None:
            rest_N: NDArray[np.float64] = gradients[name].view(-1).numpy() - sent_N
        else:
            rest_N = residual.view(-1).numpy().astype(np.float64)
        left += float(np.square(rest_N).sum())
        total += float(np.square(rest_N + sent_N).sum())
    return sqrt(left / total)


def _held(one: Section) -> Elements:
    """What a section says of which elements."""
    if is_ternary(one):
        indices_K = np.arange(one.count, dtype=np.int32)
        return Elements(np.array([0, one.count]), indices_K, ternary_of(one))
    return sparse_of(one)


def fragment_rows(gradients: Sequence[Gradients], repeats: int) -> list[Row]:
    """DEFT's selection by the slowest of n trainers, against the top k of all."""
    counts = [gradient.numel() for gradient in gradients[0].values()]
    steps = [torch.cat([one.reshape(-1) for one in step.values()]) for step in gradients[-repeats:]]
    return [
        _fragment_row(steps, partition(counts, trainers), density, trainers)
        for density, trainers in each("fragments", list(product(DENSITIES, TRAINERS)))
    ]


def _fragment_row(
    steps: Sequence[Tensor], fragments: Sequence[slice], density: float, trainers: int
) -> Row:
    k = int(density * steps[0].numel())
    turns: list[dict[str, float]] = []
    for values in (steps[0], *steps):  # the first pages memory in and is not counted
        values_N, magnitudes = values.numpy(), values.abs()
        ks_L = exact_budget(norms_of(values_N, fragments), sizes_of(fragments), k)
        bins_L = allocate(costs(sizes_of(fragments), ks_L), trainers)
        parts = list(zip(fragments, ks_L.tolist(), strict=True))
        shares: list[Parts] = [
            [parts[number] for number in np.flatnonzero(bins_L == trainer).tolist()]
            for trainer in range(trainers)
        ]
        turns.append(
            {
                "topk": seconds(partial(torch.topk, magnitudes, k, sorted=False)),
                "ours of all": seconds(partial(largest, values_N, k)),
                "ours": max(seconds(partial(choose, values_N, own)) for own in shares),
                "topk of own": max(
                    seconds(partial(_topk_of_parts, magnitudes, own)) for own in shares
                ),
            }
        )
    speed = ratio(turns[1:], "topk", "ours")
    return {
        "density": density,
        "trainers": trainers,
        "topk of all, µs": microseconds(turns[1:], "topk"),
        "slowest trainer, µs": microseconds(turns[1:], "ours"),
        "topk / slowest": speed,
        "goal": float(trainers),
        "reached": reached(speed >= trainers),
        "both by topk": ratio(turns[1:], "topk", "topk of own"),
        "both by counting": ratio(turns[1:], "ours of all", "ours"),
    }


def _topk_of_parts(magnitudes: Tensor, own: Parts) -> None:
    for part, k in own:
        torch.topk(magnitudes[part], k, sorted=False)


if __name__ == "__main__":
    main()
