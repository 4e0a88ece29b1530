"""Packets: compressed gradients as bytes, for trainers with a transport of their own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import final

import torch

from dlrm_hybrid.compress.library.parameters import Gradients, is_plain, tensors_of
from dlrm_hybrid.compress.update import decode as decode_sections
from dlrm_hybrid.wire.packet import decode_packet
from dlrm_hybrid.wire.section import FLOATS, Encoding
from dlrm_hybrid.wire.sparse import Destination, Elements


@final
class Decoded:
    """A decoded packet: values for some or all elements of a list of tensors.

    Args:
        packet: from `ParameterCompressor.encode`.

    Raises:
        DlrmError: it is not a packet, or damaged.

    Attributes:
        num_bytes: size of the packet.
        counts: number of elements of each tensor.
        fingerprint: of the names and shapes of the sender's tensors.
    """

    def __init__(self, packet: bytes | bytearray | memoryview) -> None:
        decoded = decode_packet(packet)
        for section in decoded.sections:
            if section.encoding is Encoding.CODED or section.dtype not in FLOATS:
                raise section.error("it holds no values of one tensor")
        self._update = decode_sections(decoded.sections, "packet")
        self.num_bytes = len(packet)
        self.counts = [section.count for section in decoded.sections]
        self.fingerprint = decoded.fingerprint

    @property
    def density(self) -> float:
        """Fraction of all elements that have a value; 1 if there are no elements."""
        total = sum(self.counts)
        if not isinstance(self._update, Elements) or not total:
            return 1.0
        return self._update.values_K.size / total

    def add_to(self, gradients: Gradients) -> None:
        """Add all values to tensors, in place.

        Args:
            gradients: tensors like the sender's parameters, in the same order; by name or as a
                list, of any dtype and device.

        Raises:
            ValueError: they do not match the sender's parameters; names the first that differs.
        """
        tensors = tensors_of(gradients)
        if isinstance(gradients, Mapping):
            names = [(name, tuple(tensor.shape)) for name, tensor in gradients.items()]
            if fingerprint_of(names) != self.fingerprint:
                raise ValueError("the packet is of parameters of other names, shapes or order")
        if len(tensors) != len(self.counts):
            raise ValueError(f"{len(tensors)} gradients, and {len(self.counts)} in the packet")
        for index, (tensor, count) in enumerate(zip(tensors, self.counts, strict=True)):
            if tensor.numel() != count:
                raise ValueError(
                    f"gradient {index} has {tensor.numel()} elements, {count} in the packet"
                )
        staged = [
            t if is_plain(t) else torch.zeros(t.shape, dtype=torch.float32, device="cpu")
            for t in tensors
        ]
        self._update.add_to(Destination([t.detach().numpy().reshape(-1) for t in staged]))
        for tensor, copy in zip(tensors, staged, strict=True):
            if copy is not tensor:
                tensor.detach().add_(copy.to(tensor.device, tensor.dtype))


def decode(packet: bytes | bytearray | memoryview) -> Decoded:
    """Decode a packet of any method.

    Args:
        packet: from `ParameterCompressor.encode`, or any bytes.

    Raises:
        DlrmError: it is not a packet, or damaged.
    """
    return Decoded(packet)


def fingerprint_of(named: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """A 32-bit checksum of names and shapes, in this order."""
    return zlib.crc32(repr([(name, tuple(map(int, shape))) for name, shape in named]).encode())
