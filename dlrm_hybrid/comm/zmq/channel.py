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
from dlrm_hybrid.comm.zmq.roster import ForeignError, Part, Peer, Roster, UnknownPeers, Word
from dlrm_hybrid.comm.zmq.size import check_size
from dlrm_hybrid.comm.zmq.sockets import (
    Answer,
    Change,
    Changed,
    Event,
    Message,
    Refused,
    Sockets,
    listen,
)
from dlrm_hybrid.types import ConfigError, DeadlineError, PeerLostError
from dlrm_hybrid.wire.frame import Frame, Kind, encode

TOKEN_BYTES = 16
ENDED = "its connection ended or was silent for too long"
FLOOD_SECONDS = 1.0  # unknown peers who never stop do not hold up a deadline for longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqOptions:
    """How ranks connect.

    Attributes:
        address: IPv4 address to listen on.
        keys: for CURVE; None for none, allowed on loopback and where the network is enclosed.
        enclosed: only ranks of the run are on the network of `address`.
        start_seconds: how long to wait for all ranks to come.
        close_seconds: how long `close` waits for them to take what was sent.
        silence_seconds: after which the connection to a process that does not even answer for its
            sockets (it is stopped, or its machine is gone) is taken for ended.
    """

    address: str
    keys: CurveKeys | None
    enclosed: bool
    start_seconds: float
    close_seconds: float
    silence_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Whose end a rank survives, and how often it has been started itself.

    Attributes:
        mortal: ranks that may go without a goodbye.
        may_return: they may come again, which `Kind.LEFT` and their next frames tell; to others
            they have departed for good.
        incarnation: how often this rank has been started before in this attempt.
        mates: ranks that are started again together with this one, and with it are at the same
            incarnation. Who has been started before meets only these, and immortal ranks.
    """

    mortal: frozenset[int] = frozenset()
    may_return: bool = False
    incarnation: int = 0
    mates: frozenset[int] = frozenset()


ALL_STAY = Membership()


@dataclass(frozen=True, slots=True)
class _Coming:
    """A rank that has come again; connected to when the program has taken what came before."""

    peer: Peer
    incarnation: int
    endpoint: Endpoint


@final
@dataclass(slots=True)
class ZmqChannel(Channel):
    """One rank's end, connected to every other rank.

    Attributes:
        unknown_peers: who has come from outside the run.
    """

    unknown_peers: UnknownPeers = field(repr=False)
    _roster: Roster
    _sockets: Sockets = field(repr=False)
    _options: ZmqOptions
    _world_size: int
    _endpoints: dict[int, Endpoint] = field(repr=False)
    _may_return: bool = False
    _arrived: deque[Frame | _Coming] = field(default_factory=deque[Frame | _Coming], repr=False)
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
            return  # nobody misses it: who comes again begins anew
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
        """The next frame, from anyone; of kind LEFT where a rank is gone that may come again.

        A rank that has said goodbye before is told of in round 1.

        Raises:
            BrokenError: a rank sent what cannot be read.
            PeerLostError: a rank went without saying goodbye.
            DeadlineError: nothing came in time.
        """
        while self._until(lambda: bool(self._arrived), deadline_seconds):
            first = self._arrived.popleft()
            if isinstance(first, Frame):
                return first
            self._meet_again(first)
        raise DeadlineError(f"rank {self.rank}: no frame came within {deadline_seconds:g} s")

    @override
    def close(self) -> None:
        until = time.monotonic() + self._options.close_seconds
        # Ranks of which each would survive the other's end send each other nothing.
        waiting = [
            one
            for one in self._roster.peers.values()
            if not (one.departed or one.gone or (one.mortal and not self._may_return))
        ]
        done = False
        try:
            self._sockets.watch_answers()
            for peer in waiting:
                if not self._sockets.send(peer.rank, self._roster.goodbye(peer)):
                    self._ended(peer, ENDED)
            done = self._until(
                lambda: all(peer.settled for peer in waiting), self._options.close_seconds
            )
            if not done:
                left = [one.rank for one in waiting if not one.settled]
                raise DeadlineError(
                    f"rank {self.rank}: these ranks did not take all frames within "
                    f"{self._options.close_seconds:g} s: {', '.join(map(str, left))}",
                    left,
                )
        finally:
            # Others may still wait for our answers to their goodbyes.
            self._sockets.destroy(max(1.0, until - time.monotonic()) if done else 0.0)

    @override
    def abandon(self) -> None:
        self._sockets.destroy(0.0)

    def lost_peer(self, patience_seconds: float) -> int | None:
        """The rank that went first, looking for so many seconds; None if all live on.

        Frames that come meanwhile wait for `receive`.
        """
        try:
            self._until(lambda: False, patience_seconds)
        except PeerLostError as error:
            return error.rank
        return None

    def greet(self) -> None:
        """Connect to all ranks and wait for their greetings.

        Raises:
            ConfigError: a rank does not have our keys.
            PeerLostError: a rank is gone.
            DeadlineError: names the ranks that did not greet.
        """
        peers = [peer for peer in self._roster.peers.values() if not peer.gone]
        for peer in peers:
            endpoint = self._endpoints[peer.rank]
            self._sockets.connect(peer.rank, endpoint.address)
            self._sockets.send(peer.rank, self._roster.hello(endpoint.token))
        seconds = self._options.start_seconds
        if not self._until(lambda: all(peer.has_met for peer in peers), seconds):
            silent = ", ".join(str(one.rank) for one in peers if not one.has_met)
            raise DeadlineError(
                f"rank {self.rank}: these ranks did not greet within {seconds:g} s: {silent}"
            )
        self._shut()

    def _shut(self) -> None:
        """Nobody else comes in, unless somebody is missing who may come again."""
        peers = self._roster.peers.values()
        if not (self._may_return and any(peer.gone for peer in peers)):
            self._sockets.shut()

    def _meet_again(self, coming: _Coming) -> None:
        peer, endpoint = coming.peer, coming.endpoint
        if not peer.greeted or coming.incarnation != peer.incarnation:
            return  # it is gone already
        peer.gone = False
        self._endpoints[peer.rank] = endpoint
        self._sockets.connect(peer.rank, endpoint.address)
        self._sockets.send(peer.rank, self._roster.hello(endpoint.token))
        self._shut()

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Handle what happens until `done`; whether that was in time."""
        if self._lost is not None:
            raise self._lost
        until = time.monotonic() + seconds
        while not done():
            left_seconds = until - time.monotonic()
            happened = self._sockets.wait(max(0.0, left_seconds))
            for one in happened:
                self._handle(one)
            if left_seconds < (-FLOOD_SECONDS if happened else 0.0):
                return done()
        return True

    def _handle(self, one: Event) -> None:
        match one:
            case Message(connection, parts):
                self._read(connection, parts)
            case Answer(rank, parts):
                self._roster.answered(self._roster.peers[rank], parts)
            case Changed(rank, change):
                self._note(self._roster.peers[rank], change)
            case Refused():
                self.unknown_peers.connection()

    def _read(self, connection: bytes, parts: list[Part]) -> None:
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
            self._leave(peer)  # if that does not show yet
            endpoint = self._roster.come_again(connection, peer, frame)
            self._arrived.append(_Coming(peer, frame.number, endpoint))

    def _note(self, peer: Peer, change: Change) -> None:
        address = self._endpoints[peer.rank].address
        if peer.gone:
            return  # a connection that is forgotten ends in several ways
        if change is Change.UP:
            peer.reached = True
        elif change is Change.REFUSED and not peer.incarnation:
            raise ConfigError(
                f"network.keys: rank {self.rank} and rank {peer.rank} at {address} do not admit "
                "each other: all ranks need the same key file, or none"
            )
        elif peer.departed and peer.mortal:
            self._leave(peer)
        elif not peer.departed and peer.to_come is None:  # otherwise it may leave
            ended = ENDED if peer.reached else f"{address} cannot be reached"
            self._ended(peer, ended)

    def _ended(self, peer: Peer, cause: str) -> None:
        """Its connection has ended: raise PeerLostError, unless we survive that."""
        if peer.mortal:
            self._leave(peer)
            return
        self._lost = PeerLostError(peer.rank, cause)
        raise self._lost

    def _leave(self, peer: Peer) -> None:
        """Forget a rank, and say so after what came from it before."""
        was_here, has_departed = self._sockets.disconnect(peer.rank), peer.departed
        self._roster.forget(peer)
        if was_here and self._may_return:
            self._sockets.unshut()
            left = Frame(
                kind=Kind.LEFT,
                sender=peer.rank,
                attempt=self._roster.attempt,
                number=peer.incarnation,
                round=int(has_departed),
            )
            self._arrived.append(left)


def open_zmq_channel(
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    attempt: int,
    options: ZmqOptions,
    report: Callable[[str], None],
    membership: Membership = ALL_STAY,
) -> ZmqChannel:
    """Listen, meet the other ranks and connect to all of them; called in the rank itself.

    Args:
        rendezvous: of this attempt.
        rank: this one.
        world_size: how many ranks there are.
        attempt: how often the run has been restarted.
        options: of the connections.
        report: called with a line of text, once when a message from outside the run was dropped,
            once when a connection was refused.
        membership: who may go without ending the attempt; nobody by default.

    Raises:
        ConfigError: the address needs keys, or another rank has others.
        ResourceError: the address or the rendezvous cannot be used.
        PeerLostError: a rank went before all had met.
        DeadlineError: names the ranks that did not come.
    """
    sockets = listen(options.address, options.keys, options.enclosed, options.silence_seconds)
    try:
        endpoint = Endpoint(sockets.address, secrets.token_hex(TOKEN_BYTES))
        peers = _peers(rank, world_size, membership)
        met = {peer.rank: peer.incarnation for peer in peers.values() if not peer.gone}
        met[rank] = membership.incarnation
        endpoints = rendezvous.join(
            rank, dict(sorted(met.items())), endpoint, options.start_seconds
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
    """The others as they are when a rank starts."""
    again, mortal = membership.incarnation, membership.mortal
    return {
        other: Peer(
            other,
            mortal=other in mortal,
            incarnation=again if other in membership.mates else 0,
            gone=again > 0 and other in mortal,
        )
        for other in range(world_size)
        if other != rank
    }
