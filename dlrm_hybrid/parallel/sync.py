"""Sync policies as protocols: rules for the age of weights, pure and without tensors.

A policy owns both sides: what a worker needs before it computes, and what a server does with
the pushes to one bucket. To add a policy: such a class, and a row in the law tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dlrm_hybrid.types import DlrmError, Version


@dataclass(frozen=True, slots=True)
class Exactly:
    """Compute with this version, even if a newer one has arrived."""

    version: Version


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Compute with the newest version that has arrived, but none older than this one."""

    version: Version


Needs = Exactly | AtLeast


class Push(NamedTuple):
    """A worker's gradients for a bucket: its push `number`, counted from 0."""

    sender: int
    number: int


class Pull(NamedTuple):
    """A worker's request for the newest weights of a bucket.

    Attributes:
        sender: rank of the worker.
        number: number of its next push.
    """

    sender: int
    number: int


@dataclass(frozen=True, slots=True)
class Average:
    """Action: update the weights by the mean of these pushes, which makes the next version.

    Attributes:
        pushes: in the order in which they are summed.
        number: push number whose learning rate applies.
        staleness: number of versions made since the push's own; None if the policy fixes it.
    """

    pushes: tuple[Push, ...]
    number: int
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Action: send the version just made to these workers.

    Attributes:
        version: its number in their count.
        to: ranks; all of them are at the version before.
    """

    version: Version
    to: tuple[int, ...]


Action = Average | Publish


class BucketState(Protocol):
    """A server's immutable state of one bucket and of the workers that push to it."""

    @property
    def version(self) -> Version:
        """The newest version that has been made."""
        ...

    def on_push(self, push: Push) -> tuple[BucketState, tuple[Action, ...]]:
        """The state after a push, and the actions to take in order: at most one `Average`, first.

        Raises:
            DlrmError: the push is not due; names rank and number.
        """
        ...

    def on_pass(self, push: Push) -> tuple[BucketState, tuple[Action, ...]]:
        """The state after a worker has passed, with nothing to push; as `on_push`.

        Raises:
            DlrmError: the pass is not due, or the policy has none; names the rank.
        """
        ...

    def on_leave(self, worker: int) -> tuple[BucketState, tuple[Action, ...]]:
        """The state after a worker has left, and the actions to take; its earlier pushes count."""
        ...

    def on_pull(self, pull: Pull) -> BucketState:
        """The state after a pull, which is answered at once with the newest weights.

        Raises:
            DlrmError: the policy has no pulls; names the rank.
        """
        ...


class SyncPolicy(Protocol):
    """Decides which version of the weights a push is computed with, and when versions are made.

    The defaults here fit most policies: no history, versions per worker.
    """

    @property
    def history(self) -> int:
        """Number of versions before the newest with which a worker may still have to compute."""
        return 0

    @property
    def shares_versions(self) -> bool:
        """Whether all workers share their versions; else each has its own, and pulls."""
        return False

    def needs(self, pushed: int) -> Needs:
        """The version that a worker computes with after `pushed` pushes of its own.

        With versions per worker it never needs one from before its last pull.
        """
        ...

    def settled(self, pushed: int) -> Version:
        """The version that exists once `pushed` pushes of every worker have arrived.

        Without shared versions a worker counts its own pushes, and a server those of all.
        """
        return Version(pushed)

    def bucket(self, workers: Sequence[int], pushed: int) -> BucketState:
        """A server's initial state of one bucket, after `pushed` pushes of each worker.

        Without shared versions: after `pushed` pushes of all workers together.
        """
        ...


def check_due(what: str, number: int, due: int) -> None:
    """Refuse a push or pass unless its number is the one that is due.

    Args:
        what: name of the push or pass in the message.
        number: its number.
        due: number that must come next.

    Raises:
        DlrmError: another is due; names both.
    """
    if number < due:
        raise DlrmError(f"{what}: it came before; push {due} is due")
    if number > due:
        raise DlrmError(f"{what}: too early, push {due} is due")


def resumed_version(policy: SyncPolicy, pushed: int) -> Version:
    """The version that a worker resumes with after `pushed` pushes of each worker."""
    return Version(max(0, policy.settled(pushed) - policy.history))
