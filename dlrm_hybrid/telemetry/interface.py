"""What passes a rank's network interface in both directions while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, final

import psutil

from dlrm_hybrid.telemetry.series import Series

WINDOW_SECONDS = 0.1
# In `/proc/net/dev`, after the name of the interface.
RECEIVED_BYTES, SENT_BYTES = 0, 8

Counters = Callable[[], tuple[int, int]]
"""Bytes received and sent until now."""


@final
@dataclass(slots=True)
class InterfaceMeter:
    """Sums over windows of training.

    Several threads may use it.

    Attributes:
        address: of the interface; ranks on one machine may share it.
        rate_bits_per_second: of its link in each direction; None if unknown.
        counters: of the interface.
        clock: in seconds.
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
        """What comes now belongs to training, or does not."""
        if training == self._training:
            return
        with self._lock:
            if training:
                self._last = self._now()
            else:
                self._end_window()
            self._training = training

    def sample(self) -> None:
        """End a window of training and begin the next; at other times nothing is read."""
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
        """Everything until now, as JSON values.

        `busier_bytes` adds up, over the windows, those of the direction that had more of them.
        Points of `series` begin at times since 1970 and hold seconds, then received, sent and
        busier bytes.
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
    """Sample the interface with this address every 100 ms; None on loopback, which has no link.

    Args:
        address: IPv4, of this machine.
        rate_bits_per_second: of the link, if it is known; else what the interface tells.
    """
    name = _interface(address)
    if name is None:
        yield None
        return
    rate = rate_bits_per_second or _told_rate(name)
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
    """Bytes that an interface of this process's network has received and sent.

    `/sys/class/net` may still show another network's.
    """
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        found, _, counters = line.partition(":")
        if found.strip() == name:
            columns = counters.split()
            return int(columns[RECEIVED_BYTES]), int(columns[SENT_BYTES])
    raise OSError(f"/proc/net/dev has no interface {name}")


def _interface(address: str) -> str | None:
    if address.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


def _told_rate(name: str) -> int | None:
    """Of the link, as the interface's driver tells it, which many do not."""
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed * 10**6 if speed > 0 else None
