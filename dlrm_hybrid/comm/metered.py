"""Counts what goes through a channel."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.telemetry.traffic import Counters, Traffic
from dlrm_hybrid.wire.frame import Frame, Kind, encoded_bytes
from dlrm_hybrid.wire.section import FLOATS

_TRAFFIC = {
    Kind.HELLO: Traffic.CONTROL,
    Kind.ACTIVATION: Traffic.ACTIVATION,
    Kind.ACTIVATION_GRADIENT: Traffic.ACTIVATION_GRADIENT,
    Kind.PUSH: Traffic.GRADIENT_PUSH,
    Kind.PARAMETERS: Traffic.PARAMETER_PULL,
    Kind.CONTROL: Traffic.CONTROL,
    # What trainers agree on before they push is a part of what pushes cost, both ways.
    Kind.PROPOSAL: Traffic.GRADIENT_PUSH,
    Kind.AGREEMENT: Traffic.GRADIENT_PUSH,
}


def traffic_of(kind: Kind) -> Traffic:
    """The class in which frames of this kind are counted."""
    return _TRAFFIC[kind]


@dataclass(slots=True)
class MeteredChannel:
    """A channel that counts whole frames: what is below them, TCP and ZeroMQ, is not counted.

    Attributes:
        inner: the channel that does the work.
        counters: get what is sent and received; put others in their place when the phase changes.
    """

    inner: Channel
    counters: Counters

    @property
    def rank(self) -> int:
        """See `Channel`."""
        return self.inner.rank

    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        """See `Channel`."""
        self.inner.send(to, frame, dense_equivalent_bytes)
        sent = self.counters.sent
        sent.add(traffic_of(frame.kind), encoded_bytes(frame), dense_equivalent_bytes)

    def receive(self, deadline_seconds: float) -> Frame:
        """See `Channel`."""
        frame = self.inner.receive(deadline_seconds)
        dense_bytes = 0
        # What trainers say to agree is sent on top of their gradients.
        if frame.kind not in (Kind.PROPOSAL, Kind.AGREEMENT):
            dense_bytes = 4 * sum(one.count for one in frame.sections if one.dtype in FLOATS)
        received = self.counters.received
        received.add(traffic_of(frame.kind), encoded_bytes(frame), dense_bytes)
        return frame

    def close(self) -> None:
        """See `Channel`."""
        self.inner.close()

    def abandon(self) -> None:
        """See `Channel`."""
        self.inner.abandon()
