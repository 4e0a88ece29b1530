"""Messages of any length between the members of a process group, without a round for lengths.

A collective wants all sizes beforehand. Both ends of a pair know how long the last messages between
them were, so each part of the collective has room for one that is a little longer. What does not
fit follows, between these two alone.

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
_LATEST = 2  # messages whose shortest says how much room there is: those with tables are rare


@final
class GroupMessages:
    """Messages of one kind: every member has one for every other at each exchange.

    Args:
        group: of the members; all make the same exchanges.
        margin: there is room for a message that is one in so many longer than the latest ones.
    """

    def __init__(self, group: CountedGroup, margin: int) -> None:
        self._group = group
        self._given_T = [_Lengths(margin) for _ in range(group.size())]
        self._taken_T = [_Lengths(margin) for _ in range(group.size())]

    def exchange(self, messages_T: Sequence[bytes], dense_bytes: int) -> list[memoryview]:
        """The messages that all members have for this one.

        Args:
            messages_T: of this one for each; an empty one for itself.
            dense_bytes: that would leave this member uncompressed.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member is gone.
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
    """Of the latest messages from one member to another, as both of them know it."""

    def __init__(self, margin: int) -> None:
        self._margin = margin
        self.latest = deque([0] * _LATEST, _LATEST)

    @property
    def room(self) -> int:
        """Bytes for the next one, in the collective."""
        shortest = min(self.latest)
        return shortest + -(-shortest // self._margin)


def _sizes(one_T: Sequence[_Lengths]) -> list[int]:
    return [_HEAD_BYTES + one.room for one in one_T]
