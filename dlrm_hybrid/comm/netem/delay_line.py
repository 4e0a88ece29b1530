"""Packets on their way: what comes in is due a fixed time later, in the same order. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True, kw_only=True)
class DelayLine:
    """Holds packets for the same time each, of all links together.

    Attributes:
        delay_ns: how long.
        capacity_bytes: what it holds at most; a packet beyond is lost, as in a full router.
        held_bytes: what it holds now.
        lost_packets: how many it had no room for.
    """

    delay_ns: int
    capacity_bytes: int
    held_bytes: int = 0
    lost_packets: int = 0
    _held: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])

    def put(self, packet: bytes, now_ns: int) -> bool:
        """Take a packet in.

        Args:
            packet: not empty.
            now_ns: of a clock that only goes forward.

        Returns:
            Whether there was room.
        """
        held_bytes = self.held_bytes + len(packet)
        if held_bytes > self.capacity_bytes:
            self.lost_packets += 1
            return False
        self.held_bytes = held_bytes
        self._held.append((now_ns + self.delay_ns, packet))
        return True

    def take(self, now_ns: int) -> bytes | None:
        """The next packet that is due; None if none is yet.

        Args:
            now_ns: of the clock of `put`.
        """
        if not self._held or self._held[0][0] > now_ns:
            return None
        _, packet = self._held.popleft()
        self.held_bytes -= len(packet)
        return packet

    def next_ns(self) -> int | None:
        """When the next packet is due; None if the line is empty."""
        return self._held[0][0] if self._held else None
