"""The plan of an emulated network: its addresses, and the lines for `ip` and `tc`. Pure.

    host 0   eth0 ════ port0 ┐
    host 1   eth0 ════ port1 ┼ bridge0   hub
    host 2   eth0 ════ port2 ┘

Each host and the hub are network namespaces, each ════ is a veth pair. A token bucket on eth0
shapes what a host sends, one on its port what it receives.

A bucket that holds 0.4 ms of the line's rate is as small as the kernel's timer can fill. A
larger one lets small messages pass at once: 92 % of 51 kB at 100 Mbit/s, if it holds 256 kB.

Latency is netem's, below the bucket of eth0. In a kernel without netem a relay in user space
takes the place of the bridge and delays each packet: what a host sends is shaped, then delayed,
then shaped again on the receiver's port.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network
from typing import final

from dlrm_hybrid.bounds import PATTERNS, RATE_PATTERN, TIME_PATTERN

LEAST_BITS_PER_SECOND = 10**6
MOST_BITS_PER_SECOND = 10**11
MOST_SECONDS = 10

_QUANTITY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-z]+)")
_BITS_PER_SECOND = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": Fraction(1)}
# Reserved for benchmarks of network devices (RFC 2544): no real link has such an address.
NETWORK = IPv4Network("198.18.0.0/16")
INTERFACE = "eth0"


def bits_per_second(text: str) -> int:
    """Parse a rate such as `100mbit` or `2.5gbit`.

    Raises:
        ValueError: it is not a rate, below 1mbit or above 100gbit.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _BITS_PER_SECOND:
        raise ValueError(PATTERNS[RATE_PATTERN])
    rate = Fraction(match[1]) * _BITS_PER_SECOND[match[2]]
    if not LEAST_BITS_PER_SECOND <= rate <= MOST_BITS_PER_SECOND:
        raise ValueError("must be a rate from 1mbit to 100gbit")
    return int(rate)


def seconds(text: str) -> float:
    """Parse a time such as `5ms`, `250us` or `1s`.

    Raises:
        ValueError: it is not a time, or above 10 s.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _SECONDS:
        raise ValueError(PATTERNS[TIME_PATTERN])
    time = Fraction(match[1]) * _SECONDS[match[2]]
    if time > MOST_SECONDS:
        raise ValueError("must be a time from 0ms to 10s")
    return float(time)


BURST_SECONDS = 4e-4
LEAST_BURST_BYTES = 3_200  # two frames
QUEUE_SECONDS = 0.1
LEAST_QUEUE_BYTES = 1_000_000  # enough for several senders on a slow link too
DELAYED_PACKETS = 1_000_000
MOST_DELAYED_BYTES = 10**9
RELAY_BITS_PER_SECOND = 10**9  # of all links together; measured on a core of a virtual machine
# A relay's cost is per packet. Pieces that the buckets let pass whole reach it whole; at 1 Gbit/s
# pieces of 48 kB reach 10 % less than those of 16 kB.
RELAYED_BYTES = 16_000
ECHO_BURSTS = 10
LEAST_ECHO_BYTES = 50_000
LEAST_ECHO_SHARE = 0.9


class Method(StrEnum):
    """Means of delaying packets: the kernel's netem, or a relay in user space."""

    NETEM = "netem"
    USER_SPACE = "user_space"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlan:
    """Size and speed of an emulated network, and the commands that make it.

    Attributes:
        hosts: number of hosts, 2 or more.
        rate_bits_per_second: rate of each link, in each direction.
        latency_seconds: one-way delay between hosts; None for none.
    """

    hosts: int
    rate_bits_per_second: int
    latency_seconds: float | None

    @property
    def burst_bytes(self) -> int:
        """Bytes that a link lets pass at once after a pause."""
        return max(LEAST_BURST_BYTES, int(BURST_SECONDS * self.rate_bits_per_second / 8))

    @property
    def queue_bytes(self) -> int:
        """Most bytes that wait for a link; more are dropped."""
        return max(LEAST_QUEUE_BYTES, int(QUEUE_SECONDS * self.rate_bits_per_second / 8))

    @property
    def echo_bytes(self) -> int:
        """Length of a message that is long enough to show whether links are shaped."""
        return max(LEAST_ECHO_BYTES, ECHO_BURSTS * self.burst_bytes)

    @property
    def echo_seconds(self) -> float:
        """Least round trip of such a message."""
        return 2 * (self.echo_bytes * 8 / self.rate_bits_per_second + (self.latency_seconds or 0.0))

    @property
    def delayed_bytes(self) -> int:
        """Most bytes in a relay: twice what all links can have under way, and their queues.

        Links are shaped before it, so only a relay without a core for long can reach this.
        """
        on_the_way = int((self.latency_seconds or 0.0) * self.rate_bits_per_second / 8)
        return self.hosts * (2 * on_the_way + self.queue_bytes)

    def address(self, host: int) -> IPv4Address:
        """Address of a host's interface."""
        return NETWORK[host + 1]

    def hub_links(self, namespaces: Sequence[str]) -> list[str]:
        """Lines for `ip` that make the hub, run in its namespace.

        Args:
            namespaces: path of the namespace of each host.
        """
        lines = ["link add bridge0 type bridge", "link set bridge0 up"]
        for host, path in enumerate(namespaces):
            lines.append(f"link add {port(host)} type veth peer name {INTERFACE} netns {path}")
            lines.append(f"link set {port(host)} master bridge0 up")
        return lines

    def relayed_links(self, namespaces: Sequence[str]) -> list[str]:
        """Lines as of `hub_links`, for a hub with a relay in place of the bridge.

        Args:
            namespaces: path of the namespace of each host.
        """
        lines: list[str] = []
        for host, path in enumerate(namespaces):
            hardware = hardware_address(host).hex(":")
            lines.append(
                f"link add {port(host)} type veth peer name {INTERFACE} address {hardware} "
                f"netns {path}"
            )
            lines.append(f"link set {port(host)} up")
        return lines

    def hub_shapes(self) -> list[str]:
        """Lines for `tc` that shape what hosts receive, run in the hub's namespace."""
        return [self._shape(port(host)) for host in range(self.hosts)]

    def host_links(self, host: int) -> list[str]:
        """Lines for `ip` that finish a host, run in its namespace once the hub is made."""
        return [
            "link set lo up",
            f"addr add {self.address(host)}/{NETWORK.prefixlen} dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ]

    def relayed_host_links(self) -> list[str]:
        """Further lines for `ip` for a host behind a relay, so that its pieces fit its bucket.

        A larger piece would be cut into frames, of which a relay passes half as many bytes.
        """
        piece = min(self.burst_bytes, RELAYED_BYTES)
        return [f"link set {INTERFACE} gso_max_size {piece}"]

    def host_shapes(self) -> list[str]:
        """Lines for `tc` that shape what a host sends, run in its namespace."""
        return [self._shape(INTERFACE)]

    def host_delays(self) -> list[str]:
        """Lines for `tc` that delay what a host sends, after shaping; empty for no delay."""
        if self.latency_seconds is None:
            return []
        microseconds = round(1e6 * self.latency_seconds)
        return [
            f"qdisc add dev {INTERFACE} parent 1:1 handle 2: "
            f"netem delay {microseconds}us limit {DELAYED_PACKETS}"
        ]

    def _shape(self, interface: str) -> str:
        return (
            f"qdisc add dev {interface} root handle 1: tbf rate {self.rate_bits_per_second}bit "
            f"burst {self.burst_bytes} limit {self.queue_bytes}"
        )


def port(host: int) -> str:
    """Name of the hub's end of a host's link."""
    return f"port{host}"


def hardware_address(host: int) -> bytes:
    """Ethernet address of a host behind a relay; locally administered."""
    return b"\x02\x00" + host.to_bytes(4, "big")


def host_of_address(hardware: bytes) -> int | None:
    """The host with this Ethernet address; None if it is not a host's."""
    if hardware[:2] != b"\x02\x00":
        return None
    return int.from_bytes(hardware[2:], "big")
