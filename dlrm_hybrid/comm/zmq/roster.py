"""The roster: which peers may speak to a rank, what they sent and what is under way; no sockets.

Below the program's frames ranks exchange three words, each with a frame of kind HELLO:

    HELLO    first message to another rank; holds the token which that rank has published, how
             often its sender was started before, and if so where that listens
    GOODBYE  last message to another rank
    TAKEN    answer to GOODBYE: everything before it has arrived; holds the number of frames and
             goodbyes sent the other way, some of them still under way

A rank leaves once all others have answered and it has taken everything they counted. So nothing
is lost, and of two ranks that say goodbye at once neither misses its answer.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

import numpy as np

from dlrm_hybrid.comm.rendezvous import Endpoint, endpoint_of
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Frame, FrameError, Kind, decode, encode
from dlrm_hybrid.wire.section import Dtype

MessagePart = bytes | bytearray | memoryview


class Word(Enum):
    """Kind of a message below the program; a frame of the program has no word before it."""

    FRAME = b""
    HELLO = b"HELLO"
    GOODBYE = b"GOODBYE"
    TAKEN = b"TAKEN"


_WORDS = {word.value: word for word in Word if word is not Word.FRAME}


class ForeignError(Exception):
    """A message from outside this run; the text says what gave it away."""


class BrokenError(DlrmError):
    """A rank of this run sent a message that cannot be read."""


@dataclass(slots=True)
class Peer:
    """The state of the connections with another rank.

    Attributes:
        rank: its rank.
        greeted: whether it has said HELLO.
        reached: whether our connection to it is up.
        departed: whether it has said GOODBYE.
        sent: number of frames and goodbyes sent to it.
        taken: number of frames and goodbyes received from it.
        to_come: number of what it had sent when it answered our GOODBYE; None before that.
        mortal: whether this rank outlives it if it leaves without a goodbye.
        incarnation: how often it was started before its present process.
        gone: whether it left without a goodbye and has not rejoined.
    """

    rank: int
    greeted: bool = False
    reached: bool = False
    departed: bool = False
    sent: int = 0
    taken: int = 0
    to_come: int | None = None
    mortal: bool = False
    incarnation: int = 0
    gone: bool = False

    @property
    def settled(self) -> bool:
        """Whether the peer has answered our GOODBYE and all it sent has come, or it is gone."""
        return self.gone or (self.to_come is not None and self.taken >= self.to_come)

    @property
    def has_met(self) -> bool:
        """Whether connections are up both ways, or the peer is gone."""
        return self.gone or (self.greeted and self.reached)

    def leave(self) -> None:
        """Reset all that was counted on a connection that has ended."""
        self.gone = True
        self.greeted = self.reached = self.departed = False
        self.sent = self.taken = 0
        self.to_come = None


@dataclass(slots=True)
class Roster:
    """The other ranks of a run, as one rank sees them.

    Attributes:
        rank: the rank that keeps this roster.
        attempt: number of the run's current attempt.
        token: secret that others must know to be admitted.
        peers: the others by rank.
        endpoint: where this rank listens; sent to others after a restart.
        incarnation: how often this rank was started before.
    """

    rank: int
    attempt: int
    token: str = field(repr=False)
    peers: dict[int, Peer]
    endpoint: Endpoint | None = None
    incarnation: int = 0
    _connections: dict[bytes, Peer] = field(default_factory=dict[bytes, Peer], repr=False)
    _forgotten: set[bytes] = field(default_factory=set[bytes], repr=False)

    def forget(self, peer: Peer) -> None:
        """Forget a rank that has left, with all that still arrives on its connection."""
        peer.leave()
        ended = [connection for connection, owner in self._connections.items() if owner is peer]
        self._forgotten.update(ended)
        for connection in ended:
            del self._connections[connection]

    def has_forgotten(self, connection: bytes) -> bool:
        """Whether a connection is that of an incarnation that has left."""
        return connection in self._forgotten

    def read(self, connection: bytes, parts: Sequence[MessagePart]) -> tuple[Word, Peer, Frame]:
        """Read a message and its sender; counts it as taken.

        Args:
            connection: the one it arrived on; a rank keeps that of its HELLO.
            parts: a frame, or a word and a frame.

        Raises:
            ForeignError: the message is not from a rank of this run.
            BrokenError: it is, but the message cannot be read.
        """
        peer = self._connections.get(connection)
        try:
            word, frame = self._decoded(parts)
            if peer is None:
                return word, self._admitted(connection, word, frame), frame
            if word not in (Word.FRAME, Word.GOODBYE):
                raise ForeignError(f"it says {word.name} when nobody can")
            if frame.sender != peer.rank:
                raise ForeignError(f"it calls itself rank {frame.sender}")
        except (ForeignError, FrameError) as error:
            if peer is not None:
                raise BrokenError(
                    f"rank {self.rank}: rank {peer.rank} sent a broken message: {error}"
                ) from error
            raise ForeignError(str(error)) from error
        peer.taken += 1
        return word, peer, frame

    def hello(self, token: str) -> list[MessagePart]:
        """Make the first message to the rank that has published `token`."""
        arrays = [np.frombuffer(bytes.fromhex(token), np.uint8)]
        if self.incarnation and self.endpoint is not None:
            arrays.append(np.frombuffer(self.endpoint.to_json().encode(), np.uint8))
        return [Word.HELLO.value, self._control(*arrays)]

    def goodbye(self, peer: Peer) -> list[MessagePart]:
        """Make the last message to another rank."""
        peer.sent += 1
        return [Word.GOODBYE.value, self._control(np.empty(0, np.int64))]

    def answer(self, peer: Peer) -> list[MessagePart]:
        """Make the answer to a GOODBYE of `peer`."""
        return [Word.TAKEN.value, self._control(np.array([peer.sent], np.int64))]

    def answered(self, peer: Peer, parts: Sequence[MessagePart]) -> None:
        """Record an answer to our GOODBYE.

        Raises:
            BrokenError: it is not an answer.
        """
        try:
            word, frame = self._decoded(parts)
            if word is Word.TAKEN and frame.sender == peer.rank:
                peer.to_come = int(array_of(frame.sections[0])[0])
                return
            fault = f"{word.name} is no answer to GOODBYE"
        except (ForeignError, FrameError, IndexError) as error:
            fault = str(error)
        raise BrokenError(f"rank {self.rank}: rank {peer.rank} sent a broken message: {fault}")

    def _decoded(self, parts: Sequence[MessagePart]) -> tuple[Word, Frame]:
        if not 1 <= len(parts) <= 2:
            raise ForeignError(f"it has {len(parts)} parts")
        try:
            word = Word.FRAME if len(parts) == 1 else _WORDS[bytes(parts[0][:8])]
        except KeyError:
            raise ForeignError("it begins with no known word") from None
        frame = decode(parts[-1])
        if frame.attempt != self.attempt:
            raise ForeignError(f"it is of attempt {frame.attempt}; this is attempt {self.attempt}")
        return word, frame

    def _admitted(self, connection: bytes, word: Word, frame: Frame) -> Peer:
        peer = self.peers.get(frame.sender)
        if peer is None:
            raise ForeignError(f"rank {frame.sender} is none of the others of this run")
        if word is not Word.HELLO:
            raise ForeignError(f"it calls itself rank {frame.sender} and has not said HELLO")
        if not self._knows_token(frame):
            raise ForeignError(f"it calls itself rank {frame.sender} and does not know our token")
        if frame.number > peer.incarnation and peer.mortal:
            # Its last connection may turn out to have ended only later: frames on that one, before
            # or after this HELLO, are never taken for the new incarnation's.
            return peer
        if peer.greeted or peer.gone or frame.number != peer.incarnation:
            raise ForeignError(f"rank {frame.sender} has said HELLO on another connection")
        peer.greeted = True
        self._connections[connection] = peer
        return peer

    def come_again(self, connection: bytes, peer: Peer, frame: Frame) -> Endpoint:
        """Record the HELLO of a new incarnation, once the last one is forgotten.

        Raises:
            BrokenError: the HELLO does not say where it listens.
        """
        try:
            text = bytes(frame.sections[1].payload)
            endpoint = endpoint_of(text.decode(), f"HELLO of rank {peer.rank}")
        except (IndexError, UnicodeDecodeError, DlrmError) as error:
            raise BrokenError(
                f"rank {self.rank}: rank {peer.rank} sent a broken message: {error}"
            ) from error
        peer.incarnation, peer.greeted = frame.number, True
        self._connections[connection] = peer
        return endpoint

    def _knows_token(self, frame: Frame) -> bool:
        first = [section for section in frame.sections[:1] if section.dtype is Dtype.UINT8]
        token = b"".join(bytes(section.payload) for section in first)
        return hmac.compare_digest(token, bytes.fromhex(self.token))

    def _control(self, *values: np.ndarray) -> MessagePart:
        return encode(
            Frame(
                kind=Kind.HELLO,
                sender=self.rank,
                attempt=self.attempt,
                number=self.incarnation,
                sections=tuple(dense(0, array) for array in values),
            )
        )


@final
@dataclass(slots=True)
class UnknownPeers:
    """Counts attempts to connect or speak from outside the run.

    Attributes:
        rank: the rank they came to.
        report: called with a line of text for the first of each kind.
        foreign_messages: number of messages dropped.
        refused_connections: number that failed before a first message, without the keys of the run
            or with a broken handshake; programs that do not speak ZMTP at all are not counted.
    """

    rank: int
    report: Callable[[str], None] = field(repr=False)
    foreign_messages: int = 0
    refused_connections: int = 0

    def message(self, fault: Exception) -> None:
        """Count a message dropped for this reason."""
        self.foreign_messages += 1
        self._tell(self.foreign_messages, f"dropped a message from outside this run: {fault}")

    def connection(self) -> None:
        """Count a refused connection."""
        self.refused_connections += 1
        fault = "refused a connection without this run's keys or with another protocol"
        self._tell(self.refused_connections, fault)

    def _tell(self, count: int, fault: str) -> None:
        if count == 1:
            self.report(f"rank {self.rank}: {fault}; further ones are only counted")
