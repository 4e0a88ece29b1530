"""A switch with latency for kernels without netem: a thread that delays each packet.

It takes the place of the bridge and moves packets between the hosts' ports in the hub's namespace,
through packet sockets. Each packet comes with a virtio-net header, so that what the kernel leaves
unsegmented or without checksum passes in one piece.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import final

from dlrm_hybrid.comm.netem.plan import NetworkPlan, host_of_address, port
from dlrm_hybrid.types import ResourceError


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
    _packets: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])

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
        self._packets.append((now_ns + self.delay_ns, packet))
        return True

    def take(self, now_ns: int) -> bytes | None:
        """Remove the next packet that is due; None if none is.

        Args:
            now_ns: time of the same clock as for `put`.
        """
        if not self._packets or self._packets[0][0] > now_ns:
            return None
        _, packet = self._packets.popleft()
        self.held_bytes -= len(packet)
        return packet

    def next_ns(self) -> int | None:
        """Time at which the next packet is due; None if the line is empty."""
        return self._packets[0][0] if self._packets else None


# Of linux/if_packet.h and asm-generic/socket.h; Python's socket module lacks them.
SOL_PACKET = 263
PACKET_STATISTICS, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 6, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3

HEADER_BYTES = 10  # virtio-net's; the addresses of receiver and sender follow
ADDRESS_BYTES = 6
RECEIVER = slice(HEADER_BYTES, HEADER_BYTES + ADDRESS_BYTES)
SENDER = slice(RECEIVER.stop, RECEIVER.stop + ADDRESS_BYTES)
MOST_PACKET_BYTES = 70_000
READ_AT_ONCE = 64  # packets, before those that are due leave
BUFFER_BYTES = 1 << 26  # a limit; buffers fill while this thread has no core
IDLE_SECONDS = 0.1
# On a busy link the thread sleeps this share of the delay between turns, up to a limit: waking up
# for every packet costs twice as much. A packet that comes alone is not late.
TURN_SHARE = 1 / 10
MOST_TURN_SECONDS = 1e-3


@final
@dataclass(slots=True)
class Figures:
    """What a relay has passed on and lost, how late, and its CPU time.

    Attributes:
        packets: number passed on, unsegmented ones counted once.
        bytes: size of these packets.
        lost_packets: number dropped by full buffers of the relay or the link behind it.
        latest_seconds: largest time by which a packet left late.
        cpu_seconds: CPU time of the relay.
    """

    packets: int = 0
    bytes: int = 0
    lost_packets: int = 0
    latest_seconds: float = 0.0
    cpu_seconds: float = 0.0


@final
class Relay:
    """Moves packets between ports until it is stopped."""

    def __init__(self, plan: NetworkPlan) -> None:
        """Open the sockets, in the namespace of the hub and after `plan.relayed_links`.

        Raises:
            ResourceError: the kernel has no such sockets.
        """
        assert plan.latency_seconds is not None
        self._line = DelayLine(
            delay_ns=round(1e9 * plan.latency_seconds), capacity_bytes=plan.delayed_bytes
        )
        self._turn_seconds = min(TURN_SHARE * plan.latency_seconds, MOST_TURN_SECONDS)
        self._figures, self._kernel_lost = Figures(), 0
        self._stopped = Event()
        try:
            self._source = _packet_socket(ETH_P_ALL, SO_RCVBUFFORCE)  # what comes from all ports
            self._source.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
            self._ports = [_packet_socket(0, SO_SNDBUFFORCE) for _ in range(plan.hosts)]
            for host, sink in enumerate(self._ports):
                sink.bind((port(host), 0))
        except OSError as error:
            raise ResourceError(
                f"network.latency: this kernel has no netem, and to delay packets in user space "
                f"needs packet sockets and root ({error.strerror}); set network.latency=null"
            ) from error

    @contextmanager
    def running(self) -> Generator[Thread, None, None]:
        """Move packets in a thread, which ends early only if it fails."""
        thread = Thread(target=self._run, name="delay line", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            self._stopped.set()
            thread.join()

    def figures(self) -> Figures:
        """The counters so far."""
        # Reading them sets the kernel's counters to zero.
        raw = self._source.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._kernel_lost += struct.unpack("II", raw)[1]
        sums = self._figures
        lost = sums.lost_packets + self._line.lost_packets + self._kernel_lost
        return Figures(sums.packets, sums.bytes, lost, sums.latest_seconds, sums.cpu_seconds)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wait()
            has_read = self._read()
            self._send_due()
            self._figures.cpu_seconds = time.thread_time()
            if has_read:
                time.sleep(self._turn_seconds)

    def _wait(self) -> None:
        """Wait until a packet comes or is due."""
        due_ns, seconds = self._line.next_ns(), IDLE_SECONDS
        if due_ns is not None:
            seconds = min(max(0.0, 1e-9 * (due_ns - time.monotonic_ns())), IDLE_SECONDS)
        select.select((self._source,), (), (), seconds)

    def _read(self) -> bool:
        put, receive = self._line.put, self._source.recv
        now_ns = time.monotonic_ns()
        for turn in range(READ_AT_ONCE):
            try:
                packet = receive(MOST_PACKET_BYTES)
            except BlockingIOError:
                return turn > 0
            put(packet, now_ns)
        return True

    def _send_due(self) -> None:
        figures, line = self._figures, self._line
        now_ns = time.monotonic_ns()
        if (due_ns := line.next_ns()) is not None:
            figures.latest_seconds = max(figures.latest_seconds, 1e-9 * (now_ns - due_ns))
        while (packet := line.take(now_ns)) is not None:
            figures.packets += 1
            figures.bytes += len(packet) - HEADER_BYTES
            for host in self._receivers(packet):
                try:
                    self._ports[host].send(packet)
                except OSError:  # the link's queue is full, or it has been taken down
                    figures.lost_packets += 1

    def _receivers(self, packet: bytes) -> Sequence[int]:
        receiver = packet[RECEIVER]
        if (host := host_of_address(receiver)) is not None:
            return (host,) if host < len(self._ports) else ()
        if not receiver[0] & 1:
            return ()
        sender = host_of_address(packet[SENDER])  # a broadcast, to ask for an address
        return [host for host in range(len(self._ports)) if host != sender]


def _packet_socket(protocol: int, buffer: int) -> socket.socket:
    """Open a non-blocking socket for whole frames with their virtio-net headers.

    Args:
        protocol: that of the frames to receive; 0 for none.
        buffer: socket option that sets the size of its buffer.
    """
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
    sock.setblocking(False)
    return sock
