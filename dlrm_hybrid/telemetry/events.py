"""What happens in a run, as lines of `events.jsonl`: all tables and plots are made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.telemetry.event_values import fault_of
from dlrm_hybrid.types import DataError

EVENTS_FILE = "events.jsonl"  # in the run folder


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


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the record.

    Attributes:
        kind: what happened.
        step: training steps done when it happened, over all attempts.
        time_seconds: since 1970.
        values: by kind —
            started: attempt (starts before this one), rank, role, pid, steps_total, samples (so
                far), samples_per_step, train_rows, test_rows, changed_arithmetic (a text for each
                change since the checkpoint that it resumes from, see `train.arithmetic`),
                bfloat16_speed (of its matrix products, float32 is 1; null for float32) and
                bfloat16_repeats of that measurement.
            tick: samples, loss and accuracy so far, sent bytes as in progress; for the eye only,
                never recorded.
            working: task, done, total and unit (rows or bytes) of what takes a while, such as an
                evaluation; for the eye only, never recorded.
            progress: samples (so far), rows (in this interval), loss and accuracy (means over the
                interval), lr, samples_per_step, and timed_rows, timed_seconds, timed_cpu_seconds
                and seconds_by_span (see `spans.Span`) of the training steps in it that belong to no
                warm-up, as the leader sees them; sent_bytes by all ranks, dense_equivalent_bytes of
                these, and sent_rows, learned from meanwhile: null where nothing is counted.
            compression: samples, and under `of` by tensor and boundary the elements, those sent,
                density and mean threshold of the interval that ends here.
            evaluated: samples, seconds and the test scores.
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
    """The event of one line; ValueError or KeyError if it is not one."""
    values: dict[str, Any] = json.loads(line)
    return Event(
        kind=Kind(values.pop("kind")),
        step=values.pop("step"),
        time_seconds=values.pop("time_seconds"),
        values=values,
    )


def read(path: Path) -> Iterator[Event]:
    """All events of a file; a last line cut short, by a kill or for now, is left out.

    Raises:
        DataError: a line is no event; names file and line.
    """
    for number, line in _lines(path):
        try:
            yield from_json(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path}:{number}: no event: {error!r:.200}") from None


def check(path: Path) -> tuple[list[Event], list[str]]:
    """The events of a file that say what their kind says, and what is wrong with other lines.

    Raises:
        DataError: it is no plain file, or a link leads out of its folder.
    """
    found: list[Event] = []
    faults: list[str] = []
    for number, line in _lines(plain_file(path.parent, path.name)):
        try:
            fault = fault_of(line)
            event = None if fault else from_json(line)
        except ValueError as error:
            fault, event = f"kind: {error}", None
        if event is None:
            faults.append(f"{path}:{number}: {fault}")
        else:
            found.append(event)
    return found, faults


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            # A run that goes on may write its rest meanwhile: that would come as a line too.
            if not line.endswith(b"\n"):
                return
            yield number, line


def until(events: Iterable[Event], step: int, evaluated_step: int) -> list[Event]:
    """The events of a run as it was when the checkpoint of `step` was written.

    What came later is lived through again after resuming, so its rows would stand twice. So would
    an evaluation at `step` itself that was made after saving: each rank goes by what the checkpoint
    knows, and all must evaluate, or none. That an attempt was made stays true.

    Args:
        events: on record.
        step: of the checkpoint.
        evaluated_step: of the last evaluation that it knows of, -1 for none.
    """
    last = {Kind.EVALUATED: evaluated_step, Kind.FINISHED: -1, Kind.STOPPED: -1}
    return [
        event
        for event in events
        if event.kind is Kind.STARTED or event.step <= last.get(event.kind, step)
    ]
