"""Counts and times what goes through a channel."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import final

from typing_extensions import override

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Counters, Traffic
from dlrm_hybrid.wire.frame import Frame, Kind, encoded_bytes
from dlrm_hybrid.wire.section import FLOATS

_TRAFFIC = {
    Kind.ACTIVATION: Traffic.ACTIVATION,
    Kind.ACTIVATION_GRADIENT: Traffic.ACTIVATION_GRADIENT,
    Kind.PUSH: Traffic.GRADIENT_PUSH,
    Kind.PULL: Traffic.PARAMETER_PULL,
    Kind.PARAMETERS: Traffic.PARAMETER_PULL,
    # What trainers reduce before a push is part of its cost, both ways.
    Kind.CONTRIBUTION: Traffic.GRADIENT_PUSH,
    Kind.RESULT: Traffic.GRADIENT_PUSH,
    Kind.LOOKUP: Traffic.EMBEDDING,
    Kind.ROWS: Traffic.EMBEDDING,
    Kind.UPDATE: Traffic.EMBEDDING,
}


def traffic_of(kind: Kind) -> Traffic:
    """The traffic class in which frames of this kind are counted."""
    return _TRAFFIC.get(kind, Traffic.CONTROL)


@final
class MeteredChannel(Channel):
    """A channel that counts whole frames, without the overhead of TCP and ZeroMQ below.

    Any number of threads may send.

    Args:
        inner: the channel that does the work.
        counters: those of what is sent and received.
        clock: measures sending, and waiting by the kind of frame.

    Attributes:
        counters: to be replaced when the phase changes.
        watch: called with each frame received and its dense equivalent in bytes, or None.
    """

    def __init__(self, inner: Channel, counters: Counters, clock: SpanClock) -> None:
        self.counters = counters
        self.watch: Callable[[Frame, int], None] | None = None
        self._inner = inner
        self._turn = Lock()
        self._sending = clock.within(Span.SEND)
        self._arrival = clock.arrival()

    @property
    @override
    def rank(self) -> int:
        return self._inner.rank

    @override
    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        with self._sending, self._turn:
            self._inner.send(to, frame, dense_equivalent_bytes)
            sent = self.counters.sent
            sent.add(traffic_of(frame.kind), encoded_bytes(frame), dense_equivalent_bytes)

    @override
    def receive(self, deadline_seconds: float) -> Frame:
        with self._arrival:
            frame = self._inner.receive(deadline_seconds)
            self._arrival.of(frame.kind.name.lower())
        if frame.kind is Kind.LEFT:
            return frame  # made by the channel itself
        dense_bytes = 0
        # What trainers reduce before they push is sent on top of their gradients.
        if frame.kind not in (Kind.CONTRIBUTION, Kind.RESULT):
            for section in frame.sections:
                if section.dtype in FLOATS:
                    dense_bytes += 4 * section.count
        received = self.counters.received
        received.add(traffic_of(frame.kind), encoded_bytes(frame), dense_bytes)
        if self.watch is not None:
            self.watch(frame, dense_bytes)
        return frame

    @override
    def close(self) -> None:
        self._inner.close()

    @override
    def abandon(self) -> None:
        self._inner.abandon()
