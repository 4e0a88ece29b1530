"""Events of a run, the lines of `events.jsonl`, from which all tables and plots are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.types import DataError, ScoredPart

EVENTS_FILE = "events.jsonl"  # in the run folder
MOST = 1e11  # steps, or seconds since 1970: dates end at the year 9999
PHASES = (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)


class Kind(StrEnum):
    """Kinds of events; `Event` lists the `values` of each."""

    STARTED = "started"
    TICK = "tick"
    WORKING = "working"
    PROGRESS = "progress"
    COMPRESSION = "compression"
    EVALUATED = "evaluated"
    SAVED = "saved"
    RANK = "rank"
    FINISHED = "finished"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run, one line of `events.jsonl`.

    Attributes:
        kind: what happened.
        step: training steps done when it happened, over all attempts.
        time_seconds: time since 1970.
        values: by kind —
            started: attempt (number of earlier starts), rank and role of the leader, pid,
                steps_total, samples (so far), batches (that each trainer has learned from so far;
                empty where all learn from one in each step), samples_per_step, train_rows,
                validation_rows and test_rows (of the parts that are scored), changed_arithmetic (a
                text for each change since the checkpoint it resumes from, see `run.rank.facts`),
                bfloat16_speed (of its matrix products, float32 is 1; null for float32) and
                bfloat16_repeats of that measurement.
            tick: samples, loss and accuracy so far, sent bytes as in progress; for the display
                only, never recorded.
            working: task, done, total and unit (rows or bytes) of a long task, such as an
                evaluation; for the display only, never recorded.
            progress: samples (so far), rows (in this interval), loss and accuracy (means over the
                interval), batches (see `started`, if not empty), lr (of the dense optimizer),
                samples_per_step, is_short (see `train.progress.Plan`), and, for training steps of
                the interval after warm-up, as the leader measures them, timed_rows, timed_seconds,
                timed_cpu_seconds and seconds_by_span (see `spans.Span`); sent_bytes of all ranks,
                their dense_equivalent_bytes, and sent_rows, trained on meanwhile: null where
                nothing is counted.
            compression: samples, and under `of` by tensor and boundary the elements, those sent,
                density and mean threshold of the interval that ends here.
            evaluated: samples, part (see `ScoredPart`; missing where there is only one to test on),
                seconds and the scores; under `labels` those of each of several labels by name.
            saved: of a checkpoint of this step, valid from now on: path, num_bytes, seconds that
                training was paused, background_seconds after that.
            rank: of one rank at the end of an attempt: rank, role, all of `RankMeter.values`, and
                if it listens, under `strangers`, foreign_messages that it dropped and
                refused_connections.
            finished: lost_trainers, left_trainers and redone_batches of an elastic run's last
                attempt, else nothing.
            stopping: nothing; a signal has stopped the run, which saves now; never recorded.
            stopped: samples; by a signal, or by values that are not finite.
            failed: exit_code, message, and lost: ranks of which one is gone, and the cause, or
                nothing; for the supervisor, never recorded.
            left: nothing; this rank leaves and may come again; for the supervisor, never recorded.
            lost: rank and incarnation of a rank no longer heard of; likewise.
    """

    kind: Kind
    step: int
    time_seconds: float
    values: Mapping[str, Any]

    def to_json(self) -> str:
        """The event as a line of JSON, without the newline."""
        head = {"kind": self.kind.value, "step": self.step, "time_seconds": self.time_seconds}
        return json.dumps({**head, **self.values}, allow_nan=False)


def from_json(line: str | bytes) -> Event:
    """Parse a line to an event; raises ValueError, with the reason, if it is none."""
    try:
        values: dict[str, Any] = json.loads(line)
        kind, step, time_seconds = (values.pop(key) for key in ("kind", "step", "time_seconds"))
        are_numbers = isinstance(step, int) and isinstance(time_seconds, (int, float))
        if not are_numbers or not (abs(step) < MOST and abs(time_seconds) < MOST):
            raise ValueError(f"step = {step!r:.40}, time_seconds = {time_seconds!r:.40}")
        return Event(Kind(kind), step, time_seconds, values)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no event: {error!r:.200}") from None


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a file, without a last line that is incomplete.

    Raises:
        DataError: it is no plain file, a link that leads out of its folder, or a line is no event;
            names file and line.
    """
    with plain_file(path.parent, path.name).open("rb") as file:
        for number, line in enumerate(file, 1):
            # Stop: a running process may complete it now, and its rest would be read as a line.
            if not line.endswith(b"\n"):
                return
            try:
                yield from_json(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}") from None


def curve(record: Iterable[Event]) -> list[Event]:
    """The points of the loss curve: `progress` events over whole intervals.

    The last interval may be as short as a step, so its mean is noise.
    """
    points = (event for event in record if event.kind is Kind.PROGRESS)
    return [event for event in points if not event.values.get("is_short")]


def part_of(event: Event) -> ScoredPart:
    """The part of the rows that an `evaluated` event has scored."""
    return ScoredPart(event.values.get("part", ScoredPart.TEST))


def until(
    events: Iterable[Event], step: int, evaluated_step: int, tested_step: int = -1
) -> list[Event]:
    """The recorded events of a run up to the checkpoint of `step`, for resuming from it.

    Later events are repeated after resuming, so would be recorded twice. So would an evaluation at
    `step` that was made after saving: each rank goes by what the checkpoint knows, and all must
    evaluate, or none. `started` events are all kept.

    Args:
        evaluated_step: step of the last evaluation that the checkpoint knows of, -1 for none.
        tested_step: the same on the test part, if evaluations score the validation part.
    """

    def last(event: Event) -> int:
        if event.kind is Kind.EVALUATED:
            return tested_step if event.values.get("part") == ScoredPart.TEST else evaluated_step
        return -1 if event.kind in (Kind.FINISHED, Kind.STOPPED) else step

    return [event for event in events if event.kind is Kind.STARTED or event.step <= last(event)]
