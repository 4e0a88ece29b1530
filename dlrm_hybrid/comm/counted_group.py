"""A gloo process group that counts its bytes; it has only the collectives TorchRec needs."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch import distributed as dist

from dlrm_hybrid.telemetry.spans import Within
from dlrm_hybrid.types import DlrmError

Count = Callable[[int, int, int], None]
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

    def __init__(self, gloo: Any, count: Count, explain: Explain, waiting: Within) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyright: ignore
        self._gloo = gloo
        self._rank: int = gloo.rank()
        self._size: int = gloo.size()
        self._count = count
        self._explain = explain
        self.waiting = waiting

    def exchange(
        self,
        given: Tensor,
        given_T: Sequence[int],
        taken_T: Sequence[int],
        dense_bytes: int | None = None,
    ) -> Tensor:
        """All-to-all of rows: send given_T[t] rows to member t; returns those received, in order.

        Args:
            given: rows for all members.
            given_T: number of rows for each member.
            taken_T: number of rows from each member.
            dense_bytes: size of what is sent, uncompressed; None: of `given` as float32.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
            DlrmError: a member announced a negative number of rows; names it.
        """
        for member, rows in enumerate(taken_T):
            if rows < 0:
                raise DlrmError(f"trainer {member} says that {rows} rows follow")
        taken = given.new_empty(sum(taken_T), *given.shape[1:])
        self._all_to_all(taken, given, (list(taken_T), list(given_T)), dense_bytes).wait()
        return taken

    def swap(self, given_T: Sequence[bytes], taken_T: Sequence[int]) -> list[bytes]:
        """Send and receive messages of known sizes, only between the members that have any.

        Args:
            given_T: message for each member; empty for none.
            taken_T: size of the message from each member.

        Raises:
            DeadlineError: it took too long.
            PeerLostError: a member has left.
        """
        taken = {member: torch.empty(size, dtype=torch.uint8) for member, size in _some(taken_T)}
        given = {
            member: torch.frombuffer(bytearray(given_T[member]), dtype=torch.uint8)
            for member, _ in _some(list(map(len, given_T)))
        }
        if taken or given:
            self._count(sum(map(len, given.values())), 0, sum(map(len, taken.values())))
            with self.waiting, self.explained():
                works = [self._gloo.send([one], member, 0) for member, one in given.items()]
                works += [self._gloo.recv([one], member, 0) for member, one in taken.items()]
                for work in works:
                    work.wait()
        return [
            taken[member].numpy().tobytes() if member in taken else b""
            for member in range(self._size)
        ]

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
    ) -> dist.Work:
        """The call behind torch.distributed.all_to_all_single."""
        return self._all_to_all(output, given, (output_splits, input_splits), None)

    def _all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        splits: tuple[list[int], list[int]],
        dense_bytes: int | None,
    ) -> dist.Work:
        output_splits, input_splits = splits
        elements = self._exchanged(given, input_splits)
        received = self._exchanged(output, output_splits)
        if dense_bytes is None:
            dense_bytes = elements * _plain_bytes(given)
        if len(given) or len(output):
            size = given.element_size()
            self._count(elements * size, dense_bytes, received * size)
        with self.explained():
            work = self._gloo.alltoall_base(
                output, given, output_splits, input_splits, dist.AllToAllOptions()
            )
        return _Pending(self, work)

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> dist.Work:
        """The call behind torch.distributed.all_gather_into_tensor."""
        num_bytes = (self._size - 1) * given.numel() * given.element_size()
        dense_bytes = (self._size - 1) * given.numel() * _plain_bytes(given)
        self._count(num_bytes, dense_bytes, num_bytes)
        with self.explained():
            return _Pending(self, self._gloo._allgather_base(output, given))

    def allgather(
        self, outputs: list[list[Tensor]], given: list[Tensor], options: Any = None
    ) -> dist.Work:
        """The call behind torch.distributed.all_gather; tensors may differ in rows."""
        (parts,), (mine,) = outputs, given
        rows_T = [len(part) for part in parts]
        taken = mine.new_empty(sum(rows_T), *mine.shape[1:])
        repeated = mine.repeat(self._size, *(1 for _ in mine.shape[1:]))
        work = self.all_to_all_single(taken, repeated, rows_T, [len(mine)] * self._size)

        def spread() -> None:
            for part, received in zip(parts, split(taken, rows_T), strict=True):
                part.copy_(received)

        return _Pending(self, work, spread)

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, options: Any = None
    ) -> dist.Work:
        """The call behind torch.distributed.reduce_scatter_tensor; the reduction is a sum."""
        return self._reduce_scatter(output, given, [len(given) // self._size] * self._size)

    def reduce_scatter(
        self, outputs: list[Tensor], given: list[list[Tensor]], options: Any = None
    ) -> dist.Work:
        """The call behind torch.distributed.reduce_scatter, a sum; parts may differ in rows."""
        (output,), (parts,) = outputs, given
        return self._reduce_scatter(output, torch.cat(parts), [len(part) for part in parts])

    def barrier(self, opts: Any = None) -> dist.Work:
        """The call behind torch.distributed.barrier; moves no tensor."""
        with self.explained():
            return _Pending(self, self._gloo.barrier())

    def _reduce_scatter(self, output: Tensor, given: Tensor, rows_T: list[int]) -> dist.Work:
        taken = given.new_empty(self._size, *output.shape)
        work = self.all_to_all_single(
            taken.flatten(0, 1), given, [len(output)] * self._size, rows_T
        )
        return _Pending(self, work, lambda: torch.sum(taken, 0, out=output))

    def _exchanged(self, rows: Tensor, splits: list[int]) -> int:
        """Number of elements exchanged with other members; even parts if there are no splits."""
        count = len(rows)
        if not count:
            return 0
        own = splits[self._rank] if splits else count // self._size
        return (count - own) * (rows.numel() // count)

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
