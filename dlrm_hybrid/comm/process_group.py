"""The process group beneath TorchRec's collectives: gloo on one interface, every byte counted.

Each member counts the tensor bytes it sends to others, without the part that stays with it or what
gloo adds; so over all members each byte counts once.

Shapes: T members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from dlrm_hybrid.comm.counted_group import Count, CountedGroup
from dlrm_hybrid.comm.rendezvous import Rendezvous
from dlrm_hybrid.telemetry.spans import COLLECTIVE, SpanClock
from dlrm_hybrid.types import DeadlineError, DlrmError, PeerLostError

BACKEND = "counted_gloo"
PATIENCE_SECONDS = 0.5  # until a process whose connections broke is known to have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Rendezvous, address and deadline of the members of a group.

    Attributes:
        rendezvous: that of the attempt.
        lost_peer: the rank that has left or leaves within so many seconds, None if none does; a
            connection may break a moment before this shows.
        address: interface to listen on, 127.0.0.1 unless members are on several machines.
        deadline_seconds: how long to wait for the others, at the start and in each collective.
    """

    rendezvous: Rendezvous
    lost_peer: Callable[[float], int | None]
    address: str
    deadline_seconds: float


@contextmanager
def process_group(
    members: Sequence[int], rank: int, options: GroupOptions, count: Count, clock: SpanClock
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
    _meet(members, rank, options)

    def explain(error: RuntimeError) -> Exception:
        return _explain(error, [one for one in members if one != rank], options)

    def create(given: Any, _: object) -> CountedGroup:
        gloo_options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore
        gloo_options._timeout = timeout
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname=options.address)]
        create_gloo: Any = dist.ProcessGroupGloo
        gloo = create_gloo(given.store, place, size, gloo_options)
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


def _meet(members: Sequence[int], rank: int, options: GroupOptions) -> None:
    names = {member: f"embeddings-{member}" for member in members}
    options.rendezvous.put(names[rank], "is here")
    found = options.rendezvous.wait_for_all(names.values(), options.deadline_seconds)
    missing = [member for member, name in names.items() if name not in found]
    if missing:
        raise DeadlineError(
            f"ranks {missing} did not join the embeddings' process group within "
            f"{options.deadline_seconds:g} s (network.patience_seconds)"
        )


def _explain(error: RuntimeError, others: Sequence[int], options: GroupOptions) -> Exception:
    gone = options.lost_peer(PATIENCE_SECONDS)
    if gone is not None:
        return PeerLostError(gone, "its part of the embeddings' collectives broke off")
    if "Timed out" in str(error):
        return DeadlineError(
            f"a collective of the embeddings with ranks {list(others)} took longer than "
            f"{options.deadline_seconds:g} s (network.patience_seconds)",
            others,
        )
    return DlrmError(f"a collective of the embeddings with ranks {list(others)} failed: {error}")
