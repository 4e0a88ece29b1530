"""A frame with its address, and what sends such."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dlrm_hybrid.wire.frame import Frame

Send = Callable[[int, Frame, int], None]
"""(to, frame, dense_equivalent_bytes); encodes the frame before it returns, never waits."""


class Outgoing(NamedTuple):
    """What `Channel.send` takes.

    Attributes:
        to: rank.
        frame: may show memory that changes with the next step: send it before.
        dense_equivalent_bytes: what its tensors would take as whole float32 tensors.
    """

    to: int
    frame: Frame
    dense_equivalent_bytes: int
