"""The sections of an update as bytes that say by themselves what they hold: no rank, no run.

    byte  0        4         5        8          12
          │ "DLHP" │ version │ 0      │ sections │ fingerprint │
          │ 4 s    │ u8      │ 3 u8   │ u32      │ u32         │
    from byte 16, for each section
          │ encoding │ dtype │ 0   │ count │ payload bytes │
          │ u8       │ u8    │ u16 │ u32   │ u64           │
    then the payloads in the same order, each filled up with zeros to a multiple of 8 bytes, and
          │ crc32 of all bytes before │
          │ u32                       │

Little endian. Section i is that of tensor i. The fingerprint is the sender's: of the names and
shapes of its tensors. Only the sizes of payloads are checked here; `wire.section` names the modules
that read what lies in them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import HEAD_BYTES, Section, payloads_of, read_sections

MAGIC = b"DLHP"
VERSION = 1

_HEADER = struct.Struct("<4sB3xII")
_SECTION = struct.Struct("<BB2xIQ")
_CHECKSUM = struct.Struct("<I")


class PacketError(DlrmError):
    """Bytes that are no packet.

    Attributes:
        offset: byte at which this shows.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"not a packet: byte {offset}: {reason}")
        self.offset = offset


class Packet(NamedTuple):
    """What a packet of compressed tensors holds.

    Attributes:
        fingerprint: of the sender's tensors.
        sections: one for each of them; payloads view the bytes.
    """

    fingerprint: int
    sections: tuple[Section, ...]


def encode_packet(fingerprint: int, sections: Sequence[Section]) -> bytes:
    """The bytes of sections, whatever the numbers of their tensors."""
    parts: list[bytes | memoryview] = [_HEADER.pack(MAGIC, VERSION, len(sections), fingerprint)]
    parts += [_SECTION.pack(s[1], s[2], s[3], len(s[4])) for s in sections]
    body = b"".join(parts + payloads_of(sections))
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_packet(buffer: bytes | bytearray | memoryview) -> Packet:
    """The packet that `buffer` holds; any bytes give a packet or an error.

    Raises:
        PacketError: the bytes are cut, changed, or were never a packet.
    """
    view = memoryview(buffer).cast("B")
    end = len(view) - _CHECKSUM.size
    if end < _HEADER.size:
        raise PacketError(len(view), "it ends before its header does")
    magic, version, count, fingerprint = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise PacketError(0, "the magic bytes are others")
    if version != VERSION:
        raise PacketError(4, f"version {version}; this program reads version {VERSION}")
    if zlib.crc32(view[:end]) != _CHECKSUM.unpack_from(view, end)[0]:
        raise PacketError(end, "the checksum does not fit the bytes before it")
    after_heads = _HEADER.size + count * HEAD_BYTES
    if after_heads > end:
        raise PacketError(8, f"{count} sections do not fit {end} bytes")
    heads = enumerate(_SECTION.iter_unpack(view[_HEADER.size : after_heads]))
    numbered = [(tensor, *head) for tensor, head in heads]
    return Packet(fingerprint, read_sections(view[:end], _HEADER.size, numbered, 0, PacketError))
