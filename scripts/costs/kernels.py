"""Measures the CPU time of compiled kernels, a table per group; whole methods: `compressors.py`.

    python scripts/costs/kernels.py --repeats 5 --output kernels.md

All contestants take turns on the same numbers in one thread, and every ratio is taken turn by turn,
so load on the machine hardly changes it. Time is CPU time of the thread.

Shapes: N elements of a tensor, K selected ones; B rows of activations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from math import log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.kernels.gaps import STORE_BYTES, decode_gaps, encode_gaps, fit_parameter
from dlrm_hybrid.kernels.magnitudes import kth_magnitude, topk_rows
from dlrm_hybrid.kernels.residual import accumulate_select
from dlrm_hybrid.kernels.scatter import gather, put
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import ELEMENT_BYTES, Dtype, Section
from dlrm_hybrid.wire.sparse import sparse, sparse_of

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import (
    DENSITIES,
    SEED,
    SHIFT,
    Calls,
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
)

SELECT_SIZES = (131_072, 1_000_000, 15_000_000)
LARGE = 15_000_000
# Passes that a selection may take, by density: below LARGE elements, and from there.
SMALL_GOALS = {0.1: 4.0, 0.01: 3.0}
LARGE_GOALS = {0.1: 1.8, 0.01: 1.5}

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
WIRE_NOTE = """\
Sections of random indices among 4 M elements. Entropy is that of indices drawn one by one; indices
are the coder alone, a section is all of a push from chosen float32 values to bytes, and back."""
ACTIVATION_NOTE = """\
Rows of 256 activations. The layer is the product of the rows with 256 x 256 weights."""


def main() -> None:
    """Measure, print the page."""
    options = arguments(__doc__).parse_args()
    repeats: int = options.repeats

    def measure() -> Page:
        return {
            "CPU time of the kernels": Part(select_rows(repeats), SELECT_NOTE),
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
