"""Attendance of trainers that may be lost and rejoin."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Attendance:
    """The trainers present in one attempt of a run, and those that are away.

    Attributes:
        trainers: T, number of trainers.
        stages: W, number of stages; worker (t, w) has rank t W + w.
        incarnations: per trainer, how often it was started before the known process.
        away: trainers that were lost and have not rejoined.
        losses: ranks of workers of lost trainers, in order, once per loss.
        leaving: trainers that are to leave as soon as possible.
        lost: number of losses.
        left: number of orderly departures, with nothing under way.
        redone: number of batches of lost trainers that were given out again.
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
        """Record that a trainer is lost; its next process has this incarnation.

        Args:
            trainer: number of the trainer.
            incarnation: higher than those of its lost workers.
            redone: number of batches it had under way.
            has_left: whether it left with a goodbye.
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
class LossesSince:
    """The losses since a moment: later incarnations take no part in what began then."""

    losses: Sequence[int]
    mark: int

    @staticmethod
    def now(losses: Sequence[int]) -> LossesSince:
        """Start at the present losses."""
        return LossesSince(losses, len(losses))

    def is_lost(self, rank: int) -> bool:
        """Whether a rank was lost since then."""
        return rank in self.losses[self.mark :]
