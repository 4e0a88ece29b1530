"""Sections carried over a boundary and back, as bytes of frames."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Sections
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode

KEY = Key(batch=7, boundary=1, microbatch=2)


def travel(sections: Sections, offset: int) -> Sections:
    """The sections after a journey, so many bytes behind an address that is a multiple of 64."""
    frame = Frame(
        kind=Kind.ACTIVATION,
        sender=0,
        attempt=0,
        number=KEY.batch,
        boundary=KEY.boundary,
        microbatch=KEY.microbatch,
        sections=sections,
    )
    encoded = encode(frame)
    memory = torch.zeros(len(encoded) + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    view = memoryview(memory.numpy())[start : start + len(encoded)]
    view[:] = encoded
    return decode(view.toreadonly()).sections


class RoundTrip(NamedTuple):
    """What both ends see, and the sizes of the payloads."""

    received_BN: Tensor
    returned_BN: Tensor
    forward_bytes: int
    backward_bytes: int


def round_trip(
    codec: ActivationCodec,
    x_BN: Tensor,
    g_BN: Tensor,
    key: Key = KEY,
    offset: int = 4,
    receiver: ActivationCodec | None = None,
) -> RoundTrip:
    """Forward and backward of one micro-batch; both ends have the same codec unless told."""
    receiver = receiver or codec
    forward, at_sender = codec.encode(x_BN, key)
    received_BN, at_receiver = receiver.decode(travel(forward, offset), x_BN.shape, key)
    backward = receiver.encode_gradient(g_BN, at_receiver, key)
    returned_BN = codec.decode_gradient(travel(backward, offset), g_BN.shape, at_sender, key)
    return RoundTrip(received_BN, returned_BN, _bytes(forward), _bytes(backward))


def _bytes(sections: Sections) -> int:
    return sum(len(section.payload) for section in sections)


def gaussian(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
