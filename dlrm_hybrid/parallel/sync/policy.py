"""What a rule for the age of weights decides, at workers and at servers; pure, without tensors.

A policy owns both machines: what a worker needs before it computes, and what a server does with
the pushes to one bucket. To add one: a file with such a class, and a row in the law tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dlrm_hybrid.types import DlrmError, Version


@dataclass(frozen=True, slots=True)
class Exactly:
    """Compute with this version and no newer one, whatever has come."""

    version: Version


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Compute with the newest version that has come, but with none older than this one."""

    version: Version


Needs = Exactly | AtLeast


class Push(NamedTuple):
    """The gradients that a worker pushes to a bucket for the `number`-th time, counted from 0."""

    sender: int
    number: int


class Pull(NamedTuple):
    """A worker asks for the newest weights of a bucket.

    Attributes:
        sender: its rank.
        number: of its next push.
    """

    sender: int
    number: int


@dataclass(frozen=True, slots=True)
class Average:
    """Update the weights by the mean of these pushes, which makes the next version.

    Attributes:
        pushes: in the order in which they are summed.
        number: the learning rate is that of this push number.
        staleness: versions made since that with which the push was computed; None where the policy
            fixes it.
    """

    pushes: tuple[Push, ...]
    number: int
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the version just made to these workers.

    Attributes:
        version: number by which they know it.
        to: ranks; all of them are at the version before.
    """

    version: Version
    to: tuple[int, ...]


Action = Average | Publish


class BucketState(Protocol):
    """What a server knows of the workers that push to one bucket; immutable."""

    @property
    def version(self) -> Version:
        """The newest that has been made."""
        ...

    def on_push(self, push: Push) -> tuple[BucketState, tuple[Action, ...]]:
        """The state after a push, and what to do now, in this order: at most one `Average`, first.

        Raises:
            DlrmError: the push is not due; names rank and number.
        """
        ...

    def on_pass(self, push: Push) -> tuple[BucketState, tuple[Action, ...]]:
        """The state after a worker has said that it has nothing to push; as `on_push`.

        Raises:
            DlrmError: it is not due, or nobody waits for it under this policy; names the rank.
        """
        ...

    def on_leave(self, worker: int) -> tuple[BucketState, tuple[Action, ...]]:
        """The state after a worker is gone, and what to do now; what has come from it counts."""
        ...

    def on_pull(self, pull: Pull) -> BucketState:
        """The state after a pull, which is answered at once with the newest weights.

        Raises:
            DlrmError: nobody pulls under this policy; names the rank.
        """
        ...


class SyncPolicy(Protocol):
    """Which version of the weights a push is computed with, and when versions are made.

    What most policies have in common is here: no history, versions of each worker's own.
    """

    @property
    def history(self) -> int:
        """Versions before the newest one with which a worker may still have to compute."""
        return 0

    @property
    def shares_versions(self) -> bool:
        """Whether all workers are sent the same; else each has versions of its own, and pulls."""
        return False

    def needs(self, pushed: int) -> Needs:
        """What a worker computes with after so many pushes of its own.

        Where the versions are its own it never needs one from before its last pull.
        """
        ...

    def settled(self, pushed: int) -> Version:
        """The version there is once every worker has pushed so often and all has arrived.

        Where versions are not shared: of whoever counts the pushes, a worker its own, a server all.
        """
        return Version(pushed)

    def bucket(self, workers: Sequence[int], pushed: int) -> BucketState:
        """A server's state of one bucket, settled after so many pushes of each worker.

        Where versions are not shared: after so many pushes of all workers together.
        """
        ...


def check_due(what: str, number: int, due: int) -> None:
    """Refuse what a worker sends unless it is numbered as is due.

    Args:
        what: for the message.
        number: of what came.
        due: number that must come next.

    Raises:
        DlrmError: another is due; names both.
    """
    if number < due:
        raise DlrmError(f"{what}: it came before; push {due} is due")
    if number > due:
        raise DlrmError(f"{what}: too early, push {due} is due")


def resumed_version(policy: SyncPolicy, pushed: int) -> Version:
    """What a worker has when a run goes on after so many pushes of each worker."""
    return Version(max(0, policy.settled(pushed) - policy.history))
