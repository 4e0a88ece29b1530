"""Which trainers are there, where one may be lost and come again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Roll:
    """Which trainers take part in one attempt of a run, and which are away.

    Attributes:
        trainers: T.
        stages: W; worker (t, w) has rank t W + w.
        incarnations: of each trainer, how often it had been started before the one that is known.
        away: trainers that are lost and have not asked for batches since.
        losses: ranks of trainers that were lost, in their order, each time.
        leaving: trainers that are to leave as soon as they can.
        lost: how often a trainer was.
        left: how often one has left by itself, with nothing under way.
        redone: batches that had been given to trainers that were lost, and were given out again.
    """

    trainers: int
    stages: int
    incarnations: list[int] = field(init=False)
    away: set[int] = field(default_factory=set[int])
    losses: list[int] = field(default_factory=list[int])
    leaving: set[int] = field(default_factory=set[int])
    lost: int = 0
    left: int = 0
    redone: int = 0

    def __post_init__(self) -> None:
        self.incarnations = [0] * self.trainers

    @property
    def present(self) -> list[int]:
        """The trainers that are not away."""
        return [one for one in range(self.trainers) if one not in self.away]

    def workers(self, trainers: Collection[int]) -> list[int]:
        """Ranks of all workers of these trainers."""
        return [one * self.stages + stage for one in trainers for stage in range(self.stages)]

    def away_workers(self) -> list[int]:
        """Ranks of the workers that are away."""
        return self.workers(self.away)

    def lose(self, trainer: int, incarnation: int, redone: int, *, has_left: bool) -> None:
        """A trainer is gone; the next that is known of it has this incarnation.

        Args:
            trainer: which one.
            incarnation: above that of all that is gone.
            redone: batches it had under way.
            has_left: it has said goodbye.
        """
        self.incarnations[trainer] = incarnation
        self.away.add(trainer)
        self.losses += self.workers([trainer])
        self.leaving.discard(trainer)
        self.left += has_left
        self.lost += not has_left
        self.redone += redone


@final
@dataclass(frozen=True, slots=True)
class Since:
    """What has been lost since a moment: later incarnations take no part in what began then."""

    losses: Sequence[int]
    mark: int

    @staticmethod
    def now(losses: Sequence[int]) -> Since:
        """From now on."""
        return Since(losses, len(losses))

    def is_lost(self, rank: int) -> bool:
        """Whether a rank was lost since then."""
        return rank in self.losses[self.mark :]
