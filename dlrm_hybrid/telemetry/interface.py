"""Measures the bytes through a rank's network interface, in both directions, while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any, final

import psutil

WINDOW_SECONDS = 0.1
MOST_POINTS = 512

Counters = Callable[[], tuple[int, int]]
"""Returns the bytes received and sent until now."""


@final
@dataclass(slots=True)
class Series:
    """A time series of bounded size: points become twice as long whenever there are too many.

    Attributes:
        point_seconds: least length of a point.
        points: start, length and amounts of each point.
    """

    point_seconds: float = 0.1
    points: list[list[float]] = field(default_factory=list[list[float]])

    def add(self, start_seconds: float, seconds: float, *amounts: float) -> None:
        """Add a window after the others; there may be a gap between them."""
        window = [start_seconds, seconds, *amounts]
        if self.points and self.points[-1][1] < 0.99 * self.point_seconds:
            _join(self.points[-1], window)
            return
        self.points.append(window)
        if len(self.points) > MOST_POINTS:
            self.point_seconds *= 2
            halved = self.points[::2]
            for point, other in zip(halved, self.points[1::2], strict=False):
                _join(point, other)
            self.points = halved

    def since(self, offset_seconds: float) -> list[list[float]]:
        """The points with an offset added to their starts."""
        return [[start + offset_seconds, *rest] for start, *rest in self.points]


def _join(point: list[float], other: list[float]) -> None:
    for column in range(1, len(point)):
        point[column] += other[column]


@final
@dataclass(slots=True)
class InterfaceMeter:
    """Adds up the bytes of an interface over windows of training; thread-safe.

    Attributes:
        address: address of the interface; ranks on one machine may share it.
        rate_bits_per_second: rate of its link in each direction; None if unknown.
        counters: reads the byte counters of the interface.
    """

    address: str
    rate_bits_per_second: int | None
    counters: Counters
    clock: Callable[[], float] = time.monotonic
    _training: bool = False
    _last: tuple[float, int, int] = (0.0, 0, 0)
    _seconds: float = 0.0
    _received_bytes: int = 0
    _sent_bytes: int = 0
    _busier_bytes: int = 0
    _series: Series = field(default_factory=Series)
    _lock: Lock = field(default_factory=Lock)

    def switch(self, training: bool) -> None:
        """Begin or end a period of training."""
        if training == self._training:
            return
        with self._lock:
            if training:
                self._last = self._now()
            else:
                self._end_window()
            self._training = training

    def sample(self) -> None:
        """End a window and begin the next; outside training nothing is read."""
        with self._lock:
            if self._training:
                self._end_window()

    def _end_window(self) -> None:
        (before, received_before, sent_before), self._last = self._last, self._now()
        now, received_bytes, sent_bytes = self._last
        received_bytes -= received_before
        sent_bytes -= sent_before
        self._seconds += now - before
        self._received_bytes += received_bytes
        self._sent_bytes += sent_bytes
        busier_bytes = max(received_bytes, sent_bytes)
        self._busier_bytes += busier_bytes
        self._series.add(before, now - before, received_bytes, sent_bytes, busier_bytes)

    def _now(self) -> tuple[float, int, int]:
        return self.clock(), *self.counters()

    def values(self) -> dict[str, Any]:
        """All sums until now, as JSON values.

        `busier_bytes` adds up the bytes of each window's busier direction. A point of `series` is
        its start since 1970, its seconds, and received, sent and busier bytes.
        """
        since_1970 = time.time() - self.clock()
        self.sample()
        return {
            "address": self.address,
            "rate_bits_per_second": self.rate_bits_per_second,
            "seconds": self._seconds,
            "received_bytes": self._received_bytes,
            "sent_bytes": self._sent_bytes,
            "busier_bytes": self._busier_bytes,
            "series": self._series.since(since_1970),
        }


@contextmanager
def sampled(
    address: str, rate_bits_per_second: int | None
) -> Generator[InterfaceMeter | None, None, None]:
    """Sample the interface with this address every 100 ms; yields None on loopback.

    Args:
        address: an IPv4 address of this machine.
        rate_bits_per_second: rate of the link; None asks the driver.
    """
    name = _interface(address)
    if name is None:
        yield None
        return
    stats = psutil.net_if_stats().get(name)  # many drivers report no speed
    rate = rate_bits_per_second or (stats.speed * 10**6 if stats else 0) or None
    meter = InterfaceMeter(address, rate, lambda: read_counters(name))
    ended = Event()

    def run() -> None:
        while not ended.wait(WINDOW_SECONDS):
            meter.sample()

    thread = Thread(target=run, name="interface", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        ended.set()
        thread.join()


def read_counters(name: str) -> tuple[int, int]:
    """Bytes received and sent by an interface in this process's network namespace."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
    if counters is None:
        raise OSError(f"/proc/net/dev has no interface {name}")
    return counters.bytes_recv, counters.bytes_sent


def _interface(address: str) -> str | None:
    if address.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
