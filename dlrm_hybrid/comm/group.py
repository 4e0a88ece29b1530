"""The process group beneath TorchRec's collectives: gloo on one interface, every byte counted.

It has only the collectives that TorchRec needs. Each member counts the tensor bytes it sends to
others, without the part that stays with it or what gloo adds; so over all members each byte counts
once.

Shapes: T members.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch import distributed as dist

from dlrm_hybrid.comm.rendezvous import Rendezvous
from dlrm_hybrid.telemetry.spans import COLLECTIVE, SpanClock, Within
from dlrm_hybrid.types import DeadlineError, DlrmError, PeerLostError

CountBytes = Callable[[int, int, int], None]
"""Called once per collective, with the bytes sent, their size as float32 and the bytes received."""

Explain = Callable[[RuntimeError], Exception]
"""Translates an error of gloo."""

FLOAT_BYTES = 4


@final
class CountedGroup(dist.ProcessGroup):
    """Collectives of the members; there are none but those below, so all bytes are counted.

    torch.distributed passes arguments by position, so parameters may have other names.

    A reduction is an all-to-all and a local sum in the order of the members: the same in every
    run, and half the bytes of gloo's, which reduces everything everywhere.

    Args:
        gloo: the group that does the work.
        count: called for every collective.
        explain: translates errors of gloo.
        waiting: span entered while this member waits for a collective.
    """

    def __init__(self, gloo: Any, count: CountBytes, explain: Explain, waiting: Within) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyright: ignore
        self._gloo = gloo
        self._rank: int = gloo.rank()
        self._size: int = gloo.size()
        self._count = count
        self._explain = explain
        self.waiting = waiting

    def exchange(
        self,
        rows: Tensor,
        outgoing_T: Sequence[int],
        incoming_T: Sequence[int],
        dense_bytes: int | None = None,
    ) -> Tensor:
        """All-to-all of rows: send outgoing_T[t] of them to member t; returns those received.

        Args:
            rows: rows for all members, in their order, in which the result is too.
            outgoing_T: number of rows for each member.
            incoming_T: number of rows from each member.
            dense_bytes: size of what is sent, uncompressed; None: of `rows` as float32.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
            DlrmError: a member announced a negative number of rows; names it.
        """
        for member, count in enumerate(incoming_T):
            if count < 0:
                raise DlrmError(f"trainer {member} says that {count} rows follow")
        received = rows.new_empty(sum(incoming_T), *rows.shape[1:])
        self._all_to_all(received, rows, (list(incoming_T), list(outgoing_T)), dense_bytes).wait()
        return received

    def swap(self, messages_T: Sequence[bytes], sizes_T: Sequence[int]) -> list[bytes]:
        """Send and receive messages of known sizes, only between the members that have any.

        Args:
            messages_T: message for each member; empty for none.
            sizes_T: size of the message from each member.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
        """
        recvs = {member: torch.empty(size, dtype=torch.uint8) for member, size in _some(sizes_T)}
        sends = {
            member: torch.frombuffer(bytearray(messages_T[member]), dtype=torch.uint8)
            for member, _ in _some(list(map(len, messages_T)))
        }
        if recvs or sends:
            self._count(sum(map(len, sends.values())), 0, sum(map(len, recvs.values())))
            with self.waiting, self.explained():
                works = [self._gloo.send([t], member, 0) for member, t in sends.items()]
                works += [self._gloo.recv([t], member, 0) for member, t in recvs.items()]
                for work in works:
                    work.wait()
        return [
            recvs[member].numpy().tobytes() if member in recvs else b""
            for member in range(self._size)
        ]

    def all_to_all_single(
        self,
        output: Tensor,
        rows: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
    ) -> dist.Work:
        """The call behind torch.distributed.all_to_all_single."""
        return self._all_to_all(output, rows, (output_splits, input_splits), None)

    def _all_to_all(
        self,
        output: Tensor,
        rows: Tensor,
        splits: tuple[list[int], list[int]],
        dense_bytes: int | None,
    ) -> dist.Work:
        output_splits, input_splits = splits
        elements = self._exchanged(rows, input_splits)
        received = self._exchanged(output, output_splits)
        if dense_bytes is None:
            dense_bytes = elements * _plain_bytes(rows)
        if len(rows) or len(output):
            size = rows.element_size()
            self._count(elements * size, dense_bytes, received * size)
        with self.explained():
            work = self._gloo.alltoall_base(
                output, rows, output_splits, input_splits, dist.AllToAllOptions()
            )
        return _Pending(self, work)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        """The call behind torch.distributed.all_gather_into_tensor."""
        num_bytes = (self._size - 1) * tensor.numel() * tensor.element_size()
        dense_bytes = (self._size - 1) * tensor.numel() * _plain_bytes(tensor)
        self._count(num_bytes, dense_bytes, num_bytes)
        with self.explained():
            return _Pending(self, self._gloo._allgather_base(output, tensor))

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None
    ) -> dist.Work:
        """The call behind torch.distributed.all_gather; tensors may differ in rows."""
        (parts,), (tensor,) = outputs, tensors
        rows_T = [len(part) for part in parts]
        gathered = tensor.new_empty(sum(rows_T), *tensor.shape[1:])
        repeated = tensor.repeat(self._size, *(1 for _ in tensor.shape[1:]))
        work = self.all_to_all_single(gathered, repeated, rows_T, [len(tensor)] * self._size)

        def spread() -> None:
            for part, received in zip(parts, split(gathered, rows_T), strict=True):
                part.copy_(received)

        return _Pending(self, work, spread)

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, options: Any = None) -> dist.Work:
        """The call behind torch.distributed.reduce_scatter_tensor; the reduction is a sum."""
        return self._reduce_scatter(output, rows, [len(rows) // self._size] * self._size)

    def reduce_scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], options: Any = None
    ) -> dist.Work:
        """The call behind torch.distributed.reduce_scatter, a sum; parts may differ in rows."""
        (output,), (parts,) = outputs, tensors
        return self._reduce_scatter(output, torch.cat(parts), [len(part) for part in parts])

    def barrier(self, opts: Any = None) -> dist.Work:
        """The call behind torch.distributed.barrier; moves no tensor."""
        with self.explained():
            return _Pending(self, self._gloo.barrier())

    def _reduce_scatter(self, output: Tensor, rows: Tensor, rows_T: list[int]) -> dist.Work:
        parts = rows.new_empty(self._size, *output.shape)
        work = self.all_to_all_single(parts.flatten(0, 1), rows, [len(output)] * self._size, rows_T)
        return _Pending(self, work, lambda: torch.sum(parts, 0, out=output))

    def _exchanged(self, rows: Tensor, splits: list[int]) -> int:
        """Number of elements exchanged with other members; even parts if there are no splits."""
        count = len(rows)
        if not count:
            return 0
        local = splits[self._rank] if splits else count // self._size
        return (count - local) * (rows.numel() // count)

    @contextmanager
    def explained(self) -> Generator[None, None, None]:
        """Translate errors of gloo within the context."""
        try:
            yield
        except RuntimeError as error:
            raise self._explain(error) from error


@final
class _Pending(dist.Work):
    """A collective under way, and a step to do once it has ended."""

    def __init__(
        self, group: CountedGroup, work: dist.Work, then: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._then = then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._group.waiting, self._group.explained():
            self._work.wait()
        if self._then is not None:
            self._then()
            self._then = None
        return True


def _plain_bytes(tensor: Tensor) -> int:
    """Uncompressed size of one element: floats count as float32, integers as they are."""
    return FLOAT_BYTES if tensor.is_floating_point() else tensor.element_size()


def _some(sizes_T: Sequence[int]) -> list[tuple[int, int]]:
    """(member, size) of the members whose size is not 0."""
    return [(member, size) for member, size in enumerate(sizes_T) if size]


def split(tensor: Tensor, rows_T: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of consecutive rows of a tensor, rows_T[t] each."""
    parts: tuple[Tensor, ...] = torch.split(tensor, list(rows_T))
    return parts


_HEAD_BYTES = 4
_LATEST = 2  # messages, the shortest of which sets the room: those with new tables are rare


@final
class GroupMessages:
    """All-to-all of messages of one kind: each member sends one to every other per exchange.

    Messages are of any length, without a round for lengths, though a collective needs all sizes
    beforehand: both ends of a pair know the lengths of their last messages, so each part of the
    collective has room for a slightly longer one. What does not fit follows, between these two
    alone.

        a part    length, u32 │ the first bytes of the message │ zeros up to its room

    Args:
        group: that of the members, which all make the same exchanges.
        margin: the room is 1/margin longer than the latest messages.
    """

    def __init__(self, group: CountedGroup, margin: int) -> None:
        self._group = group
        self._outgoing_T = [_Lengths(margin) for _ in range(group.size())]
        self._incoming_T = [_Lengths(margin) for _ in range(group.size())]

    def exchange(self, messages_T: Sequence[bytes], dense_bytes: int) -> list[memoryview]:
        """Exchange messages with all members; returns those for this member.

        Args:
            messages_T: one for each member; empty for itself.
            dense_bytes: size of what is sent, uncompressed.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
        """
        rooms_T, data = [lengths.room for lengths in self._outgoing_T], bytearray()
        for room, message in zip(rooms_T, messages_T, strict=True):
            data += len(message).to_bytes(_HEAD_BYTES, "little") + message[:room]
            data += bytes(max(room - len(message), 0))
        outgoing_T, incoming_T = _sizes(self._outgoing_T), _sizes(self._incoming_T)
        buffer = torch.frombuffer(data, dtype=torch.uint8)
        received = self._group.exchange(buffer, outgoing_T, incoming_T, dense_bytes)
        parts_T = [memoryview(part.numpy().data) for part in split(received, incoming_T)]
        lengths_T = [int.from_bytes(part[:_HEAD_BYTES], "little") for part in parts_T]
        firsts_T = [
            part[_HEAD_BYTES:][:length] for part, length in zip(parts_T, lengths_T, strict=True)
        ]
        rests_T = self._group.swap(
            [message[room:] for room, message in zip(rooms_T, messages_T, strict=True)],
            [length - len(first) for length, first in zip(lengths_T, firsts_T, strict=True)],
        )
        for lengths, message in zip(self._outgoing_T, messages_T, strict=True):
            lengths.latest.append(len(message))
        for lengths, length in zip(self._incoming_T, lengths_T, strict=True):
            lengths.latest.append(length)
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


def _sizes(lengths_T: Sequence[_Lengths]) -> list[int]:
    return [_HEAD_BYTES + lengths.room for lengths in lengths_T]


BACKEND = "counted_gloo"
PATIENCE_SECONDS = 0.5  # until a process whose connections broke is known to have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Rendezvous, address and deadline of the members of a group.

    Attributes:
        rendezvous: that of the attempt.
        lost_peer: returns the rank that has left or leaves within so many seconds, None if none
            does; a connection may break a moment before this shows.
        address: interface to listen on, 127.0.0.1 unless members are on several machines.
        deadline_seconds: how long to wait for the others, at the start and in each collective.
    """

    rendezvous: Rendezvous
    lost_peer: Callable[[float], int | None]
    address: str
    deadline_seconds: float


@contextmanager
def process_group(
    members: Sequence[int], rank: int, options: GroupOptions, count: CountBytes, clock: SpanClock
) -> Generator[CountedGroup, None, None]:
    """Open the default process group of this process, for as long as the context lasts.

    All members must enter it, and no other process. A member's rank is its index in `members`.

    Args:
        members: ranks of the run, the same list for all.
        rank: this process's rank in the run, one of `members`.
        options: the same for all.
        count: called for every collective.
        clock: measures this member's waiting for collectives.

    Raises:
        DeadlineError: members did not join, or a collective took too long.
        PeerLostError: a member left during a collective.
    """
    place, size = members.index(rank), len(members)
    timeout = timedelta(seconds=options.deadline_seconds)
    _wait_for_members(members, rank, options)

    def explain(error: RuntimeError) -> Exception:
        return _explain(error, [member for member in members if member != rank], options)

    def create(backend_options: Any, _: object) -> CountedGroup:
        gloo_options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
        gloo_options._timeout = timeout
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname=options.address)]
        create_gloo: Any = dist.ProcessGroupGloo
        gloo = create_gloo(backend_options.store, place, size, gloo_options)
        return CountedGroup(gloo, count, explain, clock.waiting(COLLECTIVE))

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    store = options.rendezvous.store("embeddings")
    store.set_timeout(timeout)
    dist.init_process_group(BACKEND, store=store, rank=place, world_size=size, timeout=timeout)
    try:
        group = dist.group.WORLD
        assert isinstance(group, CountedGroup)
        yield group
    finally:
        dist.destroy_process_group()


def _wait_for_members(members: Sequence[int], rank: int, options: GroupOptions) -> None:
    names = {member: f"embeddings-{member}" for member in members}
    options.rendezvous.put(names[rank], "is here")
    texts = options.rendezvous.wait_for_all(names.values(), options.deadline_seconds)
    missing = [member for member, name in names.items() if name not in texts]
    if missing:
        raise DeadlineError(
            f"ranks {missing} did not join the embeddings' process group within "
            f"{options.deadline_seconds:g} s (network.patience_seconds)"
        )


def _explain(error: RuntimeError, peers: Sequence[int], options: GroupOptions) -> Exception:
    lost_rank = options.lost_peer(PATIENCE_SECONDS)
    if lost_rank is not None:
        return PeerLostError(lost_rank, "its part of the embeddings' collectives broke off")
    if "Timed out" in str(error):
        return DeadlineError(
            f"a collective of the embeddings with ranks {list(peers)} took longer than "
            f"{options.deadline_seconds:g} s (network.patience_seconds)",
            peers,
        )
    return DlrmError(f"a collective of the embeddings with ranks {list(peers)} failed: {error}")
