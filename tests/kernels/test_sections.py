"""Coded gaps come back, in hardly more bits than chance needs."""

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.read_sections import decode
from dlrm_hybrid.kernels.section_forms import fit
from dlrm_hybrid.kernels.write_sections import STORE_BYTES, encode

Int32s = NDArray[np.int32]
# Far outliers are what codes of bounded length are for.
GAPS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 200), st.integers(0, 10**8)),
    min_size=1,
    max_size=20,
)


def codes(indices: Int32s, parameter: int) -> str:
    """The bits in the order in which they are read, by the definition."""
    text = ""
    for gap in (np.diff(indices.astype(np.int64), prepend=-1) - 1).tolist():
        ones = gap >> parameter
        if ones < 24:
            low, width = gap & ((1 << parameter) - 1), parameter
            text += "1" * ones + "0"
        else:
            low, width = gap, 32
            text += "1" * 24
        text += "".join(str(low >> place & 1) for place in range(width))
    return text


def encoded(indices: Int32s, parameter: int, num_bytes: int) -> NDArray[np.uint8]:
    out = np.full(num_bytes + STORE_BYTES, 0xAA, np.uint8)
    encode(indices, parameter, out)
    return out[:num_bytes]


@given(GAPS, st.integers(0, 31))
def test_codes_are_the_documented_ones_and_come_back(gaps: list[int], parameter: int) -> None:
    indices = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.int32)
    text = codes(indices, parameter)
    num_bytes = (len(text) + 7) // 8
    out = encoded(indices, parameter, num_bytes)
    assert np.unpackbits(out, bitorder="little").tolist() == [
        int(bit) for bit in text.ljust(8 * num_bytes, "0")
    ]
    out.flags.writeable = False
    back = np.zeros_like(indices)
    assert decode(out, 0, parameter, int(indices[-1]) + 1, back) == num_bytes
    assert back.tolist() == indices.tolist()
    assert decode(out, 0, parameter, int(indices[-1]), back) == -1


@given(GAPS)
def test_few_indices_get_the_best_parameter(gaps: list[int]) -> None:
    indices = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.int32)
    parameter, bits = fit(indices)
    assert bits == len(codes(indices, parameter))
    assert bits == min(len(codes(indices, other)) for other in range(32))


@pytest.mark.parametrize("scale", [0.5, 3, 40, 900])
@pytest.mark.parametrize("far", [0.0, 0.01, 0.05])
def test_many_indices_get_a_parameter_almost_as_good(scale: float, far: float) -> None:
    rng = np.random.default_rng(2)
    gaps = rng.geometric(1 / (1 + scale), 3000) + (rng.random(3000) < far) * 50_000
    indices = np.cumsum(gaps).astype(np.int32)
    _, bits = fit(indices)
    assert bits <= 1.01 * min(len(codes(indices, other)) for other in range(20))


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.25])
def test_random_indices_take_hardly_more_than_their_entropy(density: float) -> None:
    count = 1_000_000
    chosen = np.random.default_rng(1).random(count) < density
    p = float(chosen.mean())
    entropy_bits = -count * (p * log2(p) + (1 - p) * log2(1 - p))
    _, bits = fit(np.flatnonzero(chosen).astype(np.int32))
    assert 0.99 * entropy_bits < bits <= 1.03 * entropy_bits
