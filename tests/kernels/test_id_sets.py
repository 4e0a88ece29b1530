"""Sets of ids come back from their bytes, and no bytes do harm."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.id_sets import BITS_OF_A_COUNT, BITS_OF_AN_ID, decode, encode

LARGEST = 2**31 - 1
Tables = list[tuple[int, set[int]]]  # rows, and the ids of some of them
Bytes = NDArray[np.uint8]


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Small tables and the largest, sets of few and of all ids."""
    found: Tables = []
    for _ in range(draw(st.integers(0, 6))):
        rows = draw(st.one_of(st.integers(1, 40), st.integers(1, 10**6), st.just(LARGEST)))
        near = st.sampled_from([0, rows - 1])
        found.append((rows, draw(st.sets(st.one_of(near, st.integers(0, rows - 1)), max_size=50))))
    return found


def arrays(given_tables: Tables) -> tuple[NDArray[np.int64], ...]:
    """Ids, counts, rows and the bits of counts, as `encode` takes them."""
    ids = [row for _, chosen in given_tables for row in sorted(chosen)]
    counts = [len(chosen) for _, chosen in given_tables]
    rows = [rows for rows, _ in given_tables]
    bits = [count.bit_length() for count in counts]
    return tuple(np.array(values, np.int64) for values in (ids, counts, rows, bits))


def encoded(given_tables: Tables) -> Bytes:
    """In memory that is as small as the contract allows, and ends with a mark."""
    ids_K, counts_L, rows_L, bits_L = arrays(given_tables)
    room = (BITS_OF_AN_ID * ids_K.size + BITS_OF_A_COUNT * counts_L.size + 7) // 8
    out = np.full(room + 1, 0xAA, np.uint8)
    written = encode(ids_K, counts_L, rows_L, bits_L, out[:room])
    assert out[room] == 0xAA
    return out[:written]


def codes(given_tables: Tables) -> str:
    """The bits in the order in which they are read, by the definition."""
    text = ""
    for rows, chosen in given_tables:
        count = len(chosen)
        text += "".join(str(count >> place & 1) for place in range(count.bit_length()))
        low = max((r for r in range(32) if count << r <= rows), default=0)
        following = 0
        for row in sorted(chosen):
            gap, following = row - following, row + 1
            text += "1" * (gap >> low) + "0"
            text += "".join(str(gap >> place & 1) for place in range(low))
    return text


@given(tables())
@example([(LARGEST, {LARGEST - 1})])
@example([(LARGEST, set(range(60)) | {LARGEST - 1})])
def test_ids_come_back_and_the_bits_are_the_documented_ones(given_tables: Tables) -> None:
    message = encoded(given_tables)
    ids_K, counts_L, rows_L, bits_L = arrays(given_tables)
    text = codes(given_tables)
    assert np.unpackbits(message, bitorder="little").tolist() == [
        int(bit) for bit in text.ljust(8 * message.size, "0")
    ]
    assert 8 * message.size < len(text) + 8
    back_K, back_L = np.full_like(ids_K, -5), np.full_like(counts_L, -5)
    assert decode(message, rows_L, bits_L, back_K, back_L) == ids_K.size
    assert back_K.tolist() == ids_K.tolist()
    assert back_L.tolist() == counts_L.tolist()


@given(tables())
def test_no_id_takes_more_than_its_share(given_tables: Tables) -> None:
    for rows, chosen in given_tables:
        count = len(chosen)
        if not count:
            continue
        low = (rows // count).bit_length() - 1
        assert len(codes([(rows, chosen)])) <= count.bit_length() + (low + 3) * count


def test_all_rows_of_a_table_take_a_bit_each() -> None:
    assert encoded([(800, set(range(800)))]).size == (10 + 800 + 7) // 8


@given(tables().filter(lambda given_tables: any(chosen for _, chosen in given_tables)))
def test_too_little_room_and_lost_bytes_are_told(given_tables: Tables) -> None:
    message = encoded(given_tables)
    ids_K, counts_L, rows_L, bits_L = arrays(given_tables)
    small_K, counts_L = np.full(ids_K.size, -5, np.int64), np.empty_like(counts_L)
    assert decode(message, rows_L, bits_L, small_K[:-1], counts_L) == -1
    assert small_K[-1] == -5
    assert decode(message[:-1], rows_L, bits_L, np.empty_like(ids_K), counts_L) == -1
    longer = np.append(message, np.uint8(0))
    assert decode(longer, rows_L, bits_L, np.empty_like(ids_K), counts_L) == -1


def decodes_to_ids_or_nothing(message: Bytes, rows_L: NDArray[np.int64], room: int) -> bool:
    """Whether there were ids; what lies behind the room must stay as it was."""
    bits_L = np.array([min(rows, room).bit_length() for rows in rows_L.tolist()], np.int64)
    back_K, counts_L = np.full(room + 8, -5, np.int64), np.zeros_like(rows_L)
    found = decode(message, rows_L, bits_L, back_K[:room], counts_L)
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
        message = encoded([(int(rows), set(rng.integers(0, rows, 9).tolist())) for rows in rows_L])
        message[rng.integers(0, message.size, changes)] ^= rng.integers(1, 256, changes, np.uint8)
        outcomes.add(decodes_to_ids_or_nothing(message, rows_L, 40))
    assert outcomes == {True, False}


def test_a_long_run_of_ones_ends_at_the_last_row() -> None:
    """A gap that would not fit into 64 bits once its low bits are put below it."""
    message = np.full(2**20, 0xFF, np.uint8)
    ids_K, counts_L = np.empty(4, np.int64), np.empty(1, np.int64)
    bits_L, rows_L = np.array([1], np.int64), np.array([LARGEST], np.int64)
    assert decode(message, rows_L, bits_L, ids_K, counts_L) == -1
