"""Mutated frames: each is refused, or read as the message it is, within a bound of memory.

Half of the mutants keep the checksum of the original, as damage on the way would; the others get
one that fits, as from somebody who forges. Whoever is no rank of a run is refused in any case.
"""

from __future__ import annotations

import secrets
import struct
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from fuzz_told import Told, WrongError, require
from numpy.typing import NDArray

from dlrm_hybrid.comm.zmq.roster import ForeignError, Peer, Roster
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Frame, FrameError, Kind, decode, encode
from dlrm_hybrid.wire.levels import levels, mean_of
from dlrm_hybrid.wire.section import FLOATS, Encoding, Section
from dlrm_hybrid.wire.sparse import rows, rows_of, sparse, sparse_of
from dlrm_hybrid.wire.ternary import ternary, ternary_of
from dlrm_hybrid.wire.values import values_of

SHAPE = (12, 20)
COUNT = SHAPE[0] * SHAPE[1]
# Of memory that one message may take: five elements of float32 lie in a byte at most, and what is
# read is copied once; the rest is objects of Python and the text of an error.
MOST_TIMES, LIMIT_BYTES = 40, 1 << 16
WORDS = (b"HELLO", b"GOODBYE", b"TAKEN", b"", b"HOWDY")


def fuzz(times: int, seed: int) -> Told:
    """Read so many mutants.

    Args:
        times: how many.
        seed: of what is done to them.
    """
    draw, told = np.random.default_rng(seed), Told()
    originals = [bytes(encode(one)) for one in genuine()]
    roster = Roster(0, 0, secrets.token_hex(16), {1: Peer(1), 2: Peer(2)})
    for original in originals:  # loading a kernel takes memory of its own
        _read(decode(original))
    most_bytes = 0
    tracemalloc.start()
    try:
        for number in range(times):
            original = originals[number % len(originals)]
            sealed = bool(draw.random() < 0.5)
            mutant = mutated(draw, original, sealed)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                told.accepted += _check(mutant, original, sealed, roster, draw)
            except Exception as error:
                told.faults.append(f"{type(error).__name__}: {error}: {mutant.hex()}")
            taken = tracemalloc.get_traced_memory()[1] - before
            most_bytes = max(most_bytes, taken)
            if taken > LIMIT_BYTES + MOST_TIMES * len(mutant):
                told.faults.append(f"{taken:,} bytes of memory for {mutant.hex()}")
            told.tried += 1
    finally:
        tracemalloc.stop()
    told.remark = f"{most_bytes / 1e3:.0f} kB for a frame of up to {_longest(originals):.0f} kB"
    return told


def _longest(frames: Sequence[bytes]) -> float:
    return max(len(one) for one in frames) / 1e3


def genuine() -> list[Frame]:
    """Frames of all encodings and element types."""
    draw = np.random.default_rng(0)
    few = np.flatnonzero(draw.random(COUNT) < 0.05).astype(np.int32)
    many = np.flatnonzero(draw.random(COUNT) < 0.5).astype(np.int32)
    sections: list[Section] = [
        dense(0, draw.random(COUNT).astype(np.float32)),
        dense(1, np.arange(9, dtype=np.int64)),
        dense(2, np.zeros(0, np.uint8)),
    ]
    for dtype in sorted(FLOATS):
        for chosen in (few, many):
            values = draw.random(chosen.size).astype(np.float32)
            sections.append(sparse(3, COUNT, chosen, values, dtype))
            sections += [rows(4, SHAPE, chosen, values, dtype, rice) for rice in (False, True)]
    signs: NDArray[np.float32] = draw.integers(-2, 3, COUNT).astype(np.float32)
    for encoding in (Encoding.TERNARY, Encoding.TRITS):
        sections.append(ternary(5, signs, encoding, limit=2.0, scale=2.0, key=3))
    sections.append(levels(6, signs / np.float32(2), 1.0, 2))
    frames = [_frame((one,)) for one in sections]
    return [*frames, _frame(()), _frame(tuple(sections[:8])), _frame(tuple(sections))]


def _frame(sections: tuple[Section, ...]) -> Frame:
    numbers: Mapping[str, Any] = {"attempt": 0, "step": 7, "boundary": 0, "microbatch": 0}
    return Frame(kind=Kind.PUSH, sender=1, sections=sections, **numbers)


def mutated(draw: np.random.Generator, original: bytes, sealed: bool) -> bytes:
    """The frame with bytes changed, cut, put in or repeated; a fitting checksum if it is sealed."""
    body = bytearray(original[:-8] if sealed else original)
    for _ in range(int(draw.integers(1, 5))):
        # Half of the changes hit the head.
        most = len(body) if draw.random() < 0.5 else min(64, len(body))
        at = int(draw.integers(0, max(1, most)))
        _CHANGES[int(draw.integers(0, len(_CHANGES)))](draw, body, at)
    if sealed:
        body += struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    return bytes(body)


_Change = Callable[[np.random.Generator, bytearray, int], None]


def _overwrite(draw: np.random.Generator, body: bytearray, at: int) -> None:
    body[at : at + 1] = draw.bytes(1)


def _turn_bit(draw: np.random.Generator, body: bytearray, at: int) -> None:
    if at < len(body):
        body[at] ^= 1 << int(draw.integers(0, 8))


def _fill(draw: np.random.Generator, body: bytearray, at: int) -> None:
    body[at : at + int(draw.integers(1, 9))] = b"\xff" * 8


def _number(draw: np.random.Generator, body: bytearray, at: int) -> None:
    at -= at % 4
    body[at : at + 4] = struct.pack("<I", int(2.0 ** draw.uniform(0, 32)))


def _cut(draw: np.random.Generator, body: bytearray, at: int) -> None:
    del body[at:]


def _take_out(draw: np.random.Generator, body: bytearray, at: int) -> None:
    del body[at : at + int(draw.integers(1, 33))]


def _put_in(draw: np.random.Generator, body: bytearray, at: int) -> None:
    body[at:at] = draw.bytes(int(draw.integers(1, 33)))


def _repeat(draw: np.random.Generator, body: bytearray, at: int) -> None:
    body += body[at : at + 64]


_CHANGES: tuple[_Change, ...] = (
    *(_overwrite, _turn_bit, _fill, _number, _cut, _take_out, _put_in, _repeat),
)


def _check(
    mutant: bytes, original: bytes, sealed: bool, roster: Roster, draw: np.random.Generator
) -> bool:
    """Whether it is read; WrongError if it should not have been, or is read as another."""
    word = WORDS[int(draw.integers(0, len(WORDS)))]
    parts = [mutant] if draw.random() < 0.5 else [word, mutant]
    try:
        roster.read(draw.bytes(5), parts)
    except ForeignError:
        pass
    else:
        raise WrongError("a stranger came in")
    try:
        frame = decode(mutant)
    except FrameError as error:
        require(0 <= error.offset <= max(len(mutant), len(original)), "an offset outside")
        return False
    require(sealed or mutant == original, "damage was not noticed")
    require(decode(encode(frame)) == frame, "it is read as another message")
    _read(frame)
    return True


def _read(frame: Frame) -> None:
    """Read all sections with all that may read them; DlrmError and ValueError are answers."""
    for one in frame.sections:
        for reader in _READERS:
            try:
                found = reader(one)
            except (DlrmError, ValueError):
                continue
            require(len(found) <= one.count, "more elements than there are")


def _rows(one: Section) -> Any:
    indices, values = rows_of(one, SHAPE)
    require(indices.size == values.size, "not as many values as indices")
    return _rising(indices, one)


def _sparse(one: Section) -> Any:
    found = sparse_of(one)
    require(found.indices_K.size == found.values_K.size, "not as many values as indices")
    return _rising(found.indices_K, one)


def _rising(indices: Any, one: Section) -> Any:
    if indices.size:
        require(indices[0] >= 0 and indices[-1] < one.count, "an index outside")
        require(bool((np.diff(indices) > 0).all()), "indices do not rise")
    return indices


_READERS: tuple[Callable[[Section], Any], ...] = (
    *(array_of, values_of, ternary_of, mean_of, _sparse, _rows),
)
