"""Updates of a bucket in one section: just the elements come back, and any bytes are read.

Shapes: K elements of T tensors, E = T + 1 offsets.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated_bytes import changed

from dlrm_hybrid.kernels.levels.updates import CONTEXTS, SYMBOLS
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.gradient_levels import Matrices, UpdateReceiver, UpdateSender
from dlrm_hybrid.wire.section import Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import Elements

SHAPES = ((12, 20), (12,), (1, 12), (), (0, 3), (200, 300))
COUNTS = np.array([240, 12, 12, 1, 0, 60_000])
LARGEST = 255


def elements_of(rng: np.random.Generator, chances: np.ndarray, exponent: int) -> Elements:
    """Popular rows and columns of every tensor, with levels of their quanta."""
    indices, values = list[np.ndarray](), list[np.ndarray]()
    for count, chance in zip(COUNTS, chances, strict=True):
        drawn = rng.random(count) * rng.permutation(np.linspace(0, 1, count)) < chance / 4
        chosen_K = np.flatnonzero(drawn).astype(np.int32)
        sizes_K = np.minimum(rng.geometric(0.5, chosen_K.size), LARGEST)
        levels_K = sizes_K * rng.choice([-1, 1], chosen_K.size)
        indices.append(chosen_K)
        quantum = 2.0 ** (exponent + rng.integers(-3, 4))
        values.append((levels_K * quantum).astype(np.float32))
    offsets_E = np.cumsum([0, *(one.size for one in indices)])
    return Elements(offsets_E, np.concatenate(indices), np.concatenate(values))


def assert_same(left: Elements, right: Elements) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.tobytes() == other.tobytes()
        assert one.dtype == other.dtype


# An example of 28 ms: a third of those that the profile asks for.
@settings(max_examples=settings.default.max_examples // 3 if settings.default else 30)
@given(
    seed=st.integers(0, 2**32 - 1),
    chances=st.lists(st.sampled_from([0.0, 1e-3, 0.02, 0.3, 4.0]), min_size=6, max_size=6),
    exponent=st.integers(-110, 110),
)
def test_just_the_elements_come_back(seed: int, chances: list[float], exponent: int) -> None:
    rng = np.random.default_rng(seed)
    sender, receiver = UpdateSender(SHAPES), UpdateReceiver(SHAPES)
    for message in range(12):
        if message == 7:
            sender.restart()
        if message == 9:  # a receiver that has come in the meantime
            sender.restart()
            receiver = UpdateReceiver(SHAPES)
        sent = elements_of(rng, np.array(chances), exponent)
        section = sender.encode(5, sent)
        assert (section.tensor, section.count) == (5, COUNTS.sum())
        assert section.encoding is Encoding.CODED
        assert_same(receiver.decode(section), sent)


@given(st.lists(st.integers(-32767, 32767), min_size=1, max_size=12), st.integers(-149, 112))
def test_levels_of_15_bits_come_back(levels: list[int], exponent: int) -> None:
    values_K = np.ldexp(np.array(levels), exponent).astype(np.float32)
    offsets_E = np.array([0, 0, values_K.size, *[values_K.size] * 4])
    sent = Elements(offsets_E, np.arange(values_K.size, dtype=np.int32), values_K)
    found = UpdateReceiver(SHAPES).decode(UpdateSender(SHAPES).encode(0, sent))
    kept_K = values_K != 0
    assert found.values_K.tobytes() == values_K[kept_K].tobytes()
    assert found.indices_K.tolist() == np.flatnonzero(kept_K).tolist()


@pytest.mark.parametrize("values", [[1.0, 2.0**-20], [np.inf], [np.nan, 1.0]])
def test_other_values_are_refused(values: list[float]) -> None:
    values_K = np.array(values, np.float32)
    indices_K = np.arange(values_K.size, dtype=np.int32)
    sent = Elements(np.array([0, *[values_K.size] * 6]), indices_K, values_K)
    with pytest.raises(ValueError, match="tensor 0 and others: values are no levels"):
        UpdateSender(SHAPES).encode(0, sent)


def test_popular_rows_and_columns_make_positions_cheap() -> None:
    rng = np.random.default_rng(0)
    row_r, col_c = (rng.permutation(np.arange(1, size + 1.0)) ** -1.2 for size in (200, 300))
    chance_rc = np.minimum(np.outer(row_r, col_c) * 99, 0.7)
    entropy = -(chance_rc * np.log2(chance_rc) + (1 - chance_rc) * np.log2(1 - chance_rc)).sum()
    sender = UpdateSender([(200, 300)])
    sizes, even_bits = list[int](), 0.0
    for message in range(80):
        chosen_K = np.flatnonzero(rng.random((200, 300)) < chance_rc).astype(np.int32)
        values_K = rng.choice(np.array([-1, 1], np.float32), chosen_K.size)
        offsets_2 = np.array([0, chosen_K.size])
        payload = sender.encode(0, Elements(offsets_2, chosen_K, values_K)).payload
        if message > 64:
            sizes.append(8 * len(payload) - chosen_K.size)  # a bit for each sign
            density = chosen_K.size / 60_000
            even_bits += chosen_K.size * (np.log2(1 / density) + 1.4)
    assert sum(sizes) < 1.15 * entropy * len(sizes)
    assert sum(sizes) < 0.8 * even_bits


def genuine() -> list[Section]:
    rng = np.random.default_rng(3)
    sender = UpdateSender(SHAPES)
    drawn = (elements_of(rng, np.full(6, 0.01), 0) for _ in range(4))
    return [sender.encode(5, one) for one in drawn]


GENUINE = genuine()


@given(st.data(), st.sampled_from([0, 3]))
def test_any_bytes_are_elements_or_an_error(data: st.DataObject, number: int) -> None:
    receiver = UpdateReceiver(SHAPES)
    for section in GENUINE[:number]:
        receiver.decode(section)
    payload = data.draw(changed(bytes(GENUINE[number].payload)))
    try:
        found = receiver.decode(GENUINE[number]._replace(payload=payload))
    except SectionError as error:
        assert str(error).startswith("tensor 5: no CODED section: ")
    else:
        sizes = np.diff(found.offsets_E)
        assert (sizes >= 0).all() and found.offsets_E[-1] == found.indices_K.size
        parts = np.split(found.indices_K, found.offsets_E[1:-1])
        for part_K, count in zip(parts, COUNTS, strict=True):
            assert (np.diff(part_K) > 0).all()
            assert part_K.size == 0 or 0 <= part_K[0] <= part_K[-1] < count
        assert np.isfinite(found.values_K).all() or payload != GENUINE[number].payload
    # What was broken leaves no trace in what comes next.
    fresh = UpdateReceiver(SHAPES)
    expected = [fresh.decode(section) for section in GENUINE[:2]]
    for section, one in zip(GENUINE[:2], expected, strict=True):
        assert_same(receiver.decode(section), one)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (GENUINE[3], "coded with tables"),
        (GENUINE[0]._replace(count=7), "CODED of 7 elements, expected CODED of 60265"),
        (GENUINE[0]._replace(payload=b""), "it is empty: it names no tables"),
        (GENUINE[0]._replace(payload=bytes(GENUINE[0].payload)[:1500]), "hold no tables of"),
        (GENUINE[0]._replace(payload=bytes(GENUINE[0].payload)[:-1]), "are no levels of 60265"),
    ],
)
def test_what_does_not_fit_is_named(section: Section, reason: str) -> None:
    with pytest.raises(DlrmError, match=reason):
        UpdateReceiver(SHAPES).decode(section)


@pytest.mark.parametrize("broken", ["short", "exponent"])
def test_tables_without_popularity_serve_nothing(broken: str) -> None:
    receiver, payload = UpdateReceiver(SHAPES), bytearray(GENUINE[1].payload)
    receiver.decode(GENUINE[0])
    head = 1 + 2 * CONTEXTS * (SYMBOLS - 1)
    if broken == "short":
        del payload[head + 9 :]
    else:
        end = head + Matrices(SHAPES).payload_bytes
        payload[end - 2 : end] = b"\xff\x7f"
    reason = "hold no tables of" if broken == "short" else "is none of float32"
    with pytest.raises(SectionError, match=reason):
        receiver.decode(GENUINE[1]._replace(payload=bytes(payload)))
    with pytest.raises(SectionError, match="this rank has n"):  # not by the order before
        receiver.decode(GENUINE[0]._replace(payload=bytes([payload[0] & 127, 0])))
