"""Genuine sections and frames of every encoding, and strategies that damage or forge them."""

import functools
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import xxhash
from hypothesis import strategies as st

from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind, encode
from dlrm_hybrid.wire.section import FLOATS, Encoding, Section
from dlrm_hybrid.wire.sparse import rows, sparse
from dlrm_hybrid.wire.ternary import levels, ternary

SHAPE = (12, 20)
COUNT = SHAPE[0] * SHAPE[1]
# Of memory that one message may take: five elements of float32 lie in a byte at most, and what is
# read is copied once; the rest is objects of Python and the text of an error.
MOST_TIMES, MOST_BYTES = 40, 1 << 16


def sealed(body: bytes | bytearray) -> bytes:
    """Bytes with a checksum that fits: what a forger would send."""
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))


@functools.cache
def sparse_sections() -> list[Section]:
    """Sections that choose elements, of every encoding and type, empty, few and many."""
    rng = np.random.default_rng(0)
    found: list[Section] = []
    for dtype in sorted(FLOATS):
        for chance in (0.0, 0.01, 0.05, 0.5, 0.9):
            chosen = np.flatnonzero(rng.random(COUNT) < chance).astype(np.int32)
            values = rng.random(chosen.size).astype(np.float32)
            found.append(sparse(3, COUNT, chosen, values, dtype))
            found += [rows(4, SHAPE, chosen, values, dtype, rice) for rice in (False, True)]
    return found


def genuine_sections() -> list[Section]:
    """Sections of all encodings and element types."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, COUNT).astype(np.uint8)
    return [
        dense(0, rng.random(COUNT).astype(np.float32)),
        dense(1, np.arange(9, dtype=np.int64)),
        dense(2, np.zeros(0, np.uint8)),
        *sparse_sections(),
        *(ternary(5, codes, encoding, 2.0) for encoding in (Encoding.TERNARY, Encoding.TRITS)),
        levels(6, (codes.astype(np.float32) - 1) / np.float32(2), 1.0, 2),
    ]


@functools.cache
def genuine_frames() -> list[bytes]:
    """Frames of one section each, of none, of some and of all."""
    found = genuine_sections()
    some = [[], *([one] for one in found), found[:8], found]
    return [bytes(encode(_frame(*sections))) for sections in some]


def _frame(*sections: Section) -> Frame:
    return Frame(kind=Kind.PUSH, sender=1, attempt=0, number=7, sections=sections)


@st.composite
def changed(draw: st.DrawFn, original: bytes) -> bytes:
    """The bytes with some turned, overwritten, cut, taken out, put in or repeated."""
    body = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        # Half of the changes hit the head, which decides about the rest.
        at = draw(st.integers(0, len(body)) | st.integers(0, min(64, len(body))))
        match draw(st.integers(0, 7)):
            case 0:
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                body[at : at + 1] = bytes(one ^ 1 << at % 8 for one in body[at : at + 1])
            case 2:
                body[at : at + draw(st.integers(1, 8))] = b"\xff" * 8
            case 3:
                number = draw(st.integers(0, 2**32 - 1) | st.integers(0, 2**12))
                body[at - at % 4 : at - at % 4 + 4] = struct.pack("<I", number)
            case 4:
                del body[at:]
            case 5:
                del body[at : at + draw(st.integers(1, 32))]
            case 6:
                body[at:at] = draw(st.binary(min_size=1, max_size=32))
            case _:
                body += body[at : at + 64]
    return bytes(body)


@st.composite
def mutated_frames(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """A mutant, its original, and whether the mutant has a checksum that fits it.

    The others keep that of the original, as damage on the way would.
    """
    original = draw(st.sampled_from(genuine_frames()))
    if draw(st.booleans()):
        return sealed(draw(changed(original[:-8]))), original, True
    return draw(changed(original)), original, False


def memory_of(call: Callable[[], object]) -> int:
    """The most bytes that a call takes at once, beyond what was there before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
