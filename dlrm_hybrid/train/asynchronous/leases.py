"""Leases: which trainer trains on which batch, where a leader gives them out; pure.

Batches of the run are numbered: batch n is part n mod T of step n // T. At the limit all trainers
come to rest, with nothing under way, for an evaluation or a checkpoint. A rule says which batches
are whose: of trainers at their own pace, or of those that step together.
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
    """The batches that are given out and done; immutable.

    Attributes:
        rule: says which batches are whose.
        given: number of batches given out since the run began.
        limit: number of batches that may be given out.
        under_way: per trainer, the batches it has and is not done with.
        done: per trainer, number of batches done since the run began.
        returned: batches of lost trainers, which are given out before all others.
        away: trainers that were lost and have not rejoined.
    """

    rule: OwnPace | InTurns
    given: int
    limit: int
    under_way: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]
    returned: tuple[int, ...] = ()
    away: frozenset[int] = frozenset()

    @staticmethod
    def begin(done: tuple[int, ...], rule: OwnPace | InTurns) -> Leases:
        """Start at rest, after so many batches of each trainer, which are all level."""
        total = sum(done)
        return Leases(rule.begin(done), total, total, ((),) * len(done), done)

    @property
    def learned(self) -> int:
        """Number of batches done since the run began."""
        return sum(self.done)

    @property
    def present(self) -> list[int]:
        """The trainers that are not away."""
        return [trainer for trainer in range(len(self.done)) if trainer not in self.away]

    def until(self, limit: int) -> Leases:
        """Set another limit; raises ValueError if more is given out already."""
        if limit < self.given:
            raise ValueError(f"limit {limit}: {self.given} batches are given out already")
        return replace(self, limit=limit)

    def soon(self) -> Leases:
        """Lower the limit to the end of the last step of which batches are given out."""
        trainers = len(self.done)
        return self.until(min(self.limit, -(-self.given // trainers) * trainers))

    def take(self, trainer: int, most: int = MOST_AT_ONCE) -> tuple[Leases, tuple[int, ...]]:
        """Lease the next batches to a trainer, `most` at once; none at the limit."""
        return self.rule.take(self, trainer, most)

    def lose(self, trainer: int) -> Leases:
        """Return a lost trainer's batches, for others or for itself after it rejoins.

        Those it was done with, but had not reported, are trained on twice.
        """
        rule, dealt = self.rule.lose(trainer)
        returned = sorted((*self.returned, *self.under_way[trainer], *dealt))
        leases = replace(self, rule=rule, returned=tuple(returned), away=self.away | {trainer})
        return leases.having(trainer, ())

    def join(self, trainer: int) -> Leases:
        """Let a lost trainer rejoin.

        Raises:
            ValueError: with `InTurns` other trainers are not at rest.
        """
        return replace(self, rule=self.rule.join(self, trainer), away=self.away - {trainer})

    def finish(self, trainer: int, done: int) -> Leases:
        """Record that a trainer is done with so many batches since the run began.

        Raises:
            ValueError: the number is impossible.
        """
        before, under_way = self.done[trainer], self.under_way[trainer]
        if not 0 <= done - before <= len(under_way):
            raise ValueError(
                f"trainer {trainer} has learned from {done} batches; it had done {before}, and "
                f"{len(under_way)} are under way"
            )
        leases = replace(self, done=with_own(self.done, trainer, done))
        return leases.having(trainer, under_way[done - before :])

    def having(self, trainer: int, under_way: tuple[int, ...]) -> Leases:
        """The leases with these batches under way with a trainer."""
        return replace(self, under_way=with_own(self.under_way, trainer, under_way))


@final
@dataclass(frozen=True, slots=True)
class OwnPace:
    """Rule of trainers that do not wait for each other.

    A trainer leases some of the next batches, and more before it is done with all of these, so that
    it need not wait.

    Attributes:
        ahead: most batches by which a trainer may lead the slowest present one; None: no bound.
        since: per trainer, number of batches done when it was level with the slowest.
    """

    ahead: int | None = None
    since: tuple[int, ...] = ()

    def begin(self, done: tuple[int, ...]) -> OwnPace:
        """The rule of trainers that are level after so many batches of each."""
        return replace(self, since=done)

    def take(self, leases: Leases, trainer: int, most: int) -> tuple[Leases, tuple[int, ...]]:
        """Lease the next batches to a trainer; none at the limit.

        Fewer near the limit, and fewer to a trainer that has done less than others, so that all
        reach the limit at about the same time. A trainer with batches under way gets none where
        that comes to less than one; and none gets a batch beyond its bound (`ahead`). The slowest
        present one can always go on.

        Raises:
            ValueError: it has more than `most` under way.
        """
        under_way, done = leases.under_way[trainer], leases.done
        if len(under_way) > most:
            raise ValueError(f"trainer {trainer} has batches {under_way} under way")
        room = len(leases.returned) + leases.limit - leases.given
        share = most * (done[trainer] + 1) // (max(done) + 1)
        count = min(room, max(0 if under_way else 1, min(share, room // (2 * len(done)))))
        if self.ahead is not None:
            lead = leases.done[trainer] - self.since[trainer] + len(leases.under_way[trainer])
            slack = self._slowest(leases) + self.ahead - lead
            # Several leases per bound, or trainers at it would learn of others' progress too late.
            count = min(count, max(1, self.ahead // 4), slack)
        redone = leases.returned[:count]
        stop = leases.given + count - len(redone)
        batches = (*redone, *range(leases.given, stop))
        leases = replace(leases, given=stop, returned=leases.returned[count:])
        return leases.having(trainer, (*under_way, *batches)), batches

    def lose(self, trainer: int) -> tuple[OwnPace, tuple[int, ...]]:
        """The rule without a trainer, and batches that were to be given to it alone."""
        return self, ()

    def join(self, leases: Leases, trainer: int) -> OwnPace:
        """The rule with a trainer that is level with the slowest."""
        level = leases.done[trainer] - self._slowest(leases)
        return replace(self, since=with_own(self.since, trainer, level))

    def _slowest(self, leases: Leases) -> int:
        """Number of batches of the slowest present trainer since all were level."""
        counts = (leases.done[trainer] - self.since[trainer] for trainer in leases.present)
        return min(counts, default=0)


PASS = -1
"""Stands for a turn without a batch."""


@final
@dataclass(frozen=True, slots=True)
class InTurns:
    """Rule of trainers that step together, round-robin.

    All present trainers have the same number of turns from rest to rest, and never wait for each
    other in vain: turns are dealt to all of them at once. While none is lost, batch n is part n mod
    T of step n // T, as in lockstep. The turns of a lost trainer are dealt again, to those present;
    one with a turn, but no batch, passes. A restarted trainer joins at a rest.

    Attributes:
        dealt: per trainer, the turns it has not been given yet.
    """

    dealt: tuple[tuple[int, ...], ...] = ()

    def begin(self, done: tuple[int, ...]) -> InTurns:
        """The rule of trainers that are level after so many batches of each."""
        return InTurns(((),) * len(done))

    def take(self, leases: Leases, trainer: int, most: int) -> tuple[Leases, tuple[int, ...]]:
        """Take a present trainer's next batches, or `PASS` alone; nothing at the limit."""
        if trainer in leases.away:
            return leases, ()
        all_dealt = self.dealt
        if not all_dealt[trainer]:
            leases, all_dealt = self._deal(leases, most)
        dealt = all_dealt[trainer]
        count = 1 if dealt[:1] == (PASS,) else (*dealt, PASS).index(PASS)
        turns = dealt[: min(count, most)]
        rest = InTurns(with_own(all_dealt, trainer, dealt[len(turns) :]))
        under_way = (*leases.under_way[trainer], *(turn for turn in turns if turn != PASS))
        return replace(leases, rule=rest).having(trainer, under_way), turns

    def lose(self, trainer: int) -> tuple[InTurns, tuple[int, ...]]:
        """The rule without a trainer, and batches that were to be given to it alone."""
        batches = tuple(turn for turn in self.dealt[trainer] if turn != PASS)
        return InTurns(with_own(self.dealt, trainer, ())), batches

    def join(self, leases: Leases, trainer: int) -> InTurns:
        """The rule with a trainer; raises ValueError if others are not at rest."""
        if any(self.dealt) or any(leases.under_way):
            raise ValueError(f"trainer {trainer} joins while others have turns")
        return self

    def _deal(self, leases: Leases, most: int) -> tuple[Leases, tuple[tuple[int, ...], ...]]:
        """Deal more turns to all present trainers, as long as there are batches."""
        present, returned = leases.present, leases.returned
        batches = [*returned, *range(leases.given, leases.limit)][: most * len(present)]
        redone = len(returned[: len(batches)])
        dealt = [list(turns) for turns in self.dealt]
        for start in range(0, len(batches), len(present)):
            for place, trainer in enumerate(present, start):
                dealt[trainer].append(batches[place] if place < len(batches) else PASS)
        given = leases.given + len(batches) - redone
        leases = replace(leases, given=given, returned=returned[redone:])
        return leases, tuple(tuple(turns) for turns in dealt)


def with_own(of_all: tuple[T, ...], trainer: int, value: T) -> tuple[T, ...]:
    """Replace one trainer's value in those of all."""
    return (*of_all[:trainer], value, *of_all[trainer + 1 :])
