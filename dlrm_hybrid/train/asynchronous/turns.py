"""Round-robin: which trainer trains on which batch where trainers step together; elastic, pure.

All present trainers have the same number of turns from rest to rest, and never wait for each other
in vain: turns are dealt to all of them at once. While none is lost, batch n is part n mod T of step
n // T, as in lockstep. The turns of a lost trainer are dealt again, to those present; one with a
turn, but no batch, passes. A restarted trainer joins at a rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE, not_learned, with_own

PASS = -1
"""Stands for a turn without a batch."""


@final
@dataclass(frozen=True, slots=True)
class Turns:
    """The batches that are dealt, given out and done; immutable.

    Attributes:
        given: number of batches dealt since the run began.
        limit: number of batches that may be dealt.
        dealt: per trainer, the turns it has not been given yet.
        under_way: per trainer, the batches it has and is not done with.
        done: per trainer, number of batches done since the run began.
        returned: batches of lost trainers, which are dealt before all others.
        away: trainers that were lost and have not rejoined.
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
        """Start at rest, after so many batches of each trainer."""
        given, none = sum(done), ((),) * len(done)
        return Turns(given, given, none, none, done)

    @property
    def learned(self) -> int:
        """Number of batches done since the run began."""
        return sum(self.done)

    def until(self, limit: int) -> Turns:
        """Set another limit; raises ValueError if more is dealt already."""
        if limit < self.given:
            raise ValueError(f"limit {limit}: {self.given} batches are dealt already")
        return replace(self, limit=limit)

    def soon(self) -> Turns:
        """Lower the limit to the end of the last step of which batches are dealt."""
        trainers = len(self.done)
        return self.until(min(self.limit, -(-self.given // trainers) * trainers))

    def take(self, trainer: int, most: int = MOST_AT_ONCE) -> tuple[Turns, tuple[int, ...]]:
        """Take a present trainer's next batches, or `PASS` alone; nothing at the limit."""
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
        """Return a lost trainer's batches, to be dealt again.

        Those it was done with, but had not reported, are trained on twice.
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
        """Let a lost trainer rejoin.

        Raises:
            ValueError: other trainers are not at rest.
        """
        if any(self.dealt) or any(self.under_way):
            raise ValueError(f"trainer {trainer} joins while others have turns")
        return replace(self, away=self.away - {trainer})

    def finish(self, trainer: int, done: int) -> Turns:
        """Record that a trainer is done with so many batches since the run began.

        Raises:
            ValueError: the number is impossible.
        """
        left = not_learned(trainer, done, self.done[trainer], self.under_way[trainer])
        return replace(
            self,
            under_way=with_own(self.under_way, trainer, left),
            done=with_own(self.done, trainer, done),
        )

    def _deal(self, most: int) -> Turns:
        """Deal more turns to all present trainers, as long as there are batches."""
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
