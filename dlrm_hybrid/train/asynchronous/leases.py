"""Which trainer learns from which batch where trainers do not wait for each other; pure.

Batches of the run are numbered: batch n is part n mod T of step n // T. A trainer takes some of the
next ones, and some more before it has learned from all of these, so that it need not wait for them.
Up to the limit: there all come to rest, for an evaluation or a checkpoint, with nothing under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

from dlrm_hybrid.data.loader import LoaderState

T = TypeVar("T")

MOST_AT_ONCE = 8  # batches of a lease: so many share one message to the leader and its answer


@final
@dataclass(slots=True)
class Positions:
    """Where the batches of each step begin, since all were at rest.

    Attributes:
        after: gives the position of the next step's batches from one's; `Loader.after`.
    """

    after: Callable[[LoaderState], LoaderState]
    _first: int = 0
    _at: list[LoaderState] = field(default_factory=list[LoaderState])

    def begin(self, step: int, at: LoaderState) -> None:
        """At rest after so many steps; the next batches are there."""
        self._first, self._at = step, [at]

    def of(self, step: int) -> LoaderState:
        """Of the batches of this step."""
        while len(self._at) <= step - self._first:
            self._at.append(self.after(self._at[-1]))
        return self._at[step - self._first]


@final
@dataclass(frozen=True, slots=True)
class Leases:
    """What is given out, and what is done; immutable.

    Attributes:
        trainers: of the world.
        given: batches given out since the run began.
        limit: batches that may be given out.
        under_way: of each trainer, those it has not learned from yet.
        done: of each trainer, how many it has learned from since the run began.
        returned: batches of trainers that were lost; they are given out before all others.
        ahead: by how many batches a trainer may be ahead of the slowest that is there; None: of
            none.
        since: of each trainer, how many it had learned from when it was level with the slowest.
        away: trainers that are lost, and have not come again.
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
        """At rest, after so many batches of each trainer; for `ahead` all are level there."""
        given = sum(done)
        under_way = ((),) * len(done)
        return Leases(len(done), given, given, under_way, done, ahead=ahead, since=done)

    @property
    def learned(self) -> int:
        """Batches learned from since the run began."""
        return sum(self.done)

    def until(self, limit: int) -> Leases:
        """With another limit; raises ValueError if more is given out already."""
        if limit < self.given:
            raise ValueError(f"limit {limit}: {self.given} batches are given out already")
        return replace(self, limit=limit)

    def soon(self) -> Leases:
        """Up to the end of the step of which batches are given out, but no further."""
        return self.until(min(self.limit, -(-self.given // self.trainers) * self.trainers))

    def take(self, trainer: int, most: int = MOST_AT_ONCE) -> tuple[Leases, tuple[int, ...]]:
        """The next batches for a trainer; none at the limit.

        Fewer the nearer the limit is, and fewer for a trainer that has learned less than others: so
        all come to the limit at about the same time. One that has some under way gets none where
        that leaves less than one; and nobody gets one that it may not learn from yet (`ahead`). The
        slowest of those that are there can always go on.

        Args:
            trainer: which one.
            most: batches at once.

        Raises:
            ValueError: it has more than these under way.
        """
        under_way = self.under_way[trainer]
        if len(under_way) > most:
            raise ValueError(f"trainer {trainer} has batches {under_way} under way")
        left = len(self.returned) + self.limit - self.given
        share = most * (self.done[trainer] + 1) // (max(self.done) + 1)
        count = min(left, max(0 if under_way else 1, min(share, left // (2 * self.trainers))))
        if self.ahead is not None:
            # Several leases fit in, or those that are held would hear of others' progress too late.
            count = min(count, max(1, self.ahead // 4), self._slack(trainer))
        again = self.returned[:count]
        given = self.given + count - len(again)
        batches = (*again, *range(self.given, given))
        after = replace(self, given=given, returned=self.returned[count:])
        return after._with(trainer, (*under_way, *batches), self.done[trainer]), batches

    def lose(self, trainer: int) -> Leases:
        """A trainer is gone: others, or itself when it comes again, take what it has under way.

        It may have learned from some of these without saying so: they are learned from twice.
        """
        returned = tuple(sorted((*self.returned, *self.under_way[trainer])))
        after = replace(self, returned=returned, away=self.away | {trainer})
        return after._with(trainer, (), self.done[trainer])

    def join(self, trainer: int) -> Leases:
        """A trainer is there again, level with the slowest."""
        level = self.done[trainer] - self._slowest()
        since = with_own(self.since, trainer, level)
        return replace(self, since=since, away=self.away - {trainer})

    def finish(self, trainer: int, done: int) -> Leases:
        """A trainer says that it has learned from so many batches since the run began.

        Raises:
            ValueError: that is not possible.
        """
        left = not_learned(trainer, done, self.done[trainer], self.under_way[trainer])
        return self._with(trainer, left, done)

    def _slack(self, trainer: int) -> int:
        """How many more batches it may have than the slowest has learned from."""
        assert self.ahead is not None
        has = self.done[trainer] - self.since[trainer] + len(self.under_way[trainer])
        return self._slowest() + self.ahead - has

    def _slowest(self) -> int:
        """Batches that the slowest which is there has learned from since all were level."""
        trainers = [one for one in range(self.trainers) if one not in self.away]
        return min((self.done[one] - self.since[one] for one in trainers), default=0)

    def _with(self, trainer: int, under_way: tuple[int, ...], done: int) -> Leases:
        return replace(
            self,
            under_way=with_own(self.under_way, trainer, under_way),
            done=with_own(self.done, trainer, done),
        )


def not_learned(
    trainer: int, done: int, before: int, under_way: tuple[int, ...]
) -> tuple[int, ...]:
    """What a trainer still has under way when it says that it has learned from `done` batches.

    Args:
        trainer: which one, for the message.
        done: batches since the run began.
        before: those that it had told of.
        under_way: batches it was given since then, in their order.

    Raises:
        ValueError: that is not possible.
    """
    if not 0 <= done - before <= len(under_way):
        raise ValueError(
            f"trainer {trainer} has learned from {done} batches; it had done {before}, and "
            f"{len(under_way)} are under way"
        )
    return under_way[done - before :]


def with_own(of_all: tuple[T, ...], trainer: int, own: T) -> tuple[T, ...]:
    """A value for each trainer, with another one of one of them."""
    return (*of_all[:trainer], own, *of_all[trainer + 1 :])
