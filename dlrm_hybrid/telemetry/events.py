"""What happens in a run, as lines of `events.jsonl`: all tables and plots are made from it."""

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
PHASES = (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)


class Kind(StrEnum):
    """The kinds of events; `values` of each are listed at `Event`."""

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
    """One line of the record.

    Attributes:
        kind: what happened.
        step: training steps done when it happened, over all attempts.
        time_seconds: since 1970.
        values: by kind —
            started: attempt (starts before this one), rank and role of the leader, pid,
                steps_total, samples (so far), batches (that each trainer has learned from so far;
                empty where all learn from one in each step), samples_per_step, train_rows,
                validation_rows and test_rows (of the parts that are scored), changed_arithmetic (a
                text for each change since the checkpoint that it resumes from, see
                `run.rank.facts`), bfloat16_speed (of its matrix products, float32 is 1; null for
                float32) and bfloat16_repeats of that measurement.
            tick: samples, loss and accuracy so far, sent bytes as in progress; for the eye only,
                never recorded.
            working: task, done, total and unit (rows or bytes) of what takes a while, such as an
                evaluation; for the eye only, never recorded.
            progress: samples (so far), rows (in this interval), loss and accuracy (means over the
                interval), batches (if it has any), lr (that the optimizer of the dense weights
                applies), samples_per_step, and timed_rows, timed_seconds, timed_cpu_seconds
                and seconds_by_span (see `spans.Span`) of the training steps in it that belong to no
                warm-up, as the leader sees them; sent_bytes by all ranks, dense_equivalent_bytes of
                these, and sent_rows, trained on meanwhile: null where nothing is counted.
            compression: samples, and under `of` by tensor and boundary the elements, those sent,
                density and mean threshold of the interval that ends here.
            evaluated: samples, part (see `ScoredPart`; missing where there is only one to test on),
                seconds and the scores.
            saved: of a checkpoint that is valid now, at the step of which it is: path, num_bytes,
                seconds for which training stood still, background_seconds from then on.
            rank: of one rank in one attempt that came to an end: rank, role, all of
                `RankMeter.values`, and where it listens under `strangers` the foreign_messages that
                it dropped and the refused_connections.
            finished: nothing.
            stopping: nothing; a signal has stopped the run, which saves now; never recorded.
            stopped: samples; by a signal, or by values that are not finite.
            failed: exit_code, message, and lost: ranks of which one is gone, and the cause, or
                nothing; for the supervisor, never recorded.
            left: nothing; this rank leaves and may come again; for the supervisor, never recorded.
            lost: rank and its incarnation, of which nothing is heard any more; likewise.
    """

    kind: Kind
    step: int
    time_seconds: float
    values: Mapping[str, Any]

    def to_json(self) -> str:
        """One line without its end."""
        head = {"kind": self.kind.value, "step": self.step, "time_seconds": self.time_seconds}
        return json.dumps({**head, **self.values}, allow_nan=False)


def from_json(line: str | bytes) -> Event:
    """The event of one line.

    Raises:
        ValueError: it is none; says why.
    """
    try:
        values: dict[str, Any] = json.loads(line)
        kind, step, time_seconds = (values.pop(key) for key in ("kind", "step", "time_seconds"))
        if not isinstance(step, int) or not isinstance(time_seconds, (int, float)):
            raise ValueError(f"step = {step!r:.40}, time_seconds = {time_seconds!r:.40}")
        return Event(Kind(kind), step, time_seconds, values)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no event: {error!r:.200}") from None


def read(path: Path) -> Iterator[Event]:
    """All events of a file; a last line cut short, by a kill or for now, is left out.

    Raises:
        DataError: it is no plain file, a link leads out of its folder, or a line is no event; names
            file and line.
    """
    with plain_file(path.parent, path.name).open("rb") as file:
        for number, line in enumerate(file, 1):
            # A running process may write its rest meanwhile: that would be read as a line too.
            if not line.endswith(b"\n"):
                return
            try:
                yield from_json(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}") from None


def curve(record: Iterable[Event]) -> list[Event]:
    """The points of the loss curve that are means of as many steps as the others.

    What the last steps add to sums is in an event too, which may be of one step: noise.
    """
    points = (event for event in record if event.kind is Kind.PROGRESS)
    return [event for event in points if not event.values.get("is_short")]


def part_of(event: Event) -> ScoredPart:
    """The rows whose scores an `evaluated` event has."""
    return ScoredPart(event.values.get("part", ScoredPart.TEST))


def until(
    events: Iterable[Event], step: int, evaluated_step: int, tested_step: int = -1
) -> list[Event]:
    """The events of a run as it was when the checkpoint of `step` was written.

    What came later is repeated after resuming, so its rows would be recorded twice. So would
    an evaluation at `step` itself that was made after saving: each rank goes by what the checkpoint
    knows, and all must evaluate, or none. That an attempt was made stays true.

    Args:
        events: on record.
        step: of the checkpoint.
        evaluated_step: of the last evaluation that it knows of, -1 for none.
        tested_step: of the last one on the test part, where others decide.
    """

    def last(event: Event) -> int:
        if event.kind is Kind.EVALUATED:
            return tested_step if event.values.get("part") == ScoredPart.TEST else evaluated_step
        return -1 if event.kind in (Kind.FINISHED, Kind.STOPPED) else step

    return [event for event in events if event.kind is Kind.STARTED or event.step <= last(event)]
