"""What a run is made of: how far it is, how far it goes, and the functions that do the work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from dlrm_hybrid.checkpoint.commit import Saved
from dlrm_hybrid.data.loader import START, LoaderState
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.meter import Interval
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.sinks import Sink
from dlrm_hybrid.types import DataError

AGREE_EVERY = 10  # steps, or groups of test batches, between agreements where nothing is due
TICK_SECONDS = 0.5  # between two events for the eye


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; with the tensors, all that resuming needs.

    Attributes:
        step: steps done.
        samples: rows learned from, of all trainers.
        loader: where the next batch begins.
        interval: sums since the last point of the loss curve.
        evaluated_step: the step of the last evaluation on record, -1 before the first.
        test_loss: of that evaluation; None in a process that does not tell it.
    """

    step: int = 0
    samples: int = 0
    loader: LoaderState = START
    interval: Interval = Interval()
    evaluated_step: int = -1
    test_loss: float | None = None

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], source: Path) -> Progress:
        """Back from the JSON that `asdict` of this class became.

        Args:
            facts: the JSON.
            source: of the facts, for messages.

        Raises:
            DataError: they are something else; names the field.
        """
        try:
            return TypeAdapter(cls).validate_json(json.dumps(facts), strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in ("progress", *fault["loc"]))
            told = f"{where!r} is {fault['input']!r:.80}: {fault['msg']}"
            raise DataError(f"{source}: {told}") from None

    def plus(self, *intervals: Interval) -> Progress:
        """With more sums since the last point."""
        return replace(self, interval=self.interval.plus(*intervals))


@dataclass(frozen=True, slots=True)
class Learned:
    """What one step taught, as far as this process knows it: sums over its rows.

    Attributes:
        loss_sum: of the loss before the update; 0 where no loss is computed.
        correct: rows on the right side of one half.
        rows: that the sums are over; 0 where no loss is computed.
        lr: of the dense parameters in this step.
    """

    loss_sum: float
    correct: int
    rows: int
    lr: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What all processes do before a step.

    Attributes:
        severity: how much somebody wants to stop, a `StopRequest.severity`.
        save: a checkpoint, because the last one is long ago.
    """

    severity: int = 0
    save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Length of the run and what happens every so many steps; 0 is never.

    Attributes:
        steps: of the whole run, those before a resume included.
        samples_per_step: rows of all trainers.
        checkpoint_minutes: at most between checkpoints, up to the next step at which processes
            meet; the leader's clock decides.
    """

    steps: int
    samples_per_step: int
    report_every: int
    evaluate_every: int
    checkpoint_every: int
    checkpoint_minutes: float

    def meets(self, step: int) -> bool:
        """Whether processes agree about how to go on before this step, or at the end."""
        return self.anything_due(step) or step % AGREE_EVERY == 0

    def anything_due(self, step: int) -> bool:
        """Whether anything falls due at this step, the end of the run included."""
        periods = (self.report_every, self.evaluate_every, self.checkpoint_every)
        return step >= self.steps or any(is_due(step, every) for every in periods)


class CheckpointWriter(Protocol):
    """Saves checkpoints of a run, one at a time.

    Where several processes run the loop, all of them call the same methods at the same steps.
    """

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is on its way."""
        ...

    def save(self, progress: Progress) -> None:
        """Copy what a checkpoint holds; all else goes on behind the caller's back."""
        ...

    def poll(self) -> Saved | None:
        """The one on its way if it has become valid, and this process leads; does not wait.

        Raises:
            ResourceError: a rank cannot write; names it, the file and the key.
            ConfigError: the run folder is not the same for all ranks.
        """
        ...

    def finish(self) -> Saved | None:
        """As `poll`, but wait; afterwards nothing is on its way."""
        ...

    def amend(self, progress: Progress) -> None:
        """Let the checkpoint of this step, which is valid, say what else is known now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes:
        learn: makes the step with this number from the batch at this position; returns what it
            taught and the position of the next batch.
        meet: called before every step and at the end, with whether a checkpoint is due by this
            process's clock; may bring in what other processes know, and says what all of them do.
        evaluate: scores the model on the test part; None in a process that does not tell them.
        saver: of checkpoints.
        sink: takes the events on record.
        live: takes what only a person at a terminal needs.
        meter: of this process; hears of every step, evaluation and checkpoint.
    """

    learn: Callable[[int, LoaderState], tuple[Learned, LoaderState]]
    meet: Callable[[Progress, bool], tuple[Progress, Decision]]
    evaluate: Callable[[], BinaryScores | None]
    saver: CheckpointWriter
    sink: Sink
    live: Callable[[Event], None]
    meter: RankMeter


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps falls due at `step`; 0 is never."""
    return every > 0 and step > 0 and step % every == 0


def working(live: Callable[[Event], None], task: str, unit: str) -> Callable[[int, int], None]:
    """Tells now and then how much of how much is done of something that takes a while.

    Args:
        live: takes the events.
        task: what it is, in a word.
        unit: of what is counted, rows or bytes.
    """
    next_tick = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal next_tick
        now = time.monotonic()
        if now >= next_tick:
            next_tick = now + TICK_SECONDS
            values = {"task": task, "done": done, "total": total, "unit": unit}
            live(Event(Kind.WORKING, -1, time.time(), values))

    return tell
