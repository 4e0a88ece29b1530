"""One message between two ranks: what it is about, and the tensors it carries.

    byte  0        4         5      6          8        12        16
          │ "DLHF" │ version │ kind │ sections │ sender │ attempt │ …
          │ 4 s    │ u8      │ u8   │ u16      │ u32    │ u32     │
         16       24         26      28
        … │ number │ boundary │ round │ microbatch │
          │ u64    │ u16      │ u16   │ u32        │
    from byte 32, for each section
          │ tensor │ encoding │ dtype │ count │ payload bytes │
          │ u16    │ u8       │ u8    │ u32   │ u64           │
    then the payloads in the same order, each filled up with zeros to a multiple of 8 bytes, and
          │ xxh3-64 of all bytes before │
          │ u64                         │

Little endian. A payload starts at a multiple of 8 bytes, so an array can be laid over it. Here only
its size is checked; what lies in it is read by the modules that `wire.section` names.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum

import xxhash

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import (
    ALIGNMENT,
    HEAD_BYTES,
    Section,
    payloads_of,
    read_sections,
    size_fault,
)

MAGIC = b"DLHF"
VERSION = 2

_HEADER = struct.Struct("<4sBBHIIQHHI")
_SECTION = struct.Struct("<HBBIQ")
_CHECKSUM = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame is for, and with it what its number counts.

    Of the training step:
        ACTIVATION, ACTIVATION_GRADIENT, RECEIVED: the batch; RECEIVED confirms an activation.
        PUSH: the pushes of its sender. PARAMETERS: the version that it makes.
        PULL: the pushes of its sender until then; PARAMETERS of that number answer it.
        CONTRIBUTION, RESULT: the push before which trainers reduce something through a server.
        LOOKUP, ROWS, UPDATE: the batch; to predict, the version that tables are of at least.
    Of the run; a question and its answer have the same number:
        DECISION: the orders before it to this worker. REPORT: the orders that its sender has done.
        FETCH, WEIGHTS, SAVE, COPIED: the version that is there at least when it is answered.
        SHARD: the tick of the checkpoint. STATISTICS: the tick of the evaluation.
        LOGITS, STOP_REQUEST, STOP_DECISION: the group of test batches.
        LOWER: the tick from which on learning rates are lower. GOODBYE: the ticks that its sender
        has done.
    Never sent, but made by the channel of a server:
        LEFT: the incarnation of its sender, whose connection has ended, and who may come again.
    """

    HELLO = 1
    ACTIVATION = 2
    ACTIVATION_GRADIENT = 3
    PUSH = 4
    PARAMETERS = 5
    RECEIVED = 6
    CONTRIBUTION = 7
    RESULT = 8
    LOOKUP = 9
    ROWS = 10
    UPDATE = 11
    REPORT = 12
    DECISION = 13
    FETCH = 14
    WEIGHTS = 15
    SAVE = 16
    COPIED = 17
    SHARD = 18
    LOGITS = 20
    STOP_REQUEST = 21
    STOP_DECISION = 22
    GOODBYE = 23
    PULL = 24
    LEFT = 25
    STATISTICS = 26
    LOWER = 27


EVERYTHING, DIFFERENCES = 0, 1
"""`round` of a PULL: it asks for all elements, or for those in which the replica is known to
differ from the weights."""
SAID_GOODBYE = 1
"""`round` of a LEFT whose sender had said goodbye; else 0."""
EVALUATION = 2**16 - 1
"""`microbatch` of a batch of an evaluation, above all that a training step can have."""

_KINDS = {int(kind): kind for kind in Kind if kind is not Kind.LEFT}


class FrameError(DlrmError):
    """Bytes that are no frame.

    Attributes:
        offset: byte at which this shows.
        reason: what is wrong there.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"not a frame: byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message between two ranks: its header and its tensors.

    Attributes:
        kind: what it is for.
        sender: rank it comes from.
        attempt: how often the run has been restarted; frames of another attempt are refused.
        number: what it counts depends on the kind; see `Kind`.
        boundary: between stages `boundary` and `boundary + 1`, 0 where there is none.
        round: of a contribution and its result before their push; of a PULL and its answer
            `EVERYTHING` or `DIFFERENCES`; of a LEFT `SAID_GOODBYE` or 0; else 0.
        microbatch: 0 where there is none; `EVALUATION` outside training.
        sections: the tensors.
        encoded: the bytes, of a frame that is `sealed`; `replace` makes one that is not.
    """

    kind: Kind
    sender: int
    attempt: int
    number: int
    boundary: int = 0
    round: int = 0
    microbatch: int = 0
    sections: tuple[Section, ...] = ()
    encoded: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def is_pass(self) -> bool:
        """Whether it is a PUSH of nothing, with which its sender passes."""
        return self.kind is Kind.PUSH and not self.sections


def encoded_bytes(frame: Frame) -> int:
    """Length of the frame in bytes, once it is encoded."""
    # A plain loop: every frame is measured when it is sent and when it comes.
    total = _HEADER.size + len(frame.sections) * _SECTION.size + _CHECKSUM.size
    for section in frame.sections:
        size = len(section.payload)
        total += size + -size % ALIGNMENT
    return total


def encode(frame: Frame) -> bytes | bytearray:
    """The frame as bytes, in one buffer; copies each payload once, but none of a sealed frame.

    Raises:
        ValueError: a field does not fit its place, or a payload does not have the size of its
            tensor.
    """
    return bytearray().join(_parts(frame)) if frame.encoded is None else frame.encoded


def sealed(frame: Frame) -> Frame:
    """The same frame, encoded now and for all who send it; its sections may change afterwards.

    Raises:
        ValueError: as `encode`.
    """
    copy = replace(frame)
    object.__setattr__(copy, "encoded", b"".join(_parts(frame)))
    return copy


def decode(buffer: bytes | bytearray | memoryview) -> Frame:
    """The frame that `buffer` holds; payloads are views of it, nothing is copied.

    Any bytes give a frame or a `FrameError`.

    Raises:
        FrameError: the bytes are cut, changed, or were never a frame.
    """
    view = memoryview(buffer).cast("B")
    _check_seal(view)
    _, _, kind, num_sections, *numbers = _HEADER.unpack_from(view)
    if kind not in _KINDS:
        raise FrameError(5, f"kind {kind} is unknown")
    end, after_heads = len(view) - _CHECKSUM.size, _HEADER.size + num_sections * HEAD_BYTES
    if after_heads > end:
        raise FrameError(6, f"{num_sections} sections do not fit {len(view)} bytes")
    heads = view[_HEADER.size : after_heads]
    sender, attempt, number, boundary, round_, microbatch = numbers
    return Frame(
        kind=_KINDS[kind],
        sender=sender,
        attempt=attempt,
        number=number,
        boundary=boundary,
        round=round_,
        microbatch=microbatch,
        sections=read_sections(
            view[:end], _HEADER.size, [*_SECTION.iter_unpack(heads)], 2, FrameError
        ),
    )


def _parts(frame: Frame) -> list[bytes | bytearray | memoryview]:
    """The parts of a frame's bytes, in order."""
    parts: list[bytes | bytearray | memoryview] = [_head(frame), *payloads_of(frame.sections)]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    parts.append(_CHECKSUM.pack(checksum.intdigest()))
    return parts


def _head(frame: Frame) -> bytearray:
    head = bytearray(_HEADER.size + len(frame.sections) * _SECTION.size)
    try:
        numbers = (frame.sender, frame.attempt, frame.number)
        parts = (frame.boundary, frame.round, frame.microbatch)
        _HEADER.pack_into(
            head, 0, MAGIC, VERSION, frame.kind, len(frame.sections), *numbers, *parts
        )
        for place, s in enumerate(frame.sections):
            offset = _HEADER.size + place * _SECTION.size
            size = len(s.payload)
            _SECTION.pack_into(head, offset, s.tensor, s.encoding, s.dtype, s.count, size)
            if fault := size_fault(s.encoding, s.dtype, s.count, size):
                raise ValueError(f"tensor {s.tensor}: {fault}")
    except struct.error as error:
        summary = f"{replace(frame, sections=())} with {len(frame.sections)} sections"
        raise ValueError(f"a number of {summary} does not fit its place") from error
    return head


def _check_seal(view: memoryview) -> None:
    smallest = _HEADER.size + _CHECKSUM.size
    if len(view) < smallest:
        raise FrameError(len(view), f"it ends before the {smallest} bytes of an empty frame")
    if view[:4].tobytes() != MAGIC:
        raise FrameError(0, "the magic bytes are others")
    if view[4] != VERSION:
        raise FrameError(4, f"version {view[4]}; this program reads version {VERSION}")
    end = len(view) - _CHECKSUM.size
    if xxhash.xxh3_64_intdigest(view[:end]) != _CHECKSUM.unpack_from(view, end)[0]:
        raise FrameError(end, "the checksum does not fit the bytes before it")
