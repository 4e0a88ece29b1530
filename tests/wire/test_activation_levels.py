"""Levels of activations come back, as short as they are worth; any bytes are safe to read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.levels.activations import FIRST_GAPS, REACH, SYMBOLS
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.activation_levels import (
    Format,
    Levels,
    UnitReceiver,
    UnitSender,
    expected_gaps,
    group_units,
)
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

CODES = (64, 920)
Bools = NDArray[np.bool_]


def drawn(rng: np.random.Generator, kept_BN: Bools, format: Format, *, signed: bool) -> Levels:
    """Any levels of what is kept."""
    indices_K = np.flatnonzero(kept_BN).astype(np.int32)
    most = 2**format.bits - 1
    least = -most if format.is_gradient else 1
    levels_K = rng.integers(least, most + 1, indices_K.size).astype(np.int16)
    if signed:
        levels_K *= rng.choice([-1, 1], indices_K.size).astype(np.int16)
    codes_B = rng.integers(*CODES, len(kept_BN)).astype(np.int16)
    codes_B[rng.random(len(kept_BN)) < 0.8] = 500
    if format.is_gradient and codes_B.size and rng.random() < 0.5:
        codes_B[0] = 0  # a row of zeros
        levels_K[indices_K < kept_BN.shape[1]] = 0
    codes_B[~kept_BN.any(axis=1)] = 0
    return Levels(indices_K, levels_K, codes_B)


def received(receiver: UnitReceiver, section: Section, sent: Levels) -> Levels:
    kept_K = sent.indices_K if receiver.format.is_gradient else None
    return receiver.levels(section, sent.codes_B.size, kept_K)


def copied(levels: Levels) -> Levels:
    return Levels(levels.indices_K.copy(), levels.levels_K.copy(), levels.codes_B.copy())


@pytest.mark.parametrize(("is_gradient", "signed"), [(True, False), (False, False), (False, True)])
@settings(max_examples=20)
@given(
    rows=st.integers(0, 9),
    width=st.sampled_from([1, 2, 16, 70, 300]),
    bits=st.integers(2, 8),
    seed=st.integers(0, 2**31),
)
def test_levels_come_back_from_every_message(
    rows: int, width: int, bits: int, is_gradient: bool, signed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    format = Format(width, bits, is_gradient)
    sender, receiver = UnitSender(format, 3), UnitReceiver(format)
    chance_N = rng.random(width) ** 6
    for _ in range(7):
        levels = drawn(rng, rng.random((rows, width)) < chance_N, format, signed=signed)
        back = received(receiver, sender.section(copied(levels)), levels)
        for one, other in zip(back, levels, strict=True):
            assert one.tolist() == other.tolist()


def test_rows_that_keep_nothing_or_all_travel() -> None:
    format = Format(20, 4, False)
    sender, receiver = UnitSender(format, 10), UnitReceiver(format)
    for share in (0, 1, 0, 1):
        kept_BN = np.full((4, 20), bool(share))
        levels = drawn(np.random.default_rng(0), kept_BN, format, signed=False)
        back = received(receiver, sender.section(copied(levels)), levels)
        assert back.indices_K.tolist() == levels.indices_K.tolist()


def test_elements_of_as_many_events_as_there_can_be_travel() -> None:
    """Far apart, of either sign, with bits below their symbols: a room too small is overwritten."""
    rng, format, rows = np.random.default_rng(6), Format(512, 8, False), 4000
    sender, receiver = UnitSender(format, 10), UnitReceiver(format)
    levels = drawn(rng, rng.random((rows, 512)) < 0.05, format, signed=True)
    for _ in range(2):
        back = received(receiver, sender.section(copied(levels)), levels)
        for one, other in zip(back, levels, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("is_gradient", [False, True])
def test_a_message_is_not_read_with_other_tables(is_gradient: bool) -> None:
    rng, format = np.random.default_rng(1), Format(40, 4, is_gradient)
    sender, receiver = UnitSender(format, 10), UnitReceiver(format)
    kept_BN = rng.random((8, 40)) < 0.2
    levels = drawn(rng, kept_BN, format, signed=False)
    first, second, third, fourth = (sender.section(copied(levels)) for _ in range(4))
    assert len(fourth.payload) < len(third.payload)  # which brings tables
    with pytest.raises(DlrmError, match="coded with tables 2; this rank has none"):
        received(receiver, fourth, levels)
    received(receiver, first, levels)
    received(receiver, second, levels)
    with pytest.raises(DlrmError, match="coded with tables 2; this rank has number 1"):
        received(receiver, fourth, levels)
    received(receiver, third, levels)
    received(receiver, fourth, levels)


def head_bytes(format: Format) -> int:
    shape = format.shape
    return 1 + 2 * shape.contexts * (shape.symbols - 1) + 2 + format.width


@given(
    is_gradient=st.booleans(),
    bits=st.sampled_from([3, 4, 8]),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_damaged_messages_are_refused_or_give_levels(
    is_gradient: bool, bits: int, data: st.DataObject, seed: int
) -> None:
    rng, format = np.random.default_rng(seed), Format(20, bits, is_gradient)
    levels = drawn(rng, rng.random((6, 20)) < 0.2, format, signed=seed % 2 == 0)
    payload = bytearray(UnitSender(format, 10).section(copied(levels)).payload)
    # Tables are most of it, what was coded is behind them.
    start = data.draw(st.sampled_from([0, head_bytes(format)]))
    match data.draw(st.sampled_from(["flip", "cut", "any"])):
        case "flip":
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(start, len(payload) - 1))
                payload[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del payload[data.draw(st.integers(start, len(payload) - 1)) :]
        case _:
            payload[start:] = data.draw(st.binary(max_size=60))
    receiver = UnitReceiver(format)
    section = Section(3, Encoding.DENSE, Dtype.UINT8, len(payload), bytes(payload))
    try:
        found = received(receiver, section, levels)
    except DlrmError as error:
        assert str(error).startswith("tensor 3: no DENSE section: ")
        found = None
    if found is not None:
        indices_K, levels_K, codes_B = found
        assert (np.diff(indices_K) > 0).all()
        assert indices_K.size == levels_K.size <= 6 * 20
        assert not indices_K.size or (indices_K[0] >= 0 and indices_K[-1] < 6 * 20)
        assert (np.abs(levels_K) < 2**bits).all() and (is_gradient or (levels_K != 0).all())
        assert (((codes_B >= CODES[0]) & (codes_B <= CODES[1])) | (codes_B == 0)).all()
    # What was refused leaves a receiver that later tables set right.
    received(receiver, UnitSender(format, 10).section(copied(levels)), levels)


def test_a_message_is_as_long_as_its_entropy() -> None:
    """Positions by each unit's own frequency, levels by each unit's own distribution."""
    rng, format, rows = np.random.default_rng(2), Format(256, 4, False), 128
    chance_N = rng.beta(0.15, 1.35, 256)
    middle_N = rng.integers(3, 13, 256)
    sender = UnitSender(format, 1000)
    sizes: list[int] = []
    for _ in range(130):
        kept_BN = rng.random((rows, 256)) < chance_N
        indices_K = np.flatnonzero(kept_BN).astype(np.int32)
        noise_K = rng.binomial(4, 0.5, indices_K.size) - 2
        levels_K = (middle_N[indices_K % 256] + noise_K).astype(np.int16)
        codes_B = rng.integers(500, 504, rows).astype(np.int16)
        codes_B[~kept_BN.any(axis=1)] = 0
        sizes.append(len(sender.section(Levels(indices_K, levels_K, codes_B)).payload))
    share_N = np.clip(chance_N, 1e-12, 1 - 1e-12)
    positions = -(share_N * np.log2(share_N) + (1 - share_N) * np.log2(1 - share_N)).sum()
    binomial = np.array([1, 4, 6, 4, 1]) / 16
    levels = -(binomial * np.log2(binomial)).sum() * chance_N.sum()
    entropy = rows * (positions + levels + 2) / 8
    measured = np.mean(sizes[65:128])  # between messages that bring tables
    assert entropy <= measured <= 1.06 * entropy, measured / entropy
    plain = rows * chance_N.sum() * (4 + 8) / 8
    assert measured < 0.7 * plain


def test_gradients_that_are_one_vector_take_few_bits() -> None:
    rng, format, rows = np.random.default_rng(3), Format(64, 3, True), 64
    vector_N = rng.integers(-7, 8, 64)
    indices_K = np.arange(rows * 64, dtype=np.int32)
    sender, receiver = UnitSender(format, 1000), UnitReceiver(format)
    sizes: list[int] = []
    for _ in range(8):
        signs_B1 = rng.choice([-1, 1], (rows, 1))
        levels_K = (signs_B1 * vector_N).reshape(-1).astype(np.int16)
        codes_B = np.full(rows, 500, np.int16)
        levels = Levels(indices_K, levels_K, codes_B)
        section = sender.section(copied(levels))
        assert received(receiver, section, levels).levels_K.tolist() == levels_K.tolist()
        sizes.append(len(section.payload))
    assert sizes[-1] < rows  # 64 levels in a byte: the sign of a row, and what is all but certain


def test_units_with_like_levels_share_a_table() -> None:
    rng = np.random.default_rng(4)
    kinds_N = rng.integers(0, 4, 60)
    chances = rng.dirichlet(np.full(SYMBOLS, 0.2), 4)
    counts_NS = np.stack([rng.multinomial(2000, chances[kind]) for kind in kinds_N])
    groups_N = group_units(counts_NS, 16)
    assert groups_N.max() < 16
    for group in np.unique(groups_N):
        assert np.unique(kinds_N[groups_N == group]).size == 1
    assert group_units(np.zeros((5, SYMBOLS), np.int64), 16).shape == (5,)


def test_expected_gaps_are_those_of_independent_choices() -> None:
    rng, rows = np.random.default_rng(5), 40_000
    chance_N = np.array([0.011, 0.01, 0.012, 0.009])
    kept = np.concatenate([rng.random(rows) < chance for chance in chance_N])
    gaps = np.diff(np.flatnonzero(kept), prepend=-1) - 1
    far, rest = np.divmod(gaps, REACH)
    symbols: NDArray[np.int64] = np.searchsorted(FIRST_GAPS, rest, side="right") - 1
    counted = np.bincount(symbols, minlength=SYMBOLS).astype(float)
    counted[30] = far.sum()
    expected = expected_gaps(chance_N, rows)
    deviation = np.abs(counted - expected) / np.sqrt(expected + 1)
    assert deviation.max() < 5


def test_tables_without_classes_serve_nothing() -> None:
    """A message that ends before the classes of its tables leaves no tables to read others with."""
    rng, format = np.random.default_rng(1), Format(40, 4, False)
    sender, receiver = UnitSender(format, 10), UnitReceiver(format)
    levels = drawn(rng, rng.random((8, 40)) < 0.2, format, signed=False)
    _, _, third, fourth = (sender.section(copied(levels)) for _ in range(4))
    cut = third._replace(payload=third.payload[: head_bytes(format) - 1])
    with pytest.raises(DlrmError, match="hold no tables of"):
        received(receiver, cut, levels)
    with pytest.raises(DlrmError, match="coded with tables 2; this rank has none"):
        received(receiver, fourth, levels)
