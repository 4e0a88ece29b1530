"""Connections between the members of a group, for bytes whose numbers both ends know beforehand.

Plain TCP, one connection between every two, and no threads: what a member sends goes to the kernel
when it is handed over, as far as that has room, and the rest while the member waits for others.
Threads that wake each other up take three times the CPU time of all else in an exchange.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket as sockets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import final

from dlrm_hybrid.comm.rendezvous import Endpoint

Buffer = bytes | bytearray | memoryview
TOKEN_BYTES, PLACE_BYTES = 16, 4
CHECK_SECONDS = 0.2  # between two checks of whether a member that is waited for may still come
GREETING_SECONDS = 5.0  # that whoever connects has to say who it is
WAKE_BYTES = 1 << 16  # a receive buffer has room for more, else it would never be full enough


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection to another member, with the parts of exchanges that are under way.

    Attributes:
        socket: does not block.
        outgoing: parts to be sent, or what is left of them.
        incoming: room for parts that come, or what is left of it.
        sent: parts sent.
        received: parts received.
    """

    socket: sockets.socket
    outgoing: deque[memoryview] = field(default_factory=deque[memoryview])
    incoming: deque[memoryview] = field(default_factory=deque[memoryview])
    sent: int = 0
    received: int = 0

    def go_on(self) -> None:
        """Send and receive as much as is possible without waiting; OSError if it has ended."""
        with suppress(BlockingIOError):
            while self.outgoing:
                rest = self.outgoing[0]
                if rest and (count := self.socket.send(rest)) < len(rest):
                    self.outgoing[0] = rest[count:]
                    continue
                self.outgoing.popleft()
                self.sent += 1
        with suppress(BlockingIOError):
            while self.incoming:
                rest = self.incoming[0]
                if rest and (count := self.socket.recv_into(rest)) < len(rest):
                    if not count:
                        raise ConnectionResetError("a member has closed its connection")
                    self.incoming[0] = rest[count:]
                    continue
                self.incoming.popleft()
                self.received += 1

    def register(self, poll: select.poll) -> None:
        """Let `poll` return once much of what is awaited has come, or there is room to send."""
        events = select.POLLOUT if self.outgoing else 0
        if self.incoming:
            events |= select.POLLIN
            # Else it would wake up for each packet of a slow link.
            size = min(len(self.incoming[0]), WAKE_BYTES)
            self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, size)
        poll.register(self.socket, events)


@final
class Mesh:
    """A member's connections to all others; all of them make the same exchanges, in one order.

    Args:
        place: number of this member.
        connected: sockets to the others, by their numbers.
        deadline_seconds: how long an exchange may take.

    Attributes:
        place: number of this member.
        size: number of members.
    """

    def __init__(
        self, place: int, connected: Mapping[int, sockets.socket], deadline_seconds: float
    ) -> None:
        self.place, self.size = place, len(connected) + 1
        self._connections = {member: _Connection(socket) for member, socket in connected.items()}
        self._deadline_seconds = deadline_seconds
        self._begun = 0

    def begin(self, outgoing_T: Sequence[Buffer], incoming_T: Sequence[Buffer]) -> int:
        """Begin an exchange; returns its number, for `finish`.

        Args:
            outgoing_T: bytes for each member, which must not change before the end; those for this
                member itself go nowhere.
            incoming_T: writable, receives the bytes of each member.

        Raises:
            OSError: a connection has ended.
        """
        self._begun += 1
        for member, connection in self._connections.items():
            connection.outgoing.append(memoryview(outgoing_T[member]))
            connection.incoming.append(memoryview(incoming_T[member]))
            connection.go_on()
        return self._begun

    def finish(self, number: int) -> None:
        """Wait for the end of an exchange and of all before it.

        Raises:
            TimeoutError: it took too long.
            OSError: a connection has ended.
        """
        until = time.monotonic() + self._deadline_seconds
        while waiting := [
            connection
            for connection in self._connections.values()
            if min(connection.sent, connection.received) < number
        ]:
            poll = select.poll()
            for connection in waiting:
                connection.register(poll)
            if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                raise TimeoutError("an exchange took too long")
            for connection in waiting:
                connection.go_on()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.socket.close()


@final
class Listener:
    """Where a member waits for the connections of others, until it has them all.

    Attributes:
        endpoint: its address, and the token that others must know.
    """

    def __init__(self, address: str) -> None:
        self._socket = sockets.create_server((address, 0))
        port = self._socket.getsockname()[1]
        self.endpoint = Endpoint(f"tcp://{address}:{port}", secrets.token_hex(TOKEN_BYTES))

    def connect(
        self,
        place: int,
        endpoints: Sequence[Endpoint],
        deadline_seconds: float,
        check: Callable[[], None],
    ) -> Mesh:
        """Connect all members: each connects to those before it, and is connected to by the others.

        Args:
            place: number of this member.
            endpoints: where each listens.
            deadline_seconds: how long this may take, and each exchange afterwards.
            check: called now and then while members are waited for; may raise to end the wait.

        Raises:
            TimeoutError: a member did not come.
            OSError: one cannot be reached.
        """
        until = time.monotonic() + deadline_seconds
        connected: dict[int, sockets.socket] = {}
        with ExitStack() as opened:
            for member, endpoint in enumerate(endpoints[:place]):
                host, port = endpoint.address.removeprefix("tcp://").split(":")
                socket = connected[member] = opened.enter_context(sockets.socket())
                socket.setblocking(False)
                with suppress(BlockingIOError):
                    socket.connect((host, int(port)))
                _wait(socket, select.POLLOUT, until, check)
                if error := socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                socket.settimeout(_left(until))
                greeting = bytes.fromhex(endpoint.token) + place.to_bytes(PLACE_BYTES, "little")
                socket.sendall(greeting)
            awaited = {*range(place + 1, len(endpoints))}
            while awaited:
                _wait(self._socket, select.POLLIN, until, check)
                self._socket.settimeout(_left(until))
                stranger, _ = self._socket.accept()
                member = self._place_of(stranger)
                if member not in awaited:
                    stranger.close()
                    continue
                awaited.remove(member)
                connected[member] = opened.enter_context(stranger)
            for socket in connected.values():
                socket.setblocking(False)
                socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, True)
            opened.pop_all()
        return Mesh(place, dict(sorted(connected.items())), deadline_seconds)

    def close(self) -> None:
        """Stop listening for other members of the mesh."""
        self._socket.close()

    def _place_of(self, stranger: sockets.socket) -> int | None:
        """The number of the member that has connected; None if it does not know the token."""
        until, greeting = time.monotonic() + GREETING_SECONDS, b""
        with suppress(OSError):
            while missing := TOKEN_BYTES + PLACE_BYTES - len(greeting):
                stranger.settimeout(_left(until))
                if not (part := stranger.recv(missing)):
                    break
                greeting += part
        token, place = greeting[:TOKEN_BYTES], greeting[TOKEN_BYTES:]
        knows_us = hmac.compare_digest(token, bytes.fromhex(self.endpoint.token))
        return int.from_bytes(place, "little") if knows_us else None


def _wait(socket: sockets.socket, events: int, until: float, check: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(socket, events)
    while not poll.poll(1000 * min(CHECK_SECONDS, _left(until))):
        check()


def _left(until: float) -> float:
    left_seconds = until - time.monotonic()
    if left_seconds <= 0:
        raise TimeoutError("members did not connect in time")
    return left_seconds
