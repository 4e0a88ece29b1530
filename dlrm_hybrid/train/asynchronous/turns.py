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
        total, empty = sum(done), ((),) * len(done)
        return Turns(total, total, empty, empty, done)

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
        state = self if self.dealt[trainer] else self._deal(most)
        dealt = state.dealt[trainer]
        count = 1 if dealt[:1] == (PASS,) else (*dealt, PASS).index(PASS)
        turns = dealt[: min(count, most)]
        under_way = tuple(turn for turn in turns if turn != PASS)
        state = replace(
            state,
            dealt=with_own(state.dealt, trainer, dealt[len(turns) :]),
            under_way=with_own(state.under_way, trainer, (*state.under_way[trainer], *under_way)),
        )
        return state, turns

    def lose(self, trainer: int) -> Turns:
        """Return a lost trainer's batches, to be dealt again.

        Those it was done with, but had not reported, are trained on twice.
        """
        turns = (*self.under_way[trainer], *self.dealt[trainer])
        returned = sorted((*self.returned, *(turn for turn in turns if turn != PASS)))
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
        under_way = not_learned(trainer, done, self.done[trainer], self.under_way[trainer])
        return replace(
            self,
            under_way=with_own(self.under_way, trainer, under_way),
            done=with_own(self.done, trainer, done),
        )

    def _deal(self, most: int) -> Turns:
        """Deal more turns to all present trainers, as long as there are batches."""
        present = [trainer for trainer in range(len(self.done)) if trainer not in self.away]
        batches = [*self.returned, *range(self.given, self.limit)][: most * len(present)]
        redone = len(self.returned[: len(batches)])
        dealt = [list(turns) for turns in self.dealt]
        for start in range(0, len(batches), len(present)):
            for place, trainer in enumerate(present, start):
                dealt[trainer].append(batches[place] if place < len(batches) else PASS)
        return replace(
            self,
            given=self.given + len(batches) - redone,
            returned=self.returned[redone:],
            dealt=tuple(tuple(turns) for turns in dealt),
        )
