"""The ZeroMQ sockets of one rank.

    others' DEALER ──▶ ROUTER   bound: receives from others; answers to their goodbyes go back here
    others' ROUTER ◀── DEALER   one per other rank: sends to it
                       PAIR     one per DEALER: reports at once when that connection ends
                       PAIR     for the ROUTER: reports failed handshakes
                       REP      with CURVE: decides which keys are admitted

Queues have no high-water mark: it would drop or block at a number of messages, whatever their
size. What is under way is bounded by what the ranks wait for.
"""

from __future__ import annotations

import ctypes
import math
import os
import selectors
import socket as sockets
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from dlrm_hybrid.comm.zmq.curve import (
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    CurveKeys,
    check_listening,
    zap_reply,
)
from dlrm_hybrid.comm.zmq.roster import MessagePart
from dlrm_hybrid.types import ConfigError, ResourceError
from dlrm_hybrid.wire.frame import Frame, Kind

MAX_MESSAGE_BYTES = 1 << 30
_DENSE = "fewer weights in one message: more parallel.servers or parallel.cuts"
_ROWS = "a smaller train.batch_size or evaluate.batch_size, or more parallel.table_servers"
_ACTIVATIONS = "a smaller train.batch_size or evaluate.batch_size, or more schedule.microbatches"
_SMALLER: Mapping[Kind, str] = {
    **dict.fromkeys((Kind.PUSH, Kind.PARAMETERS, Kind.CONTRIBUTION, Kind.RESULT), _DENSE),
    Kind.WEIGHTS: _DENSE,
    **dict.fromkeys((Kind.LOOKUP, Kind.ROWS, Kind.UPDATE), _ROWS),
    **dict.fromkeys((Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT), _ACTIVATIONS),
}


def check_size(frame: Frame, to: int, num_bytes: int) -> None:
    """Refuse a message that its receiver would drop.

    Raises:
        ConfigError: it is too long; names message and limit, and advises.
    """
    if num_bytes > MAX_MESSAGE_BYTES:
        advice = _SMALLER.get(frame.kind)
        raise ConfigError(
            f"{frame.kind.name.lower()} {frame.number} of rank {frame.sender} to rank {to}: "
            f"{num_bytes:,} bytes, and a message has at most {MAX_MESSAGE_BYTES:,}"
            + (f"; needs {advice}" if advice else "")
        )


NO_COPY_BYTES = 1 << 16  # below this a copy is cheaper than tracking the buffer
HEARTBEATS = 4  # per time of silence that ends a connection
NEVER_MILLISECONDS = 24 * 3_600_000
# A peer that connects and says nothing is cut off after so long, even while this rank has no
# descriptor left for its own peers; well below network.patience_seconds.
HANDSHAKE_SECONDS = 5.0
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # of Linux; Python lacks them

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | _HANDSHAKE_FAILED | _ENDED

_Socket = zmq.Socket[bytes]


class ConnectionChange(Enum):
    """A change of the connection to another rank."""

    UP = "up"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """Event: a message came from another rank or an unknown peer."""

    connection: bytes
    parts: list[MessagePart]


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """Event: an answer came back from a rank to which this rank has connected."""

    rank: int
    parts: list[MessagePart]


@dataclass(frozen=True, slots=True)
class Changed:
    """Event: the connection to another rank has changed."""

    rank: int
    change: ConnectionChange


@dataclass(frozen=True, slots=True)
class Refused:
    """Event: a peer without the keys, or with another protocol, was refused."""


SocketEvent = PeerMessage | RouterAnswer | Changed | Refused


@dataclass(slots=True)
class Sockets:
    """The sockets that one rank listens on and sends through.

    Attributes:
        address: where the rank listens: `tcp://127.0.0.1:40001`.
    """

    address: str
    _listener: int
    _context: zmq.Context[_Socket]
    _router: _Socket
    _silence_seconds: float
    _keys: CurveKeys | None
    _gate: _Socket | None
    _door: _Socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _dealers: dict[int, _Socket] = field(default_factory=dict[int, _Socket])
    _monitors: dict[int, _Socket] = field(default_factory=dict[int, _Socket])
    _answering: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self._watch(self._router, self._message)
        self._watch(self._door, lambda: [Refused() for _ in _events(self._door)])
        if self._gate is not None:
            self._watch(self._gate, partial(self._open_gate, self._gate))

    def connect(self, rank: int, address: str) -> None:
        """Open the connection over which this rank sends to another."""
        dealer = _socket(self._context, zmq.DEALER)
        # A connection that has ended stays so: what was in it is lost, and with it the run.
        dealer.reconnect_ivl = NEVER_MILLISECONDS
        # A thread of ZeroMQ's answers even while the process computes, but not if it is stopped.
        dealer.heartbeat_ivl = math.ceil(1000 * self._silence_seconds / HEARTBEATS)
        dealer.heartbeat_timeout = math.ceil(1000 * self._silence_seconds)
        if self._keys is not None:
            dealer.curve_serverkey = self._keys.public
            dealer.curve_publickey = self._keys.public
            dealer.curve_secretkey = self._keys.secret
        monitor = dealer.get_monitor_socket(_WATCHED)
        self._dealers[rank], self._monitors[rank] = dealer, monitor
        self._watch(monitor, partial(self._changes, rank, monitor))
        dealer.connect(address)

    def disconnect(self, rank: int) -> bool:
        """Drop the connection to a rank, with all that is under way; False if there is none."""
        dealer = self._dealers.pop(rank, None)
        if dealer is None:
            return False
        monitor = self._monitors.pop(rank)
        self._selector.unregister(monitor)
        if rank in self._answering:
            self._answering.remove(rank)
            self._selector.unregister(dealer)
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(0)
        return True

    def shut(self) -> None:
        """Admit no further peers; connections that are up stay so.

        Closing the listening socket would end those too, so the kernel is made to drop whatever it
        receives. Linux only; elsewhere unknown peers may go on to connect.
        """
        if sys.platform != "linux":
            return
        refuse_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # ret 0
        program = struct.pack("HP", 1, ctypes.addressof(refuse_all))
        self._filter(SO_ATTACH_FILTER, program)

    def unshut(self) -> None:
        """Admit peers again, who must identify themselves as at the start."""
        if sys.platform == "linux":
            with suppress(FileNotFoundError):  # it was not shut
                self._filter(SO_DETACH_FILTER, struct.pack("i", 0))

    def _filter(self, option: int, value: bytes) -> None:
        with sockets.socket(fileno=os.dup(self._listener)) as listener:
            listener.setsockopt(sockets.SOL_SOCKET, option, value)

    def watch_answers(self) -> None:
        """Let `wait` wake up for answers to goodbyes too."""
        for rank, dealer in self._dealers.items():
            self._watch(dealer, partial(self._answers, rank))
            self._answering.append(rank)

    def send(self, rank: int, parts: Sequence[MessagePart]) -> bool:
        """Queue a message for another rank; False if the connection to it has ended."""
        dealer = self._dealers.get(rank)
        return dealer is not None and _send(dealer, parts)

    def reply(self, connection: bytes, parts: Sequence[MessagePart]) -> bool:
        """Queue a message for whoever sent over `connection`; False if that has ended."""
        return _send(self._router, [connection, *parts])

    def wait(self, seconds: float) -> list[SocketEvent]:
        """Collect events, oldest message first; waits up to `seconds` for the first one.

        Takes only one or two messages of other ranks at a time, to notice lost connections soon.
        """
        # A descriptor of ZeroMQ reports only what its socket has not looked at yet, so sockets that
        # may have looked while they sent are asked first.
        events = self._message()
        for rank in self._answering:
            events.extend(self._answers(rank))
        for key, _ in self._selector.select(0.0 if events else seconds):
            events.extend(key.data())
        return events

    def destroy(self, linger_seconds: float) -> None:
        """Close everything; queued messages still leave if that takes no longer than given."""
        if self._context.closed:
            return
        for socket in (self._router, *self._dealers.values()):
            socket.disable_monitor()
        self._selector.close()
        self._context.destroy(linger=math.ceil(1000 * linger_seconds))

    def _watch(self, socket: _Socket, handler: Callable[[], list[SocketEvent]]) -> None:
        # zmq.Poller would ask every socket two or three times: 25 µs more for each message.
        self._selector.register(socket, selectors.EVENT_READ, handler)
        socket.poll(0)  # a descriptor wakes up only for what comes after the socket was last asked

    def _open_gate(self, gate: _Socket) -> list[SocketEvent]:
        assert self._keys is not None
        while gate.poll(0):
            gate.send_multipart(zap_reply(gate.recv_multipart(), self._keys))
        return []

    def _message(self) -> list[SocketEvent]:
        try:
            connection = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            return []
        return [PeerMessage(connection, _parts(self._router))]

    def _answers(self, rank: int) -> list[SocketEvent]:
        answers: list[SocketEvent] = []
        while self._dealers[rank].poll(0):
            answers.append(RouterAnswer(rank, _parts(self._dealers[rank])))
        return answers

    def _changes(self, rank: int, monitor: _Socket) -> list[SocketEvent]:
        changes = [Changed(rank, _change(event)) for event in _events(monitor)]
        # Answers from before the end of a connection must be handled before that end.
        return [*self._answers(rank), *changes]


def listen(address: str, keys: CurveKeys | None, enclosed: bool, silence_seconds: float) -> Sockets:
    """Open this rank's sockets, listening on a free port of `address`; called in the rank itself.

    See `check_listening`, and `ZmqOptions` for `silence_seconds`.

    Raises:
        ConfigError: `address` needs keys.
        ResourceError: the address is not one of this machine, or no port is free.
    """
    check_listening(address, keys, enclosed)
    try:
        listener = sockets.create_server((address, 0))
    except OSError as error:
        raise ResourceError(f"network.bind: cannot listen on {address}: {error}") from error
    port = listener.getsockname()[1]
    context: zmq.Context[_Socket] = zmq.Context(io_threads=1)
    gate = None
    router = _socket(context, zmq.ROUTER)
    router.router_mandatory = True
    router.maxmsgsize = MAX_MESSAGE_BYTES
    router.handshake_ivl = math.ceil(1000 * HANDSHAKE_SECONDS)
    if keys is not None:
        # Bound before the port: without it ZeroMQ would admit any key.
        gate = _socket(context, zmq.REP)
        gate.bind(ZAP_ENDPOINT)
        router.curve_server = True
        router.curve_publickey = keys.public
        router.curve_secretkey = keys.secret
        router.zap_domain = ZAP_DOMAIN
    door = router.get_monitor_socket(_HANDSHAKE_FAILED)
    number = listener.detach()  # ZeroMQ closes it
    router.setsockopt(zmq.USE_FD, number)
    bound = f"tcp://{address}:{port}"
    rank_sockets = Sockets(bound, number, context, router, silence_seconds, keys, gate, door)
    router.bind(bound)  # only now that all events of a peer are watched
    return rank_sockets


def _socket(context: zmq.Context[_Socket], kind: int) -> _Socket:
    socket = context.socket(kind)
    socket.linger = 0  # a failing rank waits for nobody; `destroy` sets its own
    socket.sndhwm = 0
    socket.rcvhwm = 0
    return socket


def _send(socket: _Socket, parts: Sequence[MessagePart]) -> bool:
    try:
        for part in parts[:-1]:
            socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)
        socket.send(parts[-1], zmq.NOBLOCK, copy=len(parts[-1]) < NO_COPY_BYTES)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def _change(event: int) -> ConnectionChange:
    if event & _HANDSHAKE_FAILED:
        return ConnectionChange.REFUSED
    return ConnectionChange.ENDED if event & _ENDED else ConnectionChange.UP


def _events(monitor: _Socket) -> Iterator[int]:
    while monitor.poll(0):
        yield recv_monitor_message(monitor)["event"]


def _parts(socket: _Socket) -> list[MessagePart]:
    """Receive all parts of a message; large ones are views of ZeroMQ's memory."""
    parts: list[MessagePart] = []
    while True:
        part = socket.recv(copy=False)
        # A small message may lie at any byte of ZeroMQ's buffer; a copy is aligned.
        view = part.buffer
        parts.append(view if len(view) >= NO_COPY_BYTES else bytearray(view))
        if not part.more:
            return parts
