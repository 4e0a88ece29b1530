"""A channel between the ranks of one process, which carries the same bytes as any other."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import final

from typing_extensions import override

from dlrm_hybrid.comm.channel import Channel, check_outgoing
from dlrm_hybrid.types import DeadlineError, PeerLostError
from dlrm_hybrid.wire.frame import Frame, decode, encode


@dataclass(frozen=True, slots=True)
class _Lost:
    """Marks in a queue that a rank left without a goodbye."""

    rank: int


_Queue = queue.SimpleQueue[bytes | bytearray | _Lost]


@final
@dataclass(frozen=True, slots=True)
class InProcessChannel(Channel):
    """One rank's channel; ranks may be threads or alternate in one.

    Frames are in the receiver's queue as soon as they are sent, so `close` has nothing to wait for.
    """

    _rank: int
    _queues: tuple[_Queue, ...] = field(repr=False)

    @property
    @override
    def rank(self) -> int:
        return self._rank

    @override
    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        check_outgoing(self.rank, len(self._queues), to, frame)
        self._queues[to].put(encode(frame))

    @override
    def receive(self, deadline_seconds: float) -> Frame:
        try:
            if deadline_seconds > 0:
                item = self._queues[self.rank].get(timeout=deadline_seconds)
            else:
                item = self._queues[self.rank].get_nowait()
        except queue.Empty:
            raise DeadlineError(
                f"rank {self.rank}: no frame came within {deadline_seconds:g} s"
            ) from None
        if isinstance(item, _Lost):
            raise PeerLostError(item.rank, "it was abandoned")
        return decode(item)

    @override
    def close(self) -> None:
        pass

    @override
    def abandon(self) -> None:
        for rank, inbox in enumerate(self._queues):
            if rank != self.rank:
                inbox.put(_Lost(self.rank))


def in_process_channels(world_size: int) -> tuple[InProcessChannel, ...]:
    """The channels of all ranks, in order."""
    queues = tuple(_Queue() for _ in range(world_size))
    return tuple(InProcessChannel(rank, queues) for rank in range(world_size))
