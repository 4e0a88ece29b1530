"""Frames that a rank handles while it waits for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.parallel.dense.server import Handle
from dlrm_hybrid.wire.frame import Frame, Kind


@final
@dataclass(frozen=True, slots=True)
class Answering:
    """Handler table of a `Mailbox` for the frames that nobody waits for.

    Attributes:
        channel: where answers go.
        handlers: one per frame kind.
    """

    channel: Channel
    handlers: Mapping[Kind, Handle]

    def __call__(self, frame: Frame) -> bool:
        """Handle a frame and send the answers; False if its kind has no handler."""
        handle = self.handlers.get(frame.kind)
        if handle is None:
            return False
        for outgoing in handle(frame):
            self.channel.send(*outgoing)
        return True
