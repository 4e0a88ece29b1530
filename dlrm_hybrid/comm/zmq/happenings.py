"""What happens at the sockets of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dlrm_hybrid.comm.zmq.roster import Part


class Change(Enum):
    """What happened to the connection to another rank."""

    UP = "up"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Message:
    """Came in from another rank, or from a stranger."""

    connection: bytes
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Answer:
    """Came back from the rank to which this rank has connected."""

    rank: int
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Changed:
    """Happened to the connection to another rank."""

    rank: int
    change: Change


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody came without the keys, or speaks another protocol, and was not let in."""


Happening = Message | Answer | Changed | Refused
