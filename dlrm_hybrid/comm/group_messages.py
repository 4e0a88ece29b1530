"""Messages of any length between members of a process group, without a round for lengths.

A collective needs all sizes beforehand. Both ends of a pair know the lengths of their last
messages, so each part of the collective has room for a slightly longer one. What does not fit
follows, between these two alone.

    a part    length, u32 │ the first bytes of the message │ zeros up to its room

Shapes: T members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from dlrm_hybrid.comm.counted_group import CountedGroup, split

_HEAD_BYTES = 4
_LATEST = 2  # messages, the shortest of which sets the room: those with new tables are rare


@final
class GroupMessages:
    """All-to-all of messages of one kind: each member sends one to every other per exchange.

    Args:
        group: that of the members, which all make the same exchanges.
        margin: the room is 1/margin longer than the latest messages.
    """

    def __init__(self, group: CountedGroup, margin: int) -> None:
        self._group = group
        self._given_T = [_Lengths(margin) for _ in range(group.size())]
        self._taken_T = [_Lengths(margin) for _ in range(group.size())]

    def exchange(self, messages_T: Sequence[bytes], dense_bytes: int) -> list[memoryview]:
        """Exchange messages with all members; returns those for this member.

        Args:
            messages_T: one for each member; empty for itself.
            dense_bytes: size of what is sent, uncompressed.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
        """
        rooms_T, given = [one.room for one in self._given_T], bytearray()
        for room, message in zip(rooms_T, messages_T, strict=True):
            given += len(message).to_bytes(_HEAD_BYTES, "little") + message[:room]
            given += bytes(max(room - len(message), 0))
        given_T, taken_T = _sizes(self._given_T), _sizes(self._taken_T)
        buffer = torch.frombuffer(given, dtype=torch.uint8)
        taken = self._group.exchange(buffer, given_T, taken_T, dense_bytes)
        parts_T = [memoryview(part.numpy().data) for part in split(taken, taken_T)]
        lengths_T = [int.from_bytes(part[:_HEAD_BYTES], "little") for part in parts_T]
        firsts_T = [
            part[_HEAD_BYTES:][:length] for part, length in zip(parts_T, lengths_T, strict=True)
        ]
        rests_T = self._group.swap(
            [message[room:] for room, message in zip(rooms_T, messages_T, strict=True)],
            [length - len(first) for length, first in zip(lengths_T, firsts_T, strict=True)],
        )
        for one, message in zip(self._given_T, messages_T, strict=True):
            one.latest.append(len(message))
        for one, length in zip(self._taken_T, lengths_T, strict=True):
            one.latest.append(length)
        return [
            memoryview(bytes(first) + rest) if rest else first
            for first, rest in zip(firsts_T, rests_T, strict=True)
        ]


class _Lengths:
    """Lengths of the latest messages from one member to another, which both of them know."""

    def __init__(self, margin: int) -> None:
        self._margin = margin
        self.latest = deque([0] * _LATEST, _LATEST)

    @property
    def room(self) -> int:
        """Room for the next message in the collective, in bytes."""
        shortest = min(self.latest)
        return shortest + -(-shortest // self._margin)


def _sizes(one_T: Sequence[_Lengths]) -> list[int]:
    return [_HEAD_BYTES + one.room for one in one_T]
