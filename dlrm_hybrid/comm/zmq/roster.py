"""Who may speak to a rank, who has said what, and what is on its way: no sockets here.

Below the frames of the program ranks exchange three words, each with a frame of kind HELLO:

    HELLO    first message to another rank; holds the token that rank has published
    GOODBYE  last message to another rank
    TAKEN    answer to GOODBYE: everything before it has arrived; holds the number of frames and
             goodbyes that the one who answers has sent the other way, some still on their way

A rank leaves when all others have answered and it has taken everything they counted. So nothing is
lost, and none of two ranks that say goodbye at once leaves the other without an answer.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

import numpy as np

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Frame, FrameError, Kind, decode, encode
from dlrm_hybrid.wire.section import Dtype

Part = bytes | bytearray | memoryview


class Word(Enum):
    """What a message is below the program; a frame of the program has no word before it."""

    FRAME = b""
    HELLO = b"HELLO"
    GOODBYE = b"GOODBYE"
    TAKEN = b"TAKEN"


_WORDS = {word.value: word for word in Word if word is not Word.FRAME}


class ForeignError(Exception):
    """A message from outside this run; says how this shows."""


class BrokenError(DlrmError):
    """A rank of this run sent what cannot be read."""


@dataclass(slots=True)
class Peer:
    """What is known of another rank.

    Attributes:
        rank: its number.
        greeted: it has said HELLO.
        reached: our connection to it is up.
        departed: it has said GOODBYE.
        sent: frames and goodbyes sent to it.
        taken: frames and goodbyes that came from it.
        to_come: of these, how many it had sent when it answered our GOODBYE; None until it has.
    """

    rank: int
    greeted: bool = False
    reached: bool = False
    departed: bool = False
    sent: int = 0
    taken: int = 0
    to_come: int | None = None

    @property
    def settled(self) -> bool:
        """It has everything of ours, and we have everything of its."""
        return self.to_come is not None and self.taken >= self.to_come


@dataclass(slots=True)
class Roster:
    """The other ranks, as one rank sees them.

    Attributes:
        rank: whose roster this is.
        attempt: of the run.
        token: what others must know to be let in.
        peers: the others by rank.
    """

    rank: int
    attempt: int
    token: str = field(repr=False)
    peers: dict[int, Peer]
    _connections: dict[bytes, Peer] = field(default_factory=dict[bytes, Peer], repr=False)

    def read(self, connection: bytes, parts: Sequence[Part]) -> tuple[Word, Peer, Frame]:
        """What a message says, and who says it; counts it as taken.

        Args:
            connection: it came through; a rank keeps the one on which it said HELLO.
            parts: a frame, or a word and a frame.

        Raises:
            ForeignError: the message is not from a rank of this run.
            BrokenError: it is, but cannot be read.
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

    def hello(self, token: str) -> list[Part]:
        """The first message to the rank that has published `token`."""
        return [Word.HELLO.value, self._control(np.frombuffer(bytes.fromhex(token), np.uint8))]

    def goodbye(self, peer: Peer) -> list[Part]:
        """The last message to another rank."""
        peer.sent += 1
        return [Word.GOODBYE.value, self._control(np.empty(0, np.int64))]

    def answer(self, peer: Peer) -> list[Part]:
        """The answer to a GOODBYE of `peer`."""
        return [Word.TAKEN.value, self._control(np.array([peer.sent], np.int64))]

    def answered(self, peer: Peer, parts: Sequence[Part]) -> None:
        """Take note of an answer to our GOODBYE.

        Raises:
            BrokenError: it is not one.
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

    def _decoded(self, parts: Sequence[Part]) -> tuple[Word, Frame]:
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
        if peer.greeted:
            raise ForeignError(f"rank {frame.sender} has said HELLO on another connection")
        peer.greeted = True
        self._connections[connection] = peer
        return peer

    def _knows_token(self, frame: Frame) -> bool:
        given = b"".join(bytes(one.payload) for one in frame.sections if one.dtype is Dtype.UINT8)
        return hmac.compare_digest(given, bytes.fromhex(self.token))

    def _control(self, values: np.ndarray) -> Part:
        return encode(
            Frame(
                kind=Kind.HELLO,
                sender=self.rank,
                attempt=self.attempt,
                number=0,
                sections=(dense(0, values),),
            )
        )


@final
@dataclass(slots=True)
class UnknownPeers:
    """Counts who comes to a rank from outside its run.

    Attributes:
        rank: to which they came.
        report: called with a line of text for the first of each kind.
        foreign_messages: that were dropped.
        refused_connections: that did not come so far as to send one, without the keys of the run or
            for a broken greeting; programs that do not even try ZeroMQ's are not seen here.
    """

    rank: int
    report: Callable[[str], None] = field(repr=False)
    foreign_messages: int = 0
    refused_connections: int = 0

    def message(self, fault: Exception) -> None:
        """Count a message that was dropped for this reason."""
        self.foreign_messages += 1
        self._tell(self.foreign_messages, f"dropped a message from outside this run: {fault}")

    def connection(self) -> None:
        """Count a connection that was refused."""
        self.refused_connections += 1
        fault = "refused a connection without this run's keys or with another protocol"
        self._tell(self.refused_connections, fault)

    def _tell(self, count: int, fault: str) -> None:
        if count == 1:
            self.report(f"rank {self.rank}: {fault}; further ones are only counted")
