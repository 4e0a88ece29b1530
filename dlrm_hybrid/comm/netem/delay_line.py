"""A delay line: each packet is due a fixed time after it came, in the same order. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True, kw_only=True)
class DelayLine:
    """Delays the packets of all links by the same time.

    Attributes:
        delay_ns: the delay.
        capacity_bytes: most bytes held; a packet beyond is lost, as in a full router.
        held_bytes: bytes held now.
        lost_packets: number of packets without room.
    """

    delay_ns: int
    capacity_bytes: int
    held_bytes: int = 0
    lost_packets: int = 0
    _held: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])

    def put(self, packet: bytes, now_ns: int) -> bool:
        """Add a packet; False if it is lost.

        Args:
            packet: not empty.
            now_ns: time of a monotonic clock.

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
        """Remove the next packet that is due; None if none is.

        Args:
            now_ns: time of the same clock as for `put`.
        """
        if not self._held or self._held[0][0] > now_ns:
            return None
        _, packet = self._held.popleft()
        self.held_bytes -= len(packet)
        return packet

    def next_ns(self) -> int | None:
        """Time at which the next packet is due; None if the line is empty."""
        return self._held[0][0] if self._held else None
