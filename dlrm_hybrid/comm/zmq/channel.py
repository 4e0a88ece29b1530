"""A channel over TCP, made of ZeroMQ sockets."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from typing_extensions import override

from dlrm_hybrid.comm.channel import Channel, check_outgoing
from dlrm_hybrid.comm.rendezvous import Endpoint, Rendezvous
from dlrm_hybrid.comm.zmq.curve import CurveKeys
from dlrm_hybrid.comm.zmq.roster import ForeignError, MessagePart, Peer, Roster, UnknownPeers, Word
from dlrm_hybrid.comm.zmq.sockets import (
    Changed,
    ConnectionChange,
    PeerMessage,
    Refused,
    RouterAnswer,
    SocketEvent,
    Sockets,
    check_size,
    listen,
)
from dlrm_hybrid.types import ConfigError, DeadlineError, PeerLostError
from dlrm_hybrid.wire.frame import SAID_GOODBYE, Frame, Kind, encode

TOKEN_BYTES = 16
ENDED = "its connection ended or was silent for too long"
FLOOD_SECONDS = 1.0  # longest that a flood from unknown peers can delay a deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqOptions:
    """Addresses, keys and deadlines of a rank's connections.

    Attributes:
        address: IPv4 address to listen on.
        keys: CURVE keys; None only on loopback or an enclosed network.
        enclosed: only ranks of the run are on the network of `address`.
        start_seconds: longest wait for all ranks at the start.
        close_seconds: longest wait of `close` for ranks to take what was sent.
        silence_seconds: after so long a process that does not even answer for its sockets (it is
            stopped, or its machine is gone) counts as disconnected.
    """

    address: str
    keys: CurveKeys | None
    enclosed: bool
    start_seconds: float
    close_seconds: float
    silence_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The ranks that a rank may outlive, and how often it was started itself.

    Attributes:
        mortal: ranks that may leave without a goodbye.
        may_return: whether they may rejoin; `Kind.LEFT` reports their loss, and their next frames
            their return. To others they have left for good.
        incarnation: how often this rank was started before in this attempt.
        mates: ranks restarted together with this one, at the same incarnation. A restarted rank
            meets only these, and ranks that are not mortal.
    """

    mortal: frozenset[int] = frozenset()
    may_return: bool = False
    incarnation: int = 0
    mates: frozenset[int] = frozenset()


ALL_STAY = Membership()


@dataclass(frozen=True, slots=True)
class _Rejoined:
    """A rank that has rejoined; connected to once all that arrived before it was received."""

    peer: Peer
    incarnation: int
    endpoint: Endpoint


@final
@dataclass(slots=True)
class ZmqChannel(Channel):
    """One rank's channel, connected to every other rank.

    Attributes:
        unknown_peers: counts of attempts from outside the run.
    """

    unknown_peers: UnknownPeers = field(repr=False)
    _roster: Roster
    _sockets: Sockets = field(repr=False)
    _options: ZmqOptions
    _world_size: int
    _endpoints: dict[int, Endpoint] = field(repr=False)
    _may_return: bool = False
    _arrived: deque[Frame | _Rejoined] = field(default_factory=deque[Frame | _Rejoined], repr=False)
    _lost: PeerLostError | None = None

    @property
    @override
    def rank(self) -> int:
        return self._roster.rank

    @override
    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        check_outgoing(self.rank, self._world_size, to, frame)
        if frame.attempt != self._roster.attempt:
            raise ValueError(f"attempt {frame.attempt} is not {self._roster.attempt}, the run's")
        peer = self._roster.peers[to]
        if (peer.gone or peer.departed) and peer.mortal and self._may_return:
            return  # no loss: a rank that rejoins begins anew
        if peer.departed or peer.gone:
            raise PeerLostError(to, "it is gone" if peer.gone else "it has said goodbye")
        buffer = encode(frame)
        check_size(frame, to, len(buffer))
        if not self._sockets.send(to, [buffer]):
            self._ended(peer, ENDED)
            return
        peer.sent += 1

    @override
    def receive(self, deadline_seconds: float) -> Frame:
        """Receive the next frame from any rank; one of kind LEFT reports a rank that may rejoin.

        Its `round` is `SAID_GOODBYE` if that rank left in order, else 0.

        Raises:
            BrokenError: a rank sent a message that cannot be read.
            PeerLostError: a rank left without a goodbye.
            DeadlineError: no frame arrived in time.
        """
        while self._until(lambda: bool(self._arrived), deadline_seconds):
            first = self._arrived.popleft()
            if isinstance(first, Frame):
                return first
            self._reconnect(first)
        raise DeadlineError(f"rank {self.rank}: no frame came within {deadline_seconds:g} s")

    @override
    def close(self) -> None:
        until = time.monotonic() + self._options.close_seconds
        # Ranks that would outlive each other send each other nothing.
        waiting = [
            peer
            for peer in self._roster.peers.values()
            if not (peer.departed or peer.gone or (peer.mortal and not self._may_return))
        ]
        all_settled = False
        try:
            self._sockets.watch_answers()
            for peer in waiting:
                if not self._sockets.send(peer.rank, self._roster.goodbye(peer)):
                    self._ended(peer, ENDED)
            all_settled = self._until(
                lambda: all(peer.settled for peer in waiting), self._options.close_seconds
            )
            if not all_settled:
                late = [peer.rank for peer in waiting if not peer.settled]
                raise DeadlineError(
                    f"rank {self.rank}: these ranks did not take all frames within "
                    f"{self._options.close_seconds:g} s: {', '.join(map(str, late))}",
                    late,
                )
        finally:
            # Other ranks may still wait for answers to their goodbyes.
            self._sockets.destroy(max(1.0, until - time.monotonic()) if all_settled else 0.0)

    @override
    def abandon(self) -> None:
        self._sockets.destroy(0.0)

    def lost_peer(self, patience_seconds: float) -> int | None:
        """Watch for so many seconds; returns the rank that was lost first, None if none was.

        Frames that arrive meanwhile wait for `receive`.
        """
        try:
            self._until(lambda: False, patience_seconds)
        except PeerLostError as error:
            return error.rank
        return None

    def greet(self) -> None:
        """Connect to all ranks and wait for their HELLOs.

        Raises:
            ConfigError: a rank has other keys.
            PeerLostError: a rank has left.
            DeadlineError: names the ranks that did not greet.
        """
        peers = [peer for peer in self._roster.peers.values() if not peer.gone]
        for peer in peers:
            endpoint = self._endpoints[peer.rank]
            self._sockets.connect(peer.rank, endpoint.address)
            self._sockets.send(peer.rank, self._roster.hello(endpoint.token))
        seconds = self._options.start_seconds
        if not self._until(lambda: all(peer.has_met for peer in peers), seconds):
            silent = ", ".join(str(peer.rank) for peer in peers if not peer.has_met)
            raise DeadlineError(
                f"rank {self.rank}: these ranks did not greet within {seconds:g} s: {silent}"
            )
        self._shut()

    def _shut(self) -> None:
        """Admit no further peers, unless a rank is missing that may rejoin."""
        peers = self._roster.peers.values()
        if not (self._may_return and any(peer.gone for peer in peers)):
            self._sockets.shut()

    def _reconnect(self, rejoined: _Rejoined) -> None:
        peer, endpoint = rejoined.peer, rejoined.endpoint
        if not peer.greeted or rejoined.incarnation != peer.incarnation:
            return  # it has left again
        peer.gone = False
        self._endpoints[peer.rank] = endpoint
        self._sockets.connect(peer.rank, endpoint.address)
        self._sockets.send(peer.rank, self._roster.hello(endpoint.token))
        self._shut()

    def _until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Handle events until `is_done`; False if the time was not enough."""
        if self._lost is not None:
            raise self._lost
        until = time.monotonic() + seconds
        while not is_done():
            left_seconds = until - time.monotonic()
            events = self._sockets.wait(max(0.0, left_seconds))
            for event in events:
                self._handle(event)
            if left_seconds < (-FLOOD_SECONDS if events else 0.0):
                return is_done()
        return True

    def _handle(self, event: SocketEvent) -> None:
        match event:
            case PeerMessage(connection, parts):
                self._read(connection, parts)
            case RouterAnswer(rank, parts):
                self._roster.answered(self._roster.peers[rank], parts)
            case Changed(rank, change):
                self._note(self._roster.peers[rank], change)
            case Refused():
                self.unknown_peers.connection()

    def _read(self, connection: bytes, parts: list[MessagePart]) -> None:
        if self._roster.has_forgotten(connection):
            return
        try:
            word, peer, frame = self._roster.read(connection, parts)
        except ForeignError as error:
            self.unknown_peers.message(error)
            return
        if word is Word.FRAME:
            self._arrived.append(frame)
        elif word is Word.GOODBYE:
            if not self._sockets.reply(connection, self._roster.answer(peer)):
                self._ended(peer, "its connection ended while it said goodbye")
                return
            peer.departed = True
        elif word is Word.HELLO and frame.number > peer.incarnation:
            self._leave(peer)  # in case its end has not been noticed yet
            endpoint = self._roster.come_again(connection, peer, frame)
            self._arrived.append(_Rejoined(peer, frame.number, endpoint))

    def _note(self, peer: Peer, change: ConnectionChange) -> None:
        address = self._endpoints[peer.rank].address
        if peer.gone:
            return  # a connection reports its end in several ways
        if change is ConnectionChange.UP:
            peer.reached = True
        elif change is ConnectionChange.REFUSED and not peer.incarnation:
            raise ConfigError(
                f"network.keys: rank {self.rank} and rank {peer.rank} at {address} do not admit "
                "each other: all ranks need the same key file, or none"
            )
        elif peer.departed and peer.mortal:
            self._leave(peer)
        elif not peer.departed and peer.to_come is None:  # otherwise its end is in order
            cause = ENDED if peer.reached else f"{address} cannot be reached"
            self._ended(peer, cause)

    def _ended(self, peer: Peer, cause: str) -> None:
        """Handle a lost connection: raise PeerLostError unless this rank outlives the peer."""
        if peer.mortal:
            self._leave(peer)
            return
        self._lost = PeerLostError(peer.rank, cause)
        raise self._lost

    def _leave(self, peer: Peer) -> None:
        """Forget a rank, and report it after all that arrived from it before."""
        was_here, has_departed = self._sockets.disconnect(peer.rank), peer.departed
        self._roster.forget(peer)
        if was_here and self._may_return:
            self._sockets.unshut()
            frame = Frame(
                kind=Kind.LEFT,
                sender=peer.rank,
                attempt=self._roster.attempt,
                number=peer.incarnation,
                round=SAID_GOODBYE if has_departed else 0,
            )
            self._arrived.append(frame)


def open_zmq_channel(
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    attempt: int,
    options: ZmqOptions,
    report: Callable[[str], None],
    membership: Membership = ALL_STAY,
) -> ZmqChannel:
    """Listen, find the other ranks and connect to all of them; called in the rank itself.

    Args:
        rendezvous: that of this attempt.
        rank: this rank.
        world_size: number of ranks.
        attempt: how often the run has been restarted.
        options: addresses, keys and deadlines.
        report: called with a line of text, once when a message from outside the run was dropped,
            once when a connection was refused.
        membership: ranks that may leave without ending the attempt; none by default.

    Raises:
        ConfigError: the address needs keys, or another rank has other keys.
        ResourceError: the address or the rendezvous cannot be used.
        PeerLostError: a rank left before all had connected.
        DeadlineError: names the ranks that did not connect.
    """
    sockets = listen(options.address, options.keys, options.enclosed, options.silence_seconds)
    try:
        endpoint = Endpoint(sockets.address, secrets.token_hex(TOKEN_BYTES))
        peers = _peers(rank, world_size, membership)
        incarnations = {peer.rank: peer.incarnation for peer in peers.values() if not peer.gone}
        incarnations[rank] = membership.incarnation
        endpoints = rendezvous.join(
            rank, dict(sorted(incarnations.items())), endpoint, options.start_seconds
        )
        roster = Roster(rank, attempt, endpoint.token, peers, endpoint, membership.incarnation)
        channel = ZmqChannel(
            UnknownPeers(rank, report),
            roster,
            sockets,
            options,
            world_size,
            endpoints,
            membership.may_return,
        )
        channel.greet()
    except BaseException:
        sockets.destroy(0.0)
        raise
    return channel


def _peers(rank: int, world_size: int, membership: Membership) -> dict[int, Peer]:
    """The state of the other ranks when a rank starts."""
    incarnation, mortal = membership.incarnation, membership.mortal
    return {
        other: Peer(
            other,
            mortal=other in mortal,
            incarnation=incarnation if other in membership.mates else 0,
            gone=incarnation > 0 and other in mortal,
        )
        for other in range(world_size)
        if other != rank
    }
