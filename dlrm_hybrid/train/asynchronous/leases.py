"""Which trainer learns from which batch where trainers do not wait for each other; pure.

Batches of the run are numbered: batch n is part n mod T of step n // T. A trainer that has nothing
to do takes some of the next ones. Up to the limit: there all come to rest, for an evaluation or a
checkpoint, and nothing is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import final

from dlrm_hybrid.data.loader import LoaderState

MOST_AT_ONCE = 8  # batches of a lease: so many share one round trip to the leader


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
    """

    trainers: int
    given: int
    limit: int
    under_way: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]
    returned: tuple[int, ...] = ()

    @staticmethod
    def begin(done: tuple[int, ...]) -> Leases:
        """At rest, after so many batches of each trainer."""
        given = sum(done)
        return Leases(len(done), given, given, ((),) * len(done), done)

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
        """The next batches for a trainer that has none; none at the limit.

        Fewer the nearer the limit is, and fewer for a trainer that has learned less than others: so
        all come to the limit at about the same time.

        Args:
            trainer: which one.
            most: batches at once.

        Raises:
            ValueError: it has some.
        """
        if self.under_way[trainer]:
            raise ValueError(f"trainer {trainer} has batches {self.under_way[trainer]} under way")
        left = len(self.returned) + self.limit - self.given
        share = most * (self.done[trainer] + 1) // (max(self.done) + 1)
        count = min(left, max(1, min(share, left // (2 * self.trainers))))
        again = self.returned[:count]
        given = self.given + count - len(again)
        batches = (*again, *range(self.given, given))
        after = replace(self, given=given, returned=self.returned[count:])
        return after._with(trainer, batches, self.done[trainer]), batches

    def lose(self, trainer: int) -> Leases:
        """A trainer is gone: others, or itself when it comes again, take what it has under way.

        It may have learned from some of these without saying so: they are learned from twice.
        """
        returned = tuple(sorted((*self.returned, *self.under_way[trainer])))
        return replace(self, returned=returned)._with(trainer, (), self.done[trainer])

    def finish(self, trainer: int, done: int) -> Leases:
        """A trainer says that it has learned from so many batches since the run began.

        Raises:
            ValueError: that is not possible.
        """
        new = done - self.done[trainer]
        if not 0 <= new <= len(self.under_way[trainer]):
            raise ValueError(
                f"trainer {trainer} has learned from {done} batches; it had done "
                f"{self.done[trainer]}, and {len(self.under_way[trainer])} are under way"
            )
        return self._with(trainer, self.under_way[trainer][new:], done)

    def _with(self, trainer: int, under_way: tuple[int, ...], done: int) -> Leases:
        rest = slice(trainer + 1, None)
        return replace(
            self,
            under_way=(*self.under_way[:trainer], under_way, *self.under_way[rest]),
            done=(*self.done[:trainer], done, *self.done[rest]),
        )
