"""What is coded comes back, in as many bits as it is worth; any bytes are read without harm."""

# pyright: reportCallIssue=false

import numba
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.bits import address_of
from dlrm_hybrid.kernels.levels import rans
from dlrm_hybrid.wire.frequencies import Counts, Shape, Tables, fitted

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]

LARGEST = rans.MAX_LEVEL
# One of everything that a format may list; each reads what the one before has said.
KINDS = FLAG, LEVEL, NUMBER, BITS = range(4)


@numba.njit
def coded(items_K2: Int64s, chance_C: Halves, starts_CE: Halves, out: Bytes) -> int:
    events_S = np.empty(rans.EVENTS_OF_A_LEVEL * len(items_K2), np.uint32)
    events, starts = address_of(events_S), address_of(starts_CE)
    at = 0
    for k in range(len(items_K2)):
        kind, value = items_K2[k]
        if kind == FLAG:
            at = rans.list_flag(value != 0, np.int64(chance_C[k % chance_C.size]), events, at)
        elif kind == LEVEL:
            row = rans.row_of(starts, k % len(starts_CE), rans.SYMBOLS)
            at = rans.list_level(value, row, events, at)
        elif kind == NUMBER:
            at = rans.list_number(value, events, at)
        else:
            at = rans.list_bits(value, 9, events, at)
    return rans.write(events_S, at, out)


@numba.njit
def read(
    data: Bytes, kinds_K: Int64s, chance_C: Halves, starts_CE: Halves, values_K: Int64s
) -> bool:
    words, state, at = rans.begin(data)
    starts = address_of(starts_CE)
    for k in range(len(kinds_K)):
        if kinds_K[k] == FLAG:
            chance = np.int64(chance_C[k % chance_C.size])
            values_K[k], state, at = rans.read_flag(words, state, at, chance)
        elif kinds_K[k] == LEVEL:
            row = rans.row_of(starts, k % len(starts_CE), rans.SYMBOLS)
            values_K[k], state, at = rans.read_level(words, state, at, row)
        elif kinds_K[k] == NUMBER:
            values_K[k], state, at = rans.read_number(words, state, at)
        else:
            values_K[k], state, at = rans.read_bits(words, state, at, 9)
    return rans.has_ended(state, at)


def room(items: int) -> int:
    return rans.EVENT_BYTES * rans.EVENTS_OF_A_LEVEL * items + rans.STATE_BYTES


@st.composite
def some_tables(draw: st.DrawFn) -> Tables:
    shape = Shape(draw(st.integers(1, 5)), draw(st.integers(1, 3)), rans.SYMBOLS)
    counts = Counts.of(shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = draw(st.sampled_from([1, 100, 10**9]))
    counts.flags_C[:] = rng.integers(0, most, shape.flags)
    counts.set_C[:] = rng.integers(0, counts.flags_C + 1)
    skew_CS = rng.random((shape.contexts, shape.symbols)) ** draw(st.sampled_from([1, 30]))
    counts.symbols_CS[:] = most * skew_CS
    return fitted(counts)


ITEMS = st.lists(
    st.one_of(
        st.tuples(st.just(FLAG), st.integers(0, 1)),
        st.tuples(st.just(LEVEL), st.integers(-20, 20) | st.integers(-LARGEST, LARGEST)),
        st.tuples(st.just(NUMBER), st.integers(1, 70) | st.integers(1, 2**32 - 1)),
        st.tuples(st.just(BITS), st.integers(0, 2**9 - 1)),
    ),
    max_size=60,
)


@given(ITEMS, some_tables())
def test_everything_comes_back(items: list[tuple[int, int]], tables: Tables) -> None:
    items_K2 = np.array(items, np.int64).reshape(-1, 2)
    out = np.zeros(room(len(items)), np.uint8)
    size = coded(items_K2, tables.chance_C, tables.starts_CE, out)
    values_K = np.full(len(items), -1)
    kinds_K = items_K2[:, 0].copy()
    assert read(out[:size].copy(), kinds_K, tables.chance_C, tables.starts_CE, values_K)
    assert values_K.tolist() == items_K2[:, 1].tolist()
    # A message that is cut, or longer, does not end where its writer began.
    for wrong in (out[: size - 1], out[1:size], np.append(np.uint8(0), out[:size])):
        assert not read(wrong.copy(), kinds_K, tables.chance_C, tables.starts_CE, values_K)


@given(st.binary(max_size=40), st.lists(st.sampled_from(KINDS), max_size=60), some_tables())
@example(b"\xff" * 40, [NUMBER] * 60, fitted(Counts.of(Shape(1, 1, rans.SYMBOLS))))
def test_any_bytes_are_read(data: bytes, kinds: list[int], tables: Tables) -> None:
    values_K = np.zeros(len(kinds), np.int64)
    given_bytes, kinds_K = np.frombuffer(data, np.uint8).copy(), np.array(kinds, np.int64)
    read(given_bytes, kinds_K, tables.chance_C, tables.starts_CE, values_K)
    assert (np.abs(values_K) <= 2**32 + rans.ESCAPE).all()


def test_symbols_take_as_many_bits_as_they_are_worth() -> None:
    rng = np.random.default_rng(0)
    count = 100_000
    is_set_K = rng.random(count) < 0.03
    levels_K = np.where(rng.random(count) < 0.2, rng.integers(-2, 3, count), 0)
    counts = Counts.of(Shape(1, 1, rans.SYMBOLS))
    counts.set_C[0], counts.flags_C[0] = is_set_K.sum(), count
    np.add.at(counts.symbols_CS[0], np.abs(levels_K), 1)
    tables = fitted(counts)
    out = np.zeros(room(count), np.uint8)

    def bits(kind: int, values_K: NDArray[np.generic]) -> float:
        items_K2 = np.stack([np.full(count, kind), values_K], 1).astype(np.int64)
        return 8 * coded(items_K2, tables.chance_C, tables.starts_CE, out) / count

    def entropy(values_K: NDArray[np.generic]) -> float:
        share = np.unique(values_K, return_counts=True)[1] / count
        return float(-(share * np.log2(share)).sum())

    assert entropy(is_set_K) <= bits(FLAG, is_set_K) <= 1.01 * entropy(is_set_K)
    assert entropy(levels_K) <= bits(LEVEL, levels_K) <= 1.01 * entropy(levels_K)


def test_states_are_divided_exactly_by_every_width() -> None:
    for width, reciprocal in enumerate(rans.RECIPROCALS.tolist()[1:], start=1):
        largest = (width << 20) - 1  # of a state whose event is written
        excess = reciprocal * width - 2**44
        assert excess > 0 and largest * excess < 2**44, width  # so no product is too large
        assert largest * reciprocal < 2**64, width
    rng = np.random.default_rng(0)
    widths_X = rng.integers(1, rans.SCALE + 1, 100_000).astype(np.uint64)
    for shift in (0, 1):  # the last state of a quotient, and the first of the next
        quotients_X = rng.integers(0, 2**20, widths_X.size).astype(np.uint64)
        states_X = (quotients_X + np.uint64(1)) * widths_X - np.uint64(1 - shift)
        states_X = np.minimum(states_X, (widths_X << np.uint64(20)) - np.uint64(1))
        found_X = states_X * rans.RECIPROCALS[widths_X] >> np.uint64(44)
        assert np.array_equal(found_X, states_X // widths_X)
