"""Any bytes give the frame that was encoded, or an error: no crash, no large allocation."""

import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated_bytes import (
    MOST_BYTES,
    MOST_TIMES,
    SHAPE,
    genuine_frames,
    memory_of,
    mutated_frames,
    sealed,
)

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense, values_of
from dlrm_hybrid.wire.frame import Frame, FrameError, Kind, decode, encode, encoded_bytes
from dlrm_hybrid.wire.frame import sealed as seal
from dlrm_hybrid.wire.section import FLOATS, Dtype, Encoding, Section, size_fault
from dlrm_hybrid.wire.sparse import rows_of, sparse_of
from dlrm_hybrid.wire.ternary import mean_of, ternary_of

ITEM_BYTES = {"FLOAT32": 4, "BFLOAT16": 2, "FLOAT16": 2, "INT32": 4, "INT64": 8}
ITEM_BYTES |= {"UINT8": 1, "FLOAT64": 8}
U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)


@st.composite
def sections(draw: st.DrawFn) -> Section:
    encoding = draw(st.sampled_from(Encoding))
    dense = encoding is Encoding.DENSE
    dtype = draw(st.sampled_from(list(Dtype) if dense else sorted(FLOATS)))
    count = draw(st.integers(0, 40))
    size = count * ITEM_BYTES[dtype.name]
    payload = draw(st.binary(min_size=size if dense else 0, max_size=size))
    return Section(draw(st.integers(0, 2**16 - 1)), encoding, dtype, count, payload)


FRAMES = st.builds(
    Frame,
    kind=st.sampled_from([kind for kind in Kind if kind is not Kind.LEFT]),  # never sent
    sender=U32,
    attempt=U32,
    number=st.integers(0, 2**64 - 1),
    boundary=U16,
    round=U16,
    microbatch=U32,
    sections=st.lists(sections(), max_size=4).map(tuple),
)


def frame(*arrays: np.ndarray) -> Frame:
    return Frame(
        kind=Kind.PUSH,
        sender=3,
        attempt=1,
        number=70_000_000_000,
        boundary=1,
        round=3,
        microbatch=2,
        sections=tuple(dense(number, array) for number, array in enumerate(arrays)),
    )


SAMPLE = frame(np.arange(7, dtype=np.float32), np.arange(3, dtype=np.int64), np.zeros(5, np.uint8))


@given(FRAMES)
def test_decoding_gives_what_was_encoded(one: Frame) -> None:
    buffer = encode(one)
    assert decode(buffer) == one
    assert len(buffer) == encoded_bytes(one)
    assert encode(decode(bytes(buffer))) == buffer


def test_a_sealed_frame_is_what_it_was_when_it_was_sealed() -> None:
    values = np.arange(5, dtype=np.float32)
    one = Frame(kind=Kind.PARAMETERS, sender=3, attempt=0, number=7, sections=(dense(0, values),))
    before = bytes(encode(one))
    told = seal(one)
    values[:] = 9
    assert encode(told) is encode(told)
    assert encode(told) == before != encode(one)
    assert (told, encoded_bytes(told)) == (one, len(before))
    # What is made of it with other fields is encoded anew.
    assert decode(encode(replace(told, number=8))).number == 8


def test_bytes_lie_as_drawn() -> None:
    payload = np.array([1.5, -2.0, 3.0], np.float32)
    head = b"DLHF" + struct.pack("<BBHIIQHHI", 2, 4, 1, 3, 1, 70_000_000_000, 1, 3, 2)
    table = struct.pack("<HBBIQ", 0, 1, 1, 3, 12)
    assert encode(frame(payload)) == sealed(head + table + payload.tobytes() + bytes(4))


KINDS = """
HELLO ACTIVATION ACTIVATION_GRADIENT PUSH PARAMETERS RECEIVED CONTRIBUTION RESULT LOOKUP ROWS
UPDATE REPORT DECISION FETCH WEIGHTS SAVE COPIED SHARD - LOGITS STOP_REQUEST STOP_DECISION GOODBYE
PULL LEFT STATISTICS LOWER
"""  # LEFT is never sent
ENCODINGS = "DENSE INDEX32 BITMAP RICE ROWS TERNARY TRITS LEVELS CODED"


def test_numbers_on_the_wire_are_fixed() -> None:
    for kinds, names in ((Kind, KINDS), (Encoding, ENCODINGS), (Dtype, " ".join(ITEM_BYTES))):
        numbers = {name: number for number, name in enumerate(names.split(), 1) if name != "-"}
        assert {one.name: one.value for one in kinds} == numbers


def test_every_truncation_is_told() -> None:
    buffer = encode(SAMPLE)
    for length in range(len(buffer)):
        with pytest.raises(FrameError):
            decode(buffer[:length])
    with pytest.raises(FrameError):
        decode(buffer + b"\0")


def test_every_flipped_byte_is_told() -> None:
    buffer = encode(SAMPLE)
    for place in range(len(buffer)):
        for flip in (1, 128, 255):
            changed = bytearray(buffer)
            changed[place] ^= flip
            with pytest.raises(FrameError):
                decode(changed)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"HTTP", "byte 0: the magic bytes are others"),
        (4, b"\x01", "byte 4: version 1; this program reads version 2"),
        (4, b"\x00", "byte 4: version 0; this program reads version 2"),
        (5, b"\x00", "byte 5: kind 0 is unknown"),
        (5, b"\xff", "byte 5: kind 255 is unknown"),
        (6, b"\xff\xff", "byte 6: 65535 sections do not fit"),
        (6, b"\x00\x00", "byte 32: 112 bytes too many"),
        (34, b"\x0a", "byte 34: encoding 10 is unknown"),
        (34, b"\x03\x04", "byte 36: BITMAP holds floats, not int32"),
        (34, b"\x02\x02\x05", "byte 36: 28 bytes are more than INDEX32 takes for 5 elements"),
        (35, b"\x00", "byte 35: element type 0 is unknown"),
        (36, b"\xff\xff\xff\xff", "byte 36: 4294967295 elements of float32 do not fill 28 bytes"),
        (40, b"\xff" * 8, "byte 36: 7 elements of float32 do not fill 18446744073709551615 bytes"),
        (
            36,
            struct.pack("<IQ", 2**32 - 1, 4 * (2**32 - 1)),
            "byte 40: a payload of 17179869180 bytes does not fit",
        ),
    ],
)
def test_a_forged_field_is_named_with_its_place(offset: int, value: bytes, reason: str) -> None:
    body = bytearray(encode(SAMPLE)[:-8])
    body[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=reason) as caught:
        decode(sealed(body))
    assert f"byte {caught.value.offset}: {caught.value.reason}" in str(caught.value)


def test_a_payload_has_room_for_all_elements_and_a_bitmap_and_no_byte_too_many() -> None:
    most = 4 * 1000 + 1000 // 8 + 8
    assert size_fault(Encoding.INDEX32, Dtype.FLOAT32, 1000, most) is None
    assert size_fault(Encoding.INDEX32, Dtype.FLOAT32, 1000, most + 1) is not None


def rows_within(one: Section) -> None:
    indices, values = rows_of(one, SHAPE)
    assert indices.size == values.size
    check_increasing(indices, one.count)


def sparse_within(one: Section) -> None:
    found = sparse_of(one)
    assert found.indices_K.size == found.values_K.size
    check_increasing(found.indices_K, one.count)


def check_increasing(indices: np.ndarray, count: int) -> None:
    if indices.size:
        assert indices[0] >= 0 and indices[-1] < count
        assert (np.diff(indices) > 0).all()


def read_all(one: Frame) -> None:
    """Read all sections with all that may read them; DlrmError and ValueError are answers."""
    for section in one.sections:
        for reader in (array_of, values_of, ternary_of, mean_of):
            with suppress(DlrmError, ValueError):
                assert len(reader(section)) <= section.count
        for check in (rows_within, sparse_within):
            with suppress(DlrmError, ValueError):
                check(section)


def decoded(buffer: bytes | bytearray) -> Frame | None:
    """The frame that the bytes are; anything but FrameError passes through."""
    try:
        return decode(buffer)
    except FrameError as error:
        assert error.offset >= 0
        return None


@given(st.binary(max_size=300))
def test_random_bytes_give_a_frame_or_an_error(body: bytes) -> None:
    for buffer in (body, sealed(body), sealed(b"DLHF\x01\x04" + body)):
        one = decoded(buffer)
        if one is not None:
            read_all(one)


@given(mutated_frames())
def test_a_mutant_is_refused_or_read_as_what_it_says(case: tuple[bytes, bytes, bool]) -> None:
    mutant, original, is_sealed = case
    one = decoded(mutant)
    if one is not None:
        assert is_sealed or mutant == original, "damage was not noticed"
        assert sum(len(section.payload) for section in one.sections) <= len(mutant)
        assert decode(encode(one)) == one
        read_all(one)


def test_genuine_frames_are_read() -> None:
    for original in genuine_frames():
        one = decode(original)
        assert encode(one) == original
        read_all(one)


@given(mutated_frames())
def test_a_mutant_costs_little_memory(case: tuple[bytes, bytes, bool]) -> None:
    mutant, original, _ = case
    read_all(decode(original))  # loading a kernel takes memory of its own

    def read() -> None:
        one = decoded(mutant)
        if one is not None:
            read_all(one)

    assert memory_of(read) < MOST_BYTES + MOST_TIMES * len(mutant)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": -1}, "does not fit its place"),
        ({"sender": 2**32}, "does not fit its place"),
        ({"sections": (Section(2**16, Encoding.DENSE, Dtype.UINT8, 0, b""),)}, "does not fit"),
        (
            {"sections": (Section(4, Encoding.DENSE, Dtype.INT32, 2, b"1234"),)},
            "tensor 4: 2 elements of int32 do not fill 4 bytes",
        ),
        (
            {"sections": (Section(4, Encoding.ROWS, Dtype.UINT8, 2, b"1"),)},
            "tensor 4: ROWS holds floats, not uint8",
        ),
    ],
)
def test_a_frame_that_cannot_be_read_is_not_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(replace(SAMPLE, **changes))


@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(0, 33))
def test_payloads_are_aligned_views(first: int, second: int) -> None:
    buffer = encode(frame(np.ones(first, np.uint8), np.arange(second, dtype=np.float32)))
    array = array_of(decode(buffer).sections[1])
    assert array.ctypes.data % 8 == 0 or second == 0
    assert np.array_equal(array, np.arange(second))
    if second:
        array[0] = 9  # the buffer belongs to whoever received it
        with pytest.raises(FrameError, match="checksum"):
            decode(buffer)
