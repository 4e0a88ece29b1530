"""The engine of a run and the holders of its tensors, as driver and checkpoints see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.train.progress import Decision, Plan, Progress
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import ScoredPart, Version

Show = Callable[[int, int], None]
"""Called now and then during a long task with the amount done, and the whole."""


def ignore(*_: object) -> None:
    """Do nothing, where there is nothing to show, to record or to do."""


IsLost = Callable[[int], bool]
"""Whether a rank was lost since a moment."""


def lost_since(losses: Sequence[int]) -> IsLost:
    """Count losses from now on: later incarnations take no part in tasks that began before."""
    mark = len(losses)
    return lambda rank: rank in losses[mark:]


class Holder(Protocol):
    """Holds tensors of a run's checkpoints, in one of its processes; by default it loses no rank.

    Attributes:
        messenger: to the other ranks.
    """

    messenger: Messenger

    @property
    def away(self) -> Collection[int]:
        """Lost ranks that may rejoin, without whose shards checkpoints are complete."""
        return ()

    @property
    def losses(self) -> Sequence[int]:
        """Ranks lost so far, in order, once per loss."""
        return ()

    def pieces(self) -> list[Piece]:
        """Views of all that a checkpoint must hold of this process; copying into them loads one."""
        ...

    def settled(self) -> Version:
        """Version of the servers' weights once all pushes made so far have arrived."""
        ...

    def pushed(self) -> Sequence[int] | None:
        """Pushes per worker of each stage so far; None if stages agree."""
        return None

    @property
    def looking_up(self) -> Sequence[int]:
        """The trainers that look up rows in this process."""
        return ()

    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        """Resume from the tensors of a checkpoint, except those of the tables."""
        ...


class Engine(Protocol):
    """Trains: all ranks of a world, or one that gives orders to the workers in other processes.

    By default there are no others, and a step leaves nothing to finish.

    Attributes:
        schedule: learning rate of the dense parameters, to report it.
    """

    schedule: LrSchedule

    @property
    def holder(self) -> Holder:
        """The holder of this process's tensors."""
        ...

    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        """Train on one batch per trainer.

        Args:
            step: number of steps done before.
            at: position of the batches.

        Returns:
            The metrics, as far as they are known here, and the position of the next batches.
        """
        ...

    def drain(self) -> StepMetrics | None:
        """Finish the batches in flight after the last step; None if steps leave none there."""
        return None

    def lower(self, step: int) -> None:
        """Lower learning rates from this step on, in all processes."""

    def meet(
        self, progress: Progress, plan: Plan, stop: StopRequest, is_late: bool
    ) -> tuple[Progress, Decision]:
        """Decide before every step and at the end, where due from what other processes report.

        Args:
            progress: progress of the run, as far as it is known.
            plan: plan of the run.
            stop: stop request of signals to this process.
            is_late: whether a checkpoint is due by the clock.

        Returns:
            The progress with what other processes have reported, and the decision.
        """
        ...

    def evaluate(self, part: ScoredPart, stop: StopRequest, show: Show) -> BinaryScores:
        """Score the master weights on a part of the rows.

        Args:
            part: the rows to score.
            stop: stop request of signals to this process.
            show: called with the rows done and their number.

        Raises:
            PreemptedError, InterruptedRunError: all processes have stopped at the same batch.
        """
        ...

    def departures(self) -> Mapping[str, Any]:
        """Counts of trainers that were lost or left, for the last event of the run."""
        return {}
