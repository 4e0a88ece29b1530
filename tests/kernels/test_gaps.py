"""Coded gaps and sets of ids come back, in hardly more bits than chance needs."""

from math import log2

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.gaps import (
    BITS_OF_A_COUNT,
    BITS_OF_AN_ID,
    STORE_BYTES,
    decode_gaps,
    decode_ids,
    encode_gaps,
    encode_ids,
    fit_parameter,
)

Int32s = NDArray[np.int32]
LARGEST = 2**31 - 1
Tables = list[tuple[int, set[int]]]  # rows, and the ids of some of them
Bytes = NDArray[np.uint8]
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
    encode_gaps(indices, parameter, out)
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
    assert decode_gaps(out, 0, parameter, int(indices[-1]) + 1, back) == num_bytes
    assert back.tolist() == indices.tolist()
    assert decode_gaps(out, 0, parameter, int(indices[-1]), back) == -1


@given(GAPS)
def test_few_indices_get_the_best_parameter(gaps: list[int]) -> None:
    indices = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.int32)
    parameter, bits = fit_parameter(indices)
    assert bits == len(codes(indices, parameter))
    assert bits == min(len(codes(indices, other)) for other in range(32))


@pytest.mark.parametrize("scale", [0.5, 3, 40, 900])
@pytest.mark.parametrize("far", [0.0, 0.01, 0.05])
def test_many_indices_get_a_parameter_almost_as_good(scale: float, far: float) -> None:
    rng = np.random.default_rng(2)
    gaps = rng.geometric(1 / (1 + scale), 3000) + (rng.random(3000) < far) * 50_000
    indices = np.cumsum(gaps).astype(np.int32)
    _, bits = fit_parameter(indices)
    assert bits <= 1.01 * min(len(codes(indices, other)) for other in range(20))


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.25])
def test_random_indices_take_hardly_more_than_their_entropy(density: float) -> None:
    count = 1_000_000
    chosen = np.random.default_rng(1).random(count) < density
    p = float(chosen.mean())
    entropy_bits = -count * (p * log2(p) + (1 - p) * log2(1 - p))
    _, bits = fit_parameter(np.flatnonzero(chosen).astype(np.int32))
    assert 0.99 * entropy_bits < bits <= 1.03 * entropy_bits


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Small tables and the largest, sets of few and of all ids."""
    found: Tables = []
    for _ in range(draw(st.integers(0, 6))):
        rows = draw(st.one_of(st.integers(1, 40), st.integers(1, 10**6), st.just(LARGEST)))
        near = st.sampled_from([0, rows - 1])
        found.append((rows, draw(st.sets(st.one_of(near, st.integers(0, rows - 1)), max_size=50))))
    return found


def id_arrays(given_tables: Tables) -> tuple[NDArray[np.int64], ...]:
    """Ids, counts, rows and the bits of counts, as `encode` takes them."""
    ids = [row for _, chosen in given_tables for row in sorted(chosen)]
    counts = [len(chosen) for _, chosen in given_tables]
    rows = [rows for rows, _ in given_tables]
    bits = [count.bit_length() for count in counts]
    return tuple(np.array(values, np.int64) for values in (ids, counts, rows, bits))


def encoded_ids(given_tables: Tables) -> Bytes:
    """In memory that is as small as the contract allows, and ends with a mark."""
    ids_K, counts_L, rows_L, bits_L = id_arrays(given_tables)
    bits = BITS_OF_AN_ID * ids_K.size + BITS_OF_A_COUNT * counts_L.size
    room = (bits + 7) // 8 + STORE_BYTES
    out = np.full(room + 1, 0xAA, np.uint8)
    written = encode_ids(ids_K, counts_L, rows_L, bits_L, out[:room])
    assert out[room] == 0xAA
    return out[:written]


def id_codes(given_tables: Tables) -> str:
    """The bits in the order in which they are read, by the definition."""
    text = ""
    for rows, chosen in given_tables:
        count = len(chosen)
        text += "".join(str(count >> place & 1) for place in range(count.bit_length()))
        low = max((r for r in range(32) if count << r <= rows), default=0)
        text += codes(np.array(sorted(chosen), np.int32), low)
    return text


@given(tables())
@example([(LARGEST, {LARGEST - 1})])
@example([(LARGEST, set(range(60)) | {LARGEST - 1})])
def test_ids_come_back_and_the_bits_are_the_documented_ones(given_tables: Tables) -> None:
    message = encoded_ids(given_tables)
    ids_K, counts_L, rows_L, bits_L = id_arrays(given_tables)
    text = id_codes(given_tables)
    assert np.unpackbits(message, bitorder="little").tolist() == [
        int(bit) for bit in text.ljust(8 * message.size, "0")
    ]
    assert 8 * message.size < len(text) + 8
    back_K, back_L = np.full_like(ids_K, -5), np.full_like(counts_L, -5)
    assert decode_ids(message, rows_L, bits_L, back_K, back_L) == ids_K.size
    assert back_K.tolist() == ids_K.tolist()
    assert back_L.tolist() == counts_L.tolist()


@given(tables())
def test_no_id_takes_more_than_its_share(given_tables: Tables) -> None:
    for rows, chosen in given_tables:
        count = len(chosen)
        if not count:
            continue
        low = (rows // count).bit_length() - 1
        assert len(id_codes([(rows, chosen)])) <= count.bit_length() + max(low + 3, 6) * count


def test_all_rows_of_a_table_take_a_bit_each() -> None:
    assert encoded_ids([(800, set(range(800)))]).size == (10 + 800 + 7) // 8


@given(tables().filter(lambda given_tables: any(chosen for _, chosen in given_tables)))
def test_too_little_room_and_lost_bytes_are_told(given_tables: Tables) -> None:
    message = encoded_ids(given_tables)
    ids_K, counts_L, rows_L, bits_L = id_arrays(given_tables)
    small_K, counts_L = np.full(ids_K.size, -5, np.int64), np.empty_like(counts_L)
    assert decode_ids(message, rows_L, bits_L, small_K[:-1], counts_L) == -1
    assert small_K[-1] == -5
    assert decode_ids(message[:-1], rows_L, bits_L, np.empty_like(ids_K), counts_L) == -1
    longer = np.append(message, np.uint8(0))
    assert decode_ids(longer, rows_L, bits_L, np.empty_like(ids_K), counts_L) == -1


def decodes_to_ids_or_nothing(message: Bytes, rows_L: NDArray[np.int64], room: int) -> bool:
    """Whether there were ids; what lies behind the room must stay as it was."""
    bits_L = np.array([min(rows, room).bit_length() for rows in rows_L.tolist()], np.int64)
    back_K, counts_L = np.full(room + 8, -5, np.int64), np.zeros_like(rows_L)
    found = decode_ids(message, rows_L, bits_L, back_K[:room], counts_L)
    assert back_K[room:].tolist() == [-5] * 8
    if found < 0:
        assert found == -1
        return False
    assert found == counts_L.sum() <= room
    for part_K, rows in zip(
        np.split(back_K[:found], np.cumsum(counts_L)[:-1]), rows_L, strict=True
    ):
        assert (np.diff(part_K) > 0).all()
        assert ((part_K >= 0) & (part_K < rows)).all()
    return True


@given(
    st.binary(max_size=80),
    st.lists(st.one_of(st.integers(1, 40), st.just(LARGEST)), min_size=1, max_size=4),
    st.integers(0, 60),
)
def test_any_bytes_are_ids_or_refused(raw: bytes, rows: list[int], room: int) -> None:
    message = np.frombuffer(raw, np.uint8)
    decodes_to_ids_or_nothing(message, np.array(rows, np.int64), room)


@pytest.mark.parametrize("changes", [1, 3])
def test_changed_messages_are_ids_or_refused(changes: int) -> None:
    rng = np.random.default_rng(changes)
    rows_L = np.array([3, 100, 5000, LARGEST], np.int64)
    outcomes = set()
    for _ in range(5000):
        message = encoded_ids(
            [(int(rows), set(rng.integers(0, rows, 9).tolist())) for rows in rows_L]
        )
        message[rng.integers(0, message.size, changes)] ^= rng.integers(1, 256, changes, np.uint8)
        outcomes.add(decodes_to_ids_or_nothing(message, rows_L, 40))
    assert outcomes == {True, False}


def test_a_long_run_of_ones_ends_at_the_last_row() -> None:
    """A gap that would not fit into 64 bits once its low bits are put below it."""
    message = np.full(2**20, 0xFF, np.uint8)
    ids_K, counts_L = np.empty(4, np.int64), np.empty(1, np.int64)
    bits_L, rows_L = np.array([1], np.int64), np.array([LARGEST], np.int64)
    assert decode_ids(message, rows_L, bits_L, ids_K, counts_L) == -1
