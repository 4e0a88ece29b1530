"""Which trainer learns from which batch where trainers make steps together, and may be lost; pure.

All that are there have the same number of turns from rest to rest, and never wait for each other in
vain: turns are dealt to all of them at once. While nobody is lost, batch n is the part n mod T of
step n // T, as in lock-step. What a lost trainer had is dealt again, to those that are there; who
has a turn, but no batch, passes. Who comes again joins at a rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE, not_learned, with_own

PASS = -1
"""In place of a batch: a turn in which the trainer learns nothing."""


@final
@dataclass(frozen=True, slots=True)
class Turns:
    """What is dealt, given out and done; immutable.

    Attributes:
        given: batches dealt since the run began.
        limit: batches that may be dealt.
        dealt: of each trainer, the turns that it has not been given yet.
        under_way: of each trainer, batches it was given and has not learned from yet.
        done: of each trainer, how many it has learned from since the run began.
        returned: batches of trainers that were lost; they are dealt before all others.
        away: trainers that are lost, and have not come again.
    """

    given: int
    limit: int
    dealt: tuple[tuple[int, ...], ...]
    under_way: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]
    returned: tuple[int, ...] = ()
    away: frozenset[int] = frozenset()

    @staticmethod
    def begin(done: tuple[int, ...]) -> Turns:
        """At rest, after so many batches of each trainer."""
        given, none = sum(done), ((),) * len(done)
        return Turns(given, given, none, none, done)

    @property
    def learned(self) -> int:
        """Batches learned from since the run began."""
        return sum(self.done)

    def until(self, limit: int) -> Turns:
        """With another limit; raises ValueError if more is dealt already."""
        if limit < self.given:
            raise ValueError(f"limit {limit}: {self.given} batches are dealt already")
        return replace(self, limit=limit)

    def soon(self) -> Turns:
        """Up to the end of the step of which batches are dealt, but no further."""
        trainers = len(self.done)
        return self.until(min(self.limit, -(-self.given // trainers) * trainers))

    def take(self, trainer: int, most: int = MOST_AT_ONCE) -> tuple[Turns, tuple[int, ...]]:
        """The next batches of a trainer that is there, or `PASS` alone; nothing at the limit."""
        if trainer in self.away:
            return self, ()
        after = self if self.dealt[trainer] else self._deal(most)
        dealt = after.dealt[trainer]
        count = 1 if dealt[:1] == (PASS,) else (*dealt, PASS).index(PASS)
        turns = dealt[: min(count, most)]
        under_way = tuple(one for one in turns if one != PASS)
        after = replace(
            after,
            dealt=with_own(after.dealt, trainer, dealt[len(turns) :]),
            under_way=with_own(after.under_way, trainer, (*after.under_way[trainer], *under_way)),
        )
        return after, turns

    def lose(self, trainer: int) -> Turns:
        """A trainer is gone: what it has not learned from is dealt again.

        It may have learned from some of these without saying so: they are learned from twice.
        """
        had = (*self.under_way[trainer], *self.dealt[trainer])
        returned = sorted((*self.returned, *(one for one in had if one != PASS)))
        return replace(
            self,
            returned=tuple(returned),
            dealt=with_own(self.dealt, trainer, ()),
            under_way=with_own(self.under_way, trainer, ()),
            away=self.away | {trainer},
        )

    def join(self, trainer: int) -> Turns:
        """A trainer is there again.

        Raises:
            ValueError: others are not at rest.
        """
        if any(self.dealt) or any(self.under_way):
            raise ValueError(f"trainer {trainer} joins while others have turns")
        return replace(self, away=self.away - {trainer})

    def finish(self, trainer: int, done: int) -> Turns:
        """A trainer says that it has learned from so many batches since the run began.

        Raises:
            ValueError: that is not possible.
        """
        left = not_learned(trainer, done, self.done[trainer], self.under_way[trainer])
        return replace(
            self,
            under_way=with_own(self.under_way, trainer, left),
            done=with_own(self.done, trainer, done),
        )

    def _deal(self, most: int) -> Turns:
        """Some more turns for all that are there, as long as there are batches."""
        there = [one for one in range(len(self.done)) if one not in self.away]
        left = [*self.returned, *range(self.given, self.limit)][: most * len(there)]
        again = len(self.returned[: len(left)])
        dealt = [list(turns) for turns in self.dealt]
        for first in range(0, len(left), len(there)):
            for place, trainer in enumerate(there, first):
                dealt[trainer].append(left[place] if place < len(left) else PASS)
        return replace(
            self,
            given=self.given + len(left) - again,
            returned=self.returned[again:],
            dealt=tuple(tuple(turns) for turns in dealt),
        )
