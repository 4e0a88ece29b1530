"""What happens in a run, as lines of `events.jsonl`: all tables and plots are made from it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json as parse_json

from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.types import DataError, ScoredPart

EVENTS_FILE = "events.jsonl"  # in the run folder
_OPEN = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_MOST = 1e24
EVERY = "every"
PHASES = (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Number = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]  # as a key of JSON
Figure = Annotated[float, Field(ge=-_MOST, le=_MOST)]
Amount = Annotated[float, Field(ge=0, le=_MOST)]
Window = Annotated[tuple[Figure, ...], Field(min_length=3, max_length=8)]


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
    """The complete lines of a file, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            # A running process may write its rest meanwhile: that would be read as a line too.
            if not line.endswith(b"\n"):
                return
            yield number, line


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


def _with_phases(value: Any) -> Any:
    """The type of values by phase; none of `PHASES` may be missing."""

    def check(by_phase: dict[str, Any]) -> dict[str, Any]:
        if missing := [phase.value for phase in PHASES if phase not in by_phase]:
            raise ValueError(f"says nothing of {', '.join(missing)}")
        return by_phase

    return Annotated[dict[str, value], AfterValidator(check)]


def _record(**fields: Any) -> Any:
    """The type of an object with these fields: a type each, or a type and a default."""
    kinds: dict[str, Any] = {
        name: one if isinstance(one, tuple) else (one, ...) for name, one in fields.items()
    }
    return create_model("Record", __config__=_OPEN, **kinds)


def _rank() -> Any:
    """What a rank says at its end."""
    sent = _record(messages=Count, bytes=Count, dense_equivalent_bytes=Count)
    interface = _record(
        address=str,
        rate_bits_per_second=Amount | None,
        seconds=Amount,
        busier_bytes=Amount,
        sent_bytes=Amount,
        received_bytes=Amount,
        series=list[Window],
    )
    counts = dict[Number, Positive]
    times = _record(counts=counts, total_seconds=Amount, largest_seconds=Amount)
    stale = _record(counts=counts, total=Count, largest=Count)
    return _record(
        rank=Count,
        role=str,
        timed_steps=Count,
        step_times=(times | None, None),
        seconds=_with_phases(Amount),
        cpu_seconds=_with_phases(Amount),
        thread_cpu_seconds=(_with_phases(Amount) | None, None),
        threads=(Positive | None, None),
        peak_rss_bytes=(Count | None, None),
        seconds_by_span=dict[str, Amount],
        seconds_by_wait=(dict[str, Amount] | None, None),
        traffic=_with_phases(dict[str, sent]) | None,
        received=_with_phases(dict[str, _record(bytes=Count)]) | None,
        cpu_series=(list[Annotated[Window, Field(max_length=3)]], []),
        versions=(_record(told=Count, elements=Count) | None, None),
        staleness=(dict[Number, stale] | None, None),
        distinct_ids=(_record(batches=Positive, ids=Count) | None, None),
        strangers=(_record(foreign_messages=Count, refused_connections=Count) | None, None),
        interface=(interface | None, None),
    )


@functools.cache
def _schemas() -> Mapping[str, type[BaseModel]]:
    """What a line of each kind must hold to be read back, beside what `EVERY` line holds."""
    return {
        EVERY: _record(
            kind=str, step=Count, time_seconds=Amount, samples=(Count, 0), batches=(list[Count], [])
        ),
        Kind.STARTED: _record(attempt=Count, rank=Count, role=str, samples_per_step=(Count, 0)),
        Kind.PROGRESS: _record(
            samples=Count,
            rows=Count,
            loss=Figure,
            accuracy=Figure,
            is_short=(bool, False),
            timed_rows=Count,
            timed_seconds=Amount,
            timed_cpu_seconds=Amount,
            seconds_by_span=dict[str, Amount],
        ),
        Kind.COMPRESSION: _record(
            of=dict[str, _record(elements=Amount, sent=Amount, threshold=Figure | None)]
        ),
        Kind.EVALUATED: _record(
            samples=Count,
            part=(ScoredPart, ScoredPart.TEST),
            seconds=Amount,
            log_loss=Figure,
            accuracy=Figure,
            auc=Figure | None,
            normalized_entropy=Figure | None,
            base_rate=Figure,
            calibration=(Figure | None, None),
        ),
        Kind.SAVED: _record(seconds=Amount),
        Kind.RANK: _rank(),
    }


def fault_of(line: bytes) -> str | None:
    """What is wrong with a line that is to be an event, with the field; None if nothing is."""
    try:
        values = parse_json(line, allow_inf_nan=False)
        _schemas()[EVERY].model_validate_json(line)
        if (schema := _schemas().get(values["kind"])) is not None:
            schema.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = repr(".".join(str(part) for part in fault["loc"]))[1:-1]
        return f"{where} = {fault['input']!r:.80}: {fault['msg']}"
    except ValueError as error:
        return f"no event: {error}"
    return None
