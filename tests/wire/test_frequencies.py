"""Tables come when they must, and a receiver never reads with others than the sender coded with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frequencies import Counts, Shape, TableReceiver, Tables, TableSender, fitted
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

SHAPE = Shape(3, 2, 4)
TABLE_BYTES = 2 * (3 + 2 * 3)


def section(payload: bytes) -> Section:
    return Section(2, Encoding.DENSE, Dtype.UINT8, len(payload), payload)


def count(sender: TableSender, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sender.counts.flags_C[:] += 9
    sender.counts.set_C[:] += rng.integers(0, 10, SHAPE.flags)
    sender.counts.symbols_CS[:] += rng.integers(0, 99, (SHAPE.contexts, SHAPE.symbols))


def assert_same(left: Tables, right: Tables) -> None:
    assert left.chance_C.tolist() == right.chance_C.tolist()
    assert left.starts_CE.tolist() == right.starts_CE.tolist()


def test_tables_follow_ever_more_seldom_until_their_lifespan() -> None:
    sender, receiver = TableSender(SHAPE, 10), TableReceiver(SHAPE)
    due = []
    for message in range(40):
        count(sender, message)
        head = sender.begin()
        if len(head) > 1:
            due.append(message)
            assert len(head) == 1 + TABLE_BYTES
            assert not sender.counts.flags_C.any() and not sender.counts.symbols_CS.any()
        tables, _, rest = receiver.begin(section(head + b"what follows"))
        assert_same(tables, sender.tables)
        assert bytes(rest) == b"what follows"
    assert due == [0, 1, 2, 4, 8, 10, 20, 30]


def test_a_receiver_that_lacks_tables_says_so() -> None:
    sender, receiver = TableSender(SHAPE, 10), TableReceiver(SHAPE)
    first, *_, fourth = (sender.begin() for _ in range(4))
    with pytest.raises(DlrmError, match="tensor 2: .*coded with tables 2; this rank has none"):
        receiver.begin(section(fourth))
    receiver.begin(section(first))
    with pytest.raises(DlrmError, match="coded with tables 2; this rank has number 0"):
        receiver.begin(section(fourth))
    sender.restart()
    tables, _, _ = TableReceiver(SHAPE).begin(section(sender.begin()))
    assert_same(tables, sender.tables)


@given(st.binary(max_size=60))
def test_any_bytes_are_tables_or_an_error(payload: bytes) -> None:
    receiver = TableReceiver(SHAPE)
    try:
        tables, _, rest = receiver.begin(section(payload))
    except DlrmError as error:
        assert str(error).startswith("tensor 2: no DENSE section: ")
        return
    assert len(rest) == len(payload) - 1 - TABLE_BYTES
    assert (tables.chance_C > 0).all() and (tables.chance_C < 4096).all()
    assert (np.diff(tables.starts_CE.astype(int), axis=1) > 0).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 10**12]), st.integers(2, 32))
def test_nothing_is_impossible(seed: int, most: int, symbols: int) -> None:
    rng = np.random.default_rng(seed)
    counts = Counts.of(Shape(4, 3, symbols))
    counts.flags_C[:] = rng.integers(0, most + 1, 4)
    counts.set_C[:] = rng.choice([0, 1], 4) * counts.flags_C
    counts.symbols_CS[:] = rng.integers(0, most + 1, (3, symbols)) * rng.choice([0, 1], symbols)
    tables = fitted(counts)
    widths_CS = np.diff(tables.starts_CE.astype(int), axis=1)
    assert (widths_CS > 0).all() and (widths_CS.sum(axis=1) == 4096).all()
    assert (tables.chance_C > 0).all() and (tables.chance_C < 4096).all()
    rank_CS = counts.symbols_CS.argsort(axis=1)
    ordered_CS = np.take_along_axis(widths_CS, rank_CS, axis=1)
    assert (np.diff(ordered_CS, axis=1) >= -1).all()  # rounded sums: one place off at most
