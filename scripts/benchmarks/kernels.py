"""Measures the CPU time of compiled kernels and of what is built of them, a table per group.

    python scripts/benchmarks/kernels.py --repeats 5 --output kernels.md

All contestants take turns on the same numbers in one thread, and every ratio is taken turn by turn,
so load on the machine hardly changes it. Time is CPU time of the thread.

Shapes: N elements of a tensor, K selected ones; B rows of activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import log2

import numpy as np
import torch
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
    libraries,
    microseconds,
    one_thread,
    publish,
    ratio,
    reached,
)
from plain_dlrm import Gradients, add, layer_gradients, specs_of
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import encode_together
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.methods.thresholded import Renewal
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold, ExactThreshold
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder, target_k
from dlrm_hybrid.compress.gradient.thresholded import ThresholdSelector
from dlrm_hybrid.kernels.gaps import STORE_BYTES, decode_gaps, encode_gaps, fit_parameter
from dlrm_hybrid.kernels.magnitudes import kth_magnitude, topk_rows
from dlrm_hybrid.kernels.residual import accumulate_select
from dlrm_hybrid.kernels.scatter import gather, put
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import ELEMENT_BYTES, Dtype, Section
from dlrm_hybrid.wire.sparse import sparse, sparse_of

SELECT_SIZES = (131_072, 1_000_000, 15_000_000)
LARGE = 15_000_000
# Passes that a selection may take, by density: below LARGE elements, and from there.
SMALL_GOALS = {0.1: 4.0, 0.01: 3.0}
LARGE_GOALS = {0.1: 1.8, 0.01: 1.5}

THRESHOLD_SIZE = 1_000_000
TOPK_GOAL = 5.0

STEPS, BATCH = 100, 128
SPARSITY = 0.99
ENCODE_GOAL_MS = 0.5
OTHERS = 4_000_000  # numbers that displace

WIRE_COUNT = 4_000_000
WIRE_DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
WIRE_TURN_ELEMENTS = 100_000  # a turn writes or reads so many, for few end within microseconds

WIDTH = 256
BATCHES = (128, 512, 2048)
SPARSITIES = (0.75, 0.9, 0.95)
TURN_ROWS = 2048  # a turn is this many rows, for small batches end within microseconds

SELECT_NOTE = """
CPU time of the thread, one thread, medians. Contestants take turns on the same numbers, and every
ratio is taken turn by turn, so load on the machine touches it little. A pass is one
`residual.add_(gradient)`. Selecting adds the gradient, looks for values that are not finite, and
moves what reaches a given threshold from the residual into indices and values.
"""
THRESHOLD_NOTE = """\
The threshold that k elements reach, from values, against `torch.topk`, `torch.kthvalue` and
`np.partition`, which are given magnitudes. The goal is against `torch.topk`."""
ENCODE_NOTE = """\
The paper's 8 layers, 508,753 parameters, sparsity 0.99, on gradients of a plain DLRM that learns
from random rows, batch 128: add, select, round, encode for the wire."""
WIRE_NOTE = """\
Sections of random indices among 4 M elements. Entropy is that of indices drawn one by one; indices
are the coder alone, a section is all of a push from chosen float32 values to bytes, and back."""
ACTIVATION_NOTE = """\
Rows of 256 activations. The layer is the product of the rows with 256 x 256 weights."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to select what is sent."""

    name: str
    rule: ThresholdFinder
    renewal: Renewal
    life: int
    goal_ms: float | None


METHODS = (
    Method("controlled, L = 1000", CountedThreshold(), "controlled", 1000, ENCODE_GOAL_MS),
    Method("fixed, L = 1000", CountedThreshold(), "fixed", 1000, None),
    Method("every step, by counting", CountedThreshold(), "fixed", 1, None),
    Method("every step, by sorting", ExactThreshold(), "fixed", 1, None),
)


def main() -> None:
    """Measure, print the page."""
    options = arguments(__doc__).parse_args()
    repeats: int = options.repeats

    def measure() -> Page:
        gradients = layer_gradients(STEPS, BATCH)
        return {
            "CPU time of the kernels": Part(select_rows(repeats), SELECT_NOTE),
            "Threshold": Part(threshold_rows(accumulated(gradients), repeats), THRESHOLD_NOTE),
            "Gradients of a step": Part(encode_rows_of(gradients), ENCODE_NOTE),
            "Sections": Part(wire_rows(repeats), WIRE_NOTE),
            "Activations": Part(activation_rows(repeats), ACTIVATION_NOTE),
        }

    with one_thread():
        publish(measure, options.output, compiles=True)


def select_rows(repeats: int, sizes: Sequence[int] = SELECT_SIZES) -> list[Row]:
    """Selecting what reaches a threshold, against plain torch and one pass over memory."""
    cases = list(product(sizes, DENSITIES))
    return [_select_row(*case, repeats) for case in each("select", cases)]


def _select_row(size: int, density: float, repeats: int) -> Row:
    rng = np.random.default_rng(SEED)
    # Each turn has other sums: a processor learns the branches of the same ones by heart.
    stream = rng.standard_normal(size + SHIFT * (repeats + 1), dtype=np.float32)
    before_N = rng.standard_normal(size, dtype=np.float32)
    tau = kth_magnitude(stream[:size] + before_N, int(size * density))
    gradient, residual = torch.empty(size), torch.empty(size)
    gradient_N, residual_N = gradient.numpy(), residual.numpy()
    taus_1, offsets = np.array([tau], np.float32), np.array([0, size])
    selected = np.empty(2, np.int64), np.empty(size, np.int32), np.empty(size, np.float32)
    addresses_1 = np.array([gradient.data_ptr()], np.uint64)
    calls: Calls = {
        "pass": lambda: residual.add_(gradient),
        "select": lambda: accumulate_select(addresses_1, taus_1, offsets, residual_N, *selected),
        "torch": lambda: _plain_select(gradient, residual, tau),
    }
    turns: list[dict[str, float]] = []
    for turn in range(1 + repeats):  # the first pages memory in and is not counted
        measured: dict[str, float] = {}
        np.copyto(gradient_N, stream[SHIFT * turn :][:size])
        for name, call in calls.items():
            np.copyto(residual_N, before_N)
            measured |= in_turns({name: call})
        turns.append(measured)
    turns = turns[1:]
    passes = ratio(turns, "select", "pass")
    goal = (LARGE_GOALS if size >= LARGE else SMALL_GOALS).get(density)
    return {
        "elements": size,
        "kept": density,
        "pass, µs": microseconds(turns, "pass"),
        "select / pass": passes,
        "goal": goal,
        "reached": reached(None if goal is None else passes <= goal),
        "torch / select": ratio(turns, "torch", "select"),
    }


def _plain_select(gradient: Tensor, residual: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """What `accumulate_select` does, in plain torch operations."""
    total = gradient + residual
    is_sent = (total.abs() >= tau) & (total != 0)
    indices = is_sent.nonzero().squeeze(1)
    values = total[indices]
    residual.copy_(total.masked_fill(is_sent, 0))
    return indices.int(), values


def threshold_rows(tensors: Mapping[str, Float32s], repeats: int) -> list[Row]:
    """Finding the threshold of k elements, in tensors drawn and in `tensors`."""
    cases = [
        (name, values_N, density)
        for name, values_N in {**drawn(THRESHOLD_SIZE), **tensors}.items()
        for density in DENSITIES
        if values_N.size * density >= 100
    ]
    return [_threshold_row(*case, repeats) for case in each("threshold", cases)]


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


def accumulated(gradients: Sequence[Gradients]) -> dict[str, Float32s]:
    """The largest layer's gradient of the last step, and what all steps add up to."""
    of_step = [one["top.1.weight"].view(-1) for one in gradients]
    return {
        "DLRM gradient": of_step[-1].numpy(),
        f"DLRM gradient, {len(gradients)} steps": torch.stack(of_step).sum(0).numpy(),
    }


def _threshold_row(name: str, values_N: Float32s, density: float, repeats: int) -> Row:
    k, magnitudes_N = int(values_N.size * density), np.abs(values_N)
    others = libraries(magnitudes_N, k)
    calls = {"ours": lambda: kth_magnitude(values_N, k), **others}
    turns = [in_turns(calls) for _ in range(1 + repeats)][1:]
    speed = ratio(turns, "topk", "ours")
    return {
        "values": name,
        "elements": values_N.size,
        "kept": density,
        "k̂ / k": np.count_nonzero(magnitudes_N >= kth_magnitude(values_N, k)) / k,
        "threshold, µs": microseconds(turns, "ours"),
        **{f"{library} / threshold": ratio(turns, library, "ours") for library in others},
        "goal": TOPK_GOAL,
        "reached": reached(speed >= TOPK_GOAL),
    }


def encode_rows_of(gradients: Sequence[Gradients]) -> list[Row]:
    """All of a step's compression, by method and type of value; without the first tenth of steps.

    Caches are cold after other numbers and other Python code, as where several ranks share a core.
    """
    cases = list(product(METHODS, (Dtype.FLOAT32, Dtype.BFLOAT16)))
    return [_encode_row(*case, gradients) for case in each("gradients of a step", cases)]


def _encode_row(method: Method, dtype: Dtype, gradients: Sequence[Gradients]) -> Row:
    specs = specs_of(gradients[0])
    compressor, displaced = _compressor(specs, method, dtype), _compressor(specs, method, dtype)
    others_N = np.zeros(OTHERS, np.float32)
    sums = [torch.zeros(spec.shape) for spec in specs]
    given = {spec.name: torch.zeros(spec.shape) for spec in specs}
    turns: list[dict[str, float]] = []
    num_bytes = 0
    for step, fresh in enumerate(gradients):
        sections: dict[str, Section] = {}
        _copy(given, fresh)
        turn = in_turns({"ours": partial(_encode, compressor, given, step, sections)})
        _copy(given, fresh)
        turn |= in_turns({"pass": partial(add, sums, given)})
        _displace(others_N)
        turns.append(turn | in_turns({"cold": partial(_encode, displaced, given, step, {})}))
        num_bytes += sum(len(one.payload) for one in sections.values())
    turns = turns[len(turns) // 10 :]
    milliseconds = microseconds(turns, "ours") / 1e3
    reports = compressor.report().values()
    sent = sum(report.sent for report in reports)
    return {
        "threshold renewed": method.name,
        "values": dtype.name.lower(),
        "encode, ms": milliseconds,
        "encode / pass": ratio(turns, "ours", "pass"),
        "caches cold, ms": microseconds(turns, "cold") / 1e3,
        "goal, ms": method.goal_ms,
        "reached": reached(None if method.goal_ms is None else milliseconds <= method.goal_ms),
        "sent": sent / sum(report.elements for report in reports),
        "bytes per element sent": num_bytes / sent,
        "renewals per tensor": sum(report.renewals for report in reports) / len(specs),
    }


def _compressor(specs: Sequence[Spec], method: Method, dtype: Dtype) -> Compressor:
    settings = Dct(density=1 - SPARSITY, lifespan=method.life, renewal=method.renewal)
    selector = ThresholdSelector(settings, method.rule)
    return ErrorFeedback(Layout(specs), selector, FeedbackOptions(dtype=dtype))


def _encode(compressor: Compressor, given: Gradients, step: int, out: dict[str, Section]) -> None:
    (sent,) = encode_together([compressor.encode(given, step)], step, 0)
    out.update(sent.sections())


def _copy(given: Gradients, fresh: Gradients) -> None:
    """Write gradients where the step before had its own, as a backward pass does."""
    for name, gradient in fresh.items():
        given[name].copy_(gradient)


def _displace(others_N: Float32s) -> None:
    """Leave nothing in a core's caches of what an encoder reads and runs."""
    others_N += 1
    " ".join(str(number) for number in range(20_000))


def wire_rows(repeats: int) -> list[Row]:
    """Bytes and time of sparse sections of random indices, against what chance needs at least."""
    return [_wire_row(density, repeats) for density in each("sections", WIRE_DENSITIES)]


def _wire_row(density: float, repeats: int) -> Row:
    rng = np.random.default_rng(SEED)
    indices_K = np.flatnonzero(rng.random(WIRE_COUNT) < density).astype(np.int32)
    k = indices_K.size
    values_K = rng.standard_normal(k).astype(np.float32)
    p = k / WIRE_COUNT
    entropy_bits = -(p * log2(p) + (1 - p) * log2(1 - p)) / p

    def write(dtype: Dtype) -> Section:
        return sparse(0, WIRE_COUNT, indices_K, narrow(values_K, dtype), dtype)

    def write_indices() -> None:
        parameter, bits = fit_parameter(indices_K)
        encode_gaps(indices_K, parameter, np.empty(bits // 8 + STORE_BYTES + 1, np.uint8))

    made = write(Dtype.BFLOAT16)
    parameter, bits = fit_parameter(indices_K)
    gaps = np.zeros(bits // 8 + STORE_BYTES + 1, np.uint8)
    encode_gaps(indices_K, parameter, gaps)
    times = max(1, WIRE_TURN_ELEMENTS // k)
    back_K = np.empty(k, np.int32)
    calls: Calls = {
        "write indices, ns": write_indices,
        "read indices, ns": lambda: decode_gaps(gaps, 0, parameter, WIRE_COUNT, back_K),
        "write section, ns": lambda: write(Dtype.BFLOAT16),
        "read section, ns": lambda: sparse_of(made),
    }
    turns = [in_turns(calls, times) for _ in range(1 + repeats)][1:]
    bytes_each = len(made.payload) / k
    index_bits = 8 * (bytes_each - ELEMENT_BYTES[Dtype.BFLOAT16])
    return {
        "density": density,
        "index bits": index_bits,
        "bits / entropy": index_bits / entropy_bits,
        **{name: 1e3 * microseconds(turns, name) / k for name in calls},
        "bytes, bfloat16": bytes_each,
        "bytes, float32": len(write(Dtype.FLOAT32).payload) / k,
    }


def activation_rows(repeats: int) -> list[Row]:
    """Selecting in rows of activations, against the layer that it serves and `torch.topk`."""
    cases = list(product(BATCHES, SPARSITIES, ("Gaussian", "after ReLU")))
    return [_activation_row(*case, repeats) for case in each("activations", cases)]


def _activation_row(batch: int, sparsity: float, kind: str, repeats: int) -> Row:
    generator = torch.Generator().manual_seed(SEED)
    x_BN = torch.randn(batch, WIDTH, generator=generator)
    x_BN = x_BN.relu() if kind == "after ReLU" else x_BN
    calls = _activation_calls(x_BN, target_k(WIDTH, sparsity), generator)
    turns = [in_turns(calls, TURN_ROWS // batch) for _ in range(1 + repeats)][1:]
    return {
        "rows": batch,
        "sparsity": sparsity,
        "input": kind,
        "pass, µs": microseconds(turns, "pass"),
        "encode, µs": microseconds(turns, "encode"),
        "topk / encode": ratio(turns, "topk", "encode"),
        "encode / layer": ratio(turns, "encode", "layer"),
        "decode / pass": ratio(turns, "decode", "pass"),
        "gather / pass": ratio(turns, "gather", "pass"),
    }


def _activation_calls(x_BN: Tensor, k: int, generator: torch.Generator) -> Calls:
    """What is compared, each on memory of its own."""
    weight_NM = torch.randn(WIDTH, WIDTH, generator=generator)
    sum_BN, product_BM = torch.zeros_like(x_BN), torch.empty_like(x_BN)
    indices_N = np.empty(x_BN.numel(), np.int32)
    values_N, out_N = np.empty(x_BN.numel(), np.float32), torch.empty_like(x_BN)
    tau_B = np.empty(len(x_BN), np.float32)

    def encode() -> int:
        return topk_rows(x_BN.numpy(), k, indices_N, values_N, tau_B)

    num_sent = encode()
    indices_K, values_K = indices_N[:num_sent].copy(), values_N[:num_sent].copy()
    return {
        "pass": lambda: sum_BN.add_(x_BN),
        "layer": lambda: torch.mm(x_BN, weight_NM, out=product_BM),
        "topk": lambda: x_BN.gather(1, torch.topk(x_BN.abs(), k, dim=1, sorted=False).indices),
        "encode": encode,
        "decode": lambda: put(indices_K, values_K, out_N.zero_().view(-1).numpy()),
        "gather": lambda: gather(indices_K, x_BN.view(-1).numpy(), values_K),
    }


if __name__ == "__main__":
    main()
