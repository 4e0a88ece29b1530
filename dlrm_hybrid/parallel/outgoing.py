"""A frame with its address."""

from __future__ import annotations

from typing import NamedTuple

from dlrm_hybrid.wire.frame import Frame


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
