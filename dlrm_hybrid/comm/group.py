"""The process group beneath TorchRec's collectives: a mesh of connections, every byte counted.

It has only the collectives that TorchRec needs. Each member counts the tensor bytes it sends to
others, without the part that stays with it; so over all members each byte counts once.

Shapes: T members.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch import distributed as dist

from dlrm_hybrid.comm.mesh import Buffer, Listener, Mesh
from dlrm_hybrid.comm.rendezvous import Endpoint, Rendezvous, endpoint_of
from dlrm_hybrid.telemetry.spans import COLLECTIVE, SpanClock, Within
from dlrm_hybrid.types import DeadlineError, DlrmError, PeerLostError

CountBytes = Callable[[int, int, int], None]
"""Called once per collective, with the bytes sent, their size as float32 and the bytes received."""

Explain = Callable[[OSError], Exception]
"""Translates an error of the connections."""

FLOAT_BYTES = 4


class Exchange(Protocol):
    """The connections of a group's members: see `comm.mesh.Mesh`."""

    place: int
    size: int

    def begin(self, outgoing_T: Sequence[Buffer], incoming_T: Sequence[Buffer]) -> int:
        """Begin an exchange; returns its number."""
        ...

    def finish(self, number: int) -> None:
        """Wait for the end of an exchange."""
        ...


@final
class CountedGroup(dist.ProcessGroup):
    """Collectives of the members; there are none but those below, so all bytes are counted.

    torch.distributed passes arguments by position, so parameters may have other names.

    A reduction is an all-to-all and a local sum in the order of the members: the same in every run.

    Args:
        mesh: the connections that do the work.
        count: called for every collective.
        explain: translates errors of the connections.
        waiting: span entered while this member waits for a collective.
    """

    def __init__(
        self, mesh: Exchange, count: CountBytes, explain: Explain, waiting: Within
    ) -> None:
        super().__init__(mesh.place, mesh.size)  # pyright: ignore
        self._mesh = mesh
        self._rank, self._size = mesh.place, mesh.size
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
        self._all_to_all(received, rows, (incoming_T, outgoing_T), dense_bytes).wait()
        return received

    def swap(
        self, messages_T: Sequence[Buffer], sizes_T: Sequence[int], dense_bytes: int = 0
    ) -> list[memoryview]:
        """Send and receive messages of known sizes; nothing is counted if there are none.

        Args:
            messages_T: message for each member; empty for none.
            sizes_T: size of the message from each member.
            dense_bytes: size of what is sent, uncompressed.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
        """
        received_T = [bytearray(size) for size in sizes_T]
        sent_bytes = sum(map(len, messages_T))
        if sent_bytes or sum(sizes_T):
            self._count(sent_bytes, dense_bytes, sum(sizes_T))
            self._begin(messages_T, received_T).wait()
        return [*map(memoryview, received_T)]

    def all_to_all_single(
        self,
        output: Tensor,
        rows: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
    ) -> dist.Work:
        """Exchange rows with all members, as torch.distributed.all_to_all_single asks for it."""
        return self._all_to_all(output, rows, (output_splits, input_splits), None)

    def _all_to_all(
        self,
        output: Tensor,
        rows: Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        dense_bytes: int | None,
    ) -> dist.Work:
        incoming_T, outgoing_T = (
            self._parts(tensor, rows_T)
            for tensor, rows_T in zip((output, rows), splits, strict=True)
        )
        return self._exchanged(outgoing_T, incoming_T, _times_as_float32(rows), dense_bytes)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        """Gather tensors of one shape, for torch.distributed.all_gather_into_tensor."""
        outgoing_T, incoming_T = [_bytes_of(tensor)] * self._size, self._parts(output, ())
        return self._exchanged(outgoing_T, incoming_T, _times_as_float32(tensor), None)

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None
    ) -> dist.Work:
        """The call behind torch.distributed.all_gather; tensors may differ in rows."""
        (parts,), (tensor,) = outputs, tensors
        outgoing_T, incoming_T = [_bytes_of(tensor)] * self._size, [*map(_bytes_of, parts)]
        return self._exchanged(outgoing_T, incoming_T, _times_as_float32(tensor), None)

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
        return self._begin([b"."] * self._size, [bytearray(1) for _ in range(self._size)])

    def _reduce_scatter(self, output: Tensor, rows: Tensor, rows_T: list[int]) -> dist.Work:
        parts = rows.new_empty(self._size, *output.shape)
        work = self.all_to_all_single(parts.flatten(0, 1), rows, [len(output)] * self._size, rows_T)
        return _Pending(self, work.wait, lambda: torch.sum(parts, 0, out=output))

    def _parts(self, tensor: Tensor, rows_T: Sequence[int]) -> list[memoryview]:
        """The bytes of consecutive rows, rows_T[t] each; even parts if none are given."""
        data = _bytes_of(tensor)
        row_bytes = len(data) // max(len(tensor), 1)
        rows_T = rows_T or [len(tensor) // self._size] * self._size
        ends = accumulate((row_bytes * rows for rows in rows_T), initial=0)
        return [data[begin:end] for begin, end in pairwise(ends)]

    def _exchanged(
        self,
        outgoing_T: Sequence[memoryview],
        incoming_T: Sequence[memoryview],
        plain: float,
        dense_bytes: int | None,
    ) -> dist.Work:
        """Exchange parts; what is sent takes `plain` times as much uncompressed, if not given."""
        own, received = outgoing_T[self._rank], incoming_T[self._rank]
        received[:] = own
        num_sent, num_received = (sum(map(len, parts_T)) for parts_T in (outgoing_T, incoming_T))
        if num_sent or num_received:
            sent_bytes = num_sent - len(own)
            dense_bytes = int(plain * sent_bytes) if dense_bytes is None else dense_bytes
            self._count(sent_bytes, dense_bytes, num_received - len(own))
        return self._begin(outgoing_T, incoming_T)

    def _begin(self, outgoing_T: Sequence[Buffer], incoming_T: Sequence[Buffer]) -> _Pending:
        with self.explained():
            number = self._mesh.begin(outgoing_T, incoming_T)
        return _Pending(self, lambda: self._mesh.finish(number))

    @contextmanager
    def explained(self) -> Generator[None, None, None]:
        """Translate errors of the connections within the context."""
        try:
            yield
        except OSError as error:
            raise self._explain(error) from error


@final
class _Pending(dist.Work):
    """A collective under way, and a step to do once it has ended."""

    def __init__(
        self,
        group: CountedGroup,
        finish: Callable[[], object],
        then: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self._finish = finish
        self._then = then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._group.waiting, self._group.explained():
            self._finish()
        if self._then is not None:
            self._then()
            self._then = None
        return True


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they are; ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("a collective takes contiguous tensors")
    # `view` refuses other types where the stride of a single element is not 1.
    begin, size = tensor.storage_offset() * tensor.element_size(), (tensor.nbytes,)
    data = torch.empty(0, dtype=torch.uint8)
    return data.set_(tensor.untyped_storage(), begin, size, (1,)).numpy().data


def _times_as_float32(tensor: Tensor) -> float:
    """How many times as much an element takes uncompressed: floats as float32, integers as is."""
    return FLOAT_BYTES / tensor.element_size() if tensor.is_floating_point() else 1.0


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
        self._rank = group.rank()
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
        rooms_T = [lengths.room for lengths in self._outgoing_T]
        parts_T = [
            len(message).to_bytes(_HEAD_BYTES, "little") + message[:room].ljust(room, b"\0")
            for room, message in zip(rooms_T, messages_T, strict=True)
        ]
        sizes_T = [_HEAD_BYTES + lengths.room for lengths in self._incoming_T]
        parts_T[self._rank], sizes_T[self._rank] = b"", 0
        received_T = self._group.swap(parts_T, sizes_T, dense_bytes)
        lengths_T = [int.from_bytes(part[:_HEAD_BYTES], "little") for part in received_T]
        firsts_T = [
            part[_HEAD_BYTES:][:length] for part, length in zip(received_T, lengths_T, strict=True)
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
            memoryview(bytes(first) + rest) if len(rest) else first
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


BACKEND = "counted"
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
    members: Sequence[int],
    rank: int,
    options: GroupOptions,
    count: CountBytes,
    clock: SpanClock,
    mesh: Exchange | None = None,
) -> Generator[CountedGroup, None, None]:
    """Open the default process group of this process, for as long as the context lasts.

    All members must enter it, and no other process. A member's rank is its index in `members`.

    Args:
        members: ranks of the run, the same list for all.
        rank: this process's rank in the run, one of `members`.
        options: the same for all.
        count: called for every collective.
        clock: measures this member's waiting for collectives.
        mesh: connections to use in place of new ones.

    Raises:
        DeadlineError: members did not join, or a collective took too long.
        PeerLostError: a member left before it joined, or during a collective.
    """

    def explain(error: OSError) -> Exception:
        return _explain(error, [member for member in members if member != rank], options)

    connected = _connected(members, rank, options, explain) if mesh is None else nullcontext(mesh)
    with connected as exchange:
        group = CountedGroup(exchange, count, explain, clock.waiting(COLLECTIVE))

        def create(*_: object) -> CountedGroup:
            return group

        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
        timeout = timedelta(seconds=options.deadline_seconds)
        store = options.rendezvous.store("embeddings")
        store.set_timeout(timeout)
        dist.init_process_group(
            BACKEND, store=store, rank=group.rank(), world_size=group.size(), timeout=timeout
        )
        try:
            yield group
        finally:
            dist.destroy_process_group()


@contextmanager
def _connected(
    members: Sequence[int], rank: int, options: GroupOptions, explain: Explain
) -> Generator[Mesh, None, None]:
    """Connections of this member to all others, once all are there."""

    def check() -> None:
        options.rendezvous.check()
        if (lost_rank := options.lost_peer(0.0)) is not None:
            raise PeerLostError(lost_rank, "not all have joined the embeddings' process group")

    rendezvous, seconds = replace(options.rendezvous, check=check), options.deadline_seconds
    try:
        with closing(Listener(options.address)) as listener:
            endpoints = _endpoints(members, rank, rendezvous, seconds, listener.endpoint)
            mesh = listener.connect(members.index(rank), endpoints, seconds, check)
    except OSError as error:
        raise explain(error) from error
    with closing(mesh):
        yield mesh


def _endpoints(
    members: Sequence[int], rank: int, rendezvous: Rendezvous, seconds: float, own: Endpoint
) -> list[Endpoint]:
    """The address where each member listens."""
    names = {member: f"embeddings-{member}" for member in members}
    rendezvous.put(names[rank], own.to_json())
    texts = rendezvous.wait_for_all(names.values(), seconds)
    missing = [member for member, name in names.items() if name not in texts]
    if missing:
        raise DeadlineError(
            f"ranks {missing} did not join the embeddings' process group within "
            f"{seconds:g} s (network.patience_seconds)"
        )
    return [endpoint_of(texts[name], f"{rendezvous}/{name}") for name in names.values()]


def _explain(error: OSError, peers: Sequence[int], options: GroupOptions) -> Exception:
    lost_rank = options.lost_peer(PATIENCE_SECONDS)
    if lost_rank is not None:
        return PeerLostError(lost_rank, "its part of the embeddings' collectives broke off")
    if isinstance(error, TimeoutError):
        return DeadlineError(
            f"a collective of the embeddings with ranks {list(peers)} took longer than "
            f"{options.deadline_seconds:g} s (network.patience_seconds)",
            peers,
        )
    return DlrmError(f"a collective of the embeddings with ranks {list(peers)} failed: {error}")
