"""Bytes and CPU time of sparse sections: random indices against what chance needs at least.

Shapes: N elements, K of them in a section.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import log2
from statistics import median

import numpy as np
from table import Progress, Row, silent, told

from dlrm_hybrid.kernels.read_sections import decode
from dlrm_hybrid.kernels.section_forms import fit
from dlrm_hybrid.kernels.write_sections import STORE_BYTES
from dlrm_hybrid.kernels.write_sections import encode as encode_gaps
from dlrm_hybrid.wire.section import ELEMENT_BYTES, Dtype
from dlrm_hybrid.wire.sparse import sparse, sparse_of
from dlrm_hybrid.wire.values import narrow

COUNT = 4_000_000
DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
TURN_ELEMENTS = 100_000  # a turn writes or reads so many, for few end within microseconds
SEED = 0


def measure_wire(repeats: int, progress: Progress = silent) -> list[Row]:
    """A row for every density; medians over `repeats` turns, CPU time of the thread.

    Entropy is that of indices drawn one by one with the density. Indices are the kernels alone:
    finding the parameter and coding, or reading. A section is all that a push does between chosen
    float32 values and a payload of bfloat16, and back.
    """
    return [_measure(density, repeats) for density in told("sections", DENSITIES, progress)]


def _measure(density: float, repeats: int) -> Row:
    rng = np.random.default_rng(SEED)
    indices_K = np.flatnonzero(rng.random(COUNT) < density).astype(np.int32)
    values_K = rng.standard_normal(indices_K.size).astype(np.float32)
    p = indices_K.size / COUNT
    entropy_bits = -(p * log2(p) + (1 - p) * log2(1 - p)) / p

    def encode() -> None:
        sparse(0, COUNT, indices_K, narrow(values_K, Dtype.BFLOAT16), Dtype.BFLOAT16)

    def encode_indices() -> None:
        parameter, bits = fit(indices_K)
        encode_gaps(indices_K, parameter, np.empty(bits // 8 + STORE_BYTES + 1, np.uint8))

    parameter, bits = fit(indices_K)
    gaps = np.zeros(bits // 8 + STORE_BYTES + 1, np.uint8)
    encode_gaps(indices_K, parameter, gaps)

    def decode_indices() -> None:
        decode(gaps, 0, parameter, COUNT, np.empty(indices_K.size, np.int32))

    narrow_K = narrow(values_K, Dtype.BFLOAT16)
    section = sparse(0, COUNT, indices_K, narrow_K, Dtype.BFLOAT16)
    bytes_each = len(section.payload) / indices_K.size
    wide = len(sparse(0, COUNT, indices_K, values_K, Dtype.FLOAT32).payload)
    index_bits = 8 * (bytes_each - ELEMENT_BYTES[Dtype.BFLOAT16])
    nanoseconds = partial(_nanoseconds, num_values=indices_K.size, repeats=repeats)
    return {
        "density": density,
        "index bits": index_bits,
        "bits / entropy": index_bits / entropy_bits,
        "write indices, ns": nanoseconds(encode_indices),
        "read indices, ns": nanoseconds(decode_indices),
        "write section, ns": nanoseconds(encode),
        "read section, ns": nanoseconds(lambda: sparse_of(section)),
        "bytes, bfloat16": bytes_each,
        "bytes, float32": wide / indices_K.size,
    }


def _nanoseconds(call: Callable[[], object], num_values: int, repeats: int) -> float:
    """Median CPU time of `call` for each of its values."""
    times = max(1, TURN_ELEMENTS // num_values)
    call()  # the first call loads the kernel and is not counted
    turns: list[float] = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(times):
            call()
        turns.append(time.thread_time() - start)
    return 1e9 * median(turns) / times / num_values
