"""Leases: which trainer trains on which batch where trainers do not wait for each other; pure.

Batches of the run are numbered: batch n is part n mod T of step n // T. A trainer leases some of
the next ones, and more before it is done with all of these, so that it need not wait. At the limit
all come to rest, with nothing under way, for an evaluation or a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

from dlrm_hybrid.data.loader import LoaderState

T = TypeVar("T")

MOST_AT_ONCE = 8  # most batches of a lease, which share one message to the leader and its answer


@final
@dataclass(slots=True)
class Positions:
    """Positions of the batches of each step since the last rest.

    Attributes:
        after: position of the next step's batches, from that of one; `Loader.after`.
    """

    after: Callable[[LoaderState], LoaderState]
    _first: int = 0
    _at: list[LoaderState] = field(default_factory=list[LoaderState])

    def begin(self, step: int, at: LoaderState) -> None:
        """Start from a rest after so many steps, with the position of the next batches."""
        self._first, self._at = step, [at]

    def of(self, step: int) -> LoaderState:
        """Position of the batches of a step."""
        while len(self._at) <= step - self._first:
            self._at.append(self.after(self._at[-1]))
        return self._at[step - self._first]


@final
@dataclass(frozen=True, slots=True)
class Leases:
    """The batches that are leased and done; immutable.

    Attributes:
        trainers: number of trainers.
        given: number of batches given out since the run began.
        limit: number of batches that may be given out.
        under_way: per trainer, the batches it has and is not done with.
        done: per trainer, number of batches done since the run began.
        returned: batches of lost trainers, which are given out before all others.
        ahead: most batches by which a trainer may lead the slowest present one; None: no bound.
        since: per trainer, number of batches done when it was level with the slowest.
        away: trainers that were lost and have not rejoined.
    """

    trainers: int
    given: int
    limit: int
    under_way: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]
    returned: tuple[int, ...] = ()
    ahead: int | None = None
    since: tuple[int, ...] = ()
    away: frozenset[int] = frozenset()

    @staticmethod
    def begin(done: tuple[int, ...], ahead: int | None = None) -> Leases:
        """Start at rest, after so many batches of each trainer; for `ahead` all are level."""
        total = sum(done)
        under_way = ((),) * len(done)
        return Leases(len(done), total, total, under_way, done, ahead=ahead, since=done)

    @property
    def learned(self) -> int:
        """Number of batches done since the run began."""
        return sum(self.done)

    def until(self, limit: int) -> Leases:
        """Set another limit; raises ValueError if more is given out already."""
        if limit < self.given:
            raise ValueError(f"limit {limit}: {self.given} batches are given out already")
        return replace(self, limit=limit)

    def soon(self) -> Leases:
        """Lower the limit to the end of the last step of which batches are given out."""
        return self.until(min(self.limit, -(-self.given // self.trainers) * self.trainers))

    def take(self, trainer: int, most: int = MOST_AT_ONCE) -> tuple[Leases, tuple[int, ...]]:
        """Lease the next batches to a trainer; none at the limit.

        Fewer near the limit, and fewer to a trainer that has done less than others, so that all
        reach the limit at about the same time. A trainer with batches under way gets none where
        that comes to less than one; and none gets a batch beyond its bound (`ahead`). The slowest
        present one can always go on.

        Args:
            trainer: number of the trainer.
            most: most batches at once.

        Raises:
            ValueError: it has more than that under way.
        """
        under_way = self.under_way[trainer]
        if len(under_way) > most:
            raise ValueError(f"trainer {trainer} has batches {under_way} under way")
        room = len(self.returned) + self.limit - self.given
        share = most * (self.done[trainer] + 1) // (max(self.done) + 1)
        count = min(room, max(0 if under_way else 1, min(share, room // (2 * self.trainers))))
        if self.ahead is not None:
            # Several leases per bound, or trainers at it would learn of others' progress too late.
            count = min(count, max(1, self.ahead // 4), self._slack(trainer))
        redone = self.returned[:count]
        stop = self.given + count - len(redone)
        batches = (*redone, *range(self.given, stop))
        leases = replace(self, given=stop, returned=self.returned[count:])
        return leases._with(trainer, (*under_way, *batches), self.done[trainer]), batches

    def lose(self, trainer: int) -> Leases:
        """Return a lost trainer's batches under way, for others or for itself after it rejoins.

        Those it was done with, but had not reported, are trained on twice.
        """
        returned = tuple(sorted((*self.returned, *self.under_way[trainer])))
        leases = replace(self, returned=returned, away=self.away | {trainer})
        return leases._with(trainer, (), self.done[trainer])

    def join(self, trainer: int) -> Leases:
        """Let a lost trainer rejoin, level with the slowest."""
        level = self.done[trainer] - self._slowest()
        since = with_own(self.since, trainer, level)
        return replace(self, since=since, away=self.away - {trainer})

    def finish(self, trainer: int, done: int) -> Leases:
        """Record that a trainer is done with so many batches since the run began.

        Raises:
            ValueError: the number is impossible.
        """
        under_way = not_learned(trainer, done, self.done[trainer], self.under_way[trainer])
        return self._with(trainer, under_way, done)

    def _slack(self, trainer: int) -> int:
        """Number of batches that `ahead` still allows a trainer."""
        assert self.ahead is not None
        lead = self.done[trainer] - self.since[trainer] + len(self.under_way[trainer])
        return self._slowest() + self.ahead - lead

    def _slowest(self) -> int:
        """Number of batches of the slowest present trainer since all were level."""
        trainers = [trainer for trainer in range(self.trainers) if trainer not in self.away]
        return min((self.done[trainer] - self.since[trainer] for trainer in trainers), default=0)

    def _with(self, trainer: int, under_way: tuple[int, ...], done: int) -> Leases:
        return replace(
            self,
            under_way=with_own(self.under_way, trainer, under_way),
            done=with_own(self.done, trainer, done),
        )


def not_learned(
    trainer: int, done: int, before: int, under_way: tuple[int, ...]
) -> tuple[int, ...]:
    """The batches a trainer has under way once it is done with `done` batches in all.

    Args:
        trainer: its number, for the message.
        done: number of batches since the run began.
        before: the number that it reported before.
        under_way: batches it was given since then, in their order.

    Raises:
        ValueError: the number is impossible.
    """
    if not 0 <= done - before <= len(under_way):
        raise ValueError(
            f"trainer {trainer} has learned from {done} batches; it had done {before}, and "
            f"{len(under_way)} are under way"
        )
    return under_way[done - before :]


def with_own(of_all: tuple[T, ...], trainer: int, value: T) -> tuple[T, ...]:
    """Replace one trainer's value in those of all."""
    return (*of_all[:trainer], value, *of_all[trainer + 1 :])
