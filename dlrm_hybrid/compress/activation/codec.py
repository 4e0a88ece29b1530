"""What travels over a boundary between two stages, as sections of a frame.

    sender                                        receiver
    encode           ──── activations ────▶       decode
    decode_gradient  ◀─── their gradients ────    encode_gradient

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.report import BoundaryReport
from dlrm_hybrid.wire.section import Section

Sections = tuple[Section, ...]
Saved = Any
"""What a codec keeps from forward to backward; nobody else looks into it."""


@dataclass(frozen=True, slots=True)
class Key:
    """Which activations these are."""

    batch: int
    boundary: int
    microbatch: int

    def __str__(self) -> str:
        return f"batch {self.batch}, boundary {self.boundary}, micro-batch {self.microbatch}"


class ActivationCodec(Protocol):
    """Both ends of a boundary; all tensors are float32 (B, N), detached and contiguous.

    What `decode` and `decode_gradient` return is memory allocated by torch, never a view of the
    payload: MKL rounds products differently where an operand lies at an address that is no
    multiple of 16, and a payload may lie anywhere.
    """

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """Sender, forward; the sections may view x_BN."""
        ...

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """Receiver, forward; raises DlrmError if the sections do not make that shape."""
        ...

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """Receiver, backward; `saved` is from its own `decode`, the sections may view g_BN."""
        ...

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """Sender, backward; `saved` is from its own `encode`; raises as `decode`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that lasts from step to step, for checkpoints; empty where nothing does."""
        ...

    def report(self) -> dict[int, BoundaryReport]:
        """Per boundary what was sent since the last call; empty where nothing is left out."""
        ...
