"""From the events of a run to `summary.json`: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.telemetry.world_summary import (
    world_cpu,
    world_network,
    world_roles,
    world_strangers,
)

SUMMARY_FILE = "summary.json"  # in the run folder
COMPLETE, UNFINISHED = "complete", "unfinished"  # of all statuses, those that code asks for
TAIL = 10  # train.loss is the mean over the last tenth of the steps


def summarise(events: Iterable[Event], status: str, cores: int) -> dict[str, Any]:
    """The summary of one run; whatever was not measured is None.

    `seconds`, `samples_per_second`, `cpu` and `network` cover training steps only, without the
    first ones of each attempt; of `network`, `cpu` and `roles` only the attempts that came to their
    end. `train.loss` and `train.accuracy` are means over the last tenth of the steps.

    Args:
        events: all of them in order.
        status: complete, failed, diverged, preempted or interrupted.
        cores: of the machine, for the utilisation of the whole run.
    """
    record = list(events)
    points = [event for event in record if event.kind is Kind.PROGRESS]
    ranks = [event.values for event in record if event.kind is Kind.RANK]
    compressed = [event.values["of"] for event in record if event.kind is Kind.COMPRESSION]
    attempts = _attempts(record)
    rows, seconds, _ = _timed(points)
    steps, samples = _reached(record)
    starts = [event for event in record if event.kind is Kind.STARTED]
    saved = [event.step for event in record if event.kind is Kind.SAVED]
    return {
        "status": status,
        "steps": steps,
        "steps_planned": starts[-1].values.get("steps_total") if starts else None,
        "steps_saved": max(saved, default=None),
        "first_step": starts[0].step if starts else None,
        "samples": samples,
        "seconds": seconds or None,
        "samples_per_second": rows / seconds if seconds else None,
        "wall_seconds": sum(part[-1].time_seconds - part[0].time_seconds for part in attempts),
        "train": _train_scores(points),
        "test": _test_scores(record),
        "network": {**world_network(ranks, _told_rows(attempts)), **world_strangers(ranks)},
        "cpu": world_cpu(ranks, cores) if ranks else _leaders_cpu(points),
        "roles": world_roles(ranks) if ranks else _leaders_role(record, points),
        "compression": {
            "gradient_density": compression.density(compressed, compression.GRADIENT),
            "activation_density": compression.density(compressed, compression.ACTIVATION),
        },
        "arithmetic_changes": [
            {"step": one.step, "changed": one.values["changed_arithmetic"]}
            for one in starts
            if one.values.get("changed_arithmetic")
        ],
        "restarts": max((one.values["attempt"] for one in starts), default=0),
    }


def _reached(record: Iterable[Event]) -> tuple[int, int]:
    """Steps and samples at the end of the last attempt, as far as its events know."""
    step = samples = samples_per_step = 0
    for event in record:
        if event.kind is Kind.STARTED:
            step, samples_per_step = event.step, event.values.get("samples_per_step", 0)
            samples = event.values.get("samples", step * samples_per_step)
        elif event.kind is not Kind.RANK and event.step > step:
            samples += (event.step - step) * samples_per_step
            samples, step = event.values.get("samples", samples), event.step
    return step, samples


def _timed(points: Sequence[Event]) -> tuple[int, float, float]:
    """Rows, seconds and CPU seconds of training steps, warm-up left out."""
    return (
        sum(point.values["timed_rows"] for point in points),
        sum(point.values["timed_seconds"] for point in points),
        sum(point.values["timed_cpu_seconds"] for point in points),
    )


def _attempts(record: Sequence[Event]) -> list[list[Event]]:
    """The events of each start of the run."""
    parts: list[list[Event]] = []
    for event in record:
        if event.kind is Kind.STARTED or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def _told_rows(attempts: Iterable[Sequence[Event]]) -> int:
    """Learned from while ranks counted what they told: in the attempts that came to an end."""
    rows = 0
    for attempt in attempts:
        steps = [one.values["timed_steps"] for one in attempt if one.kind is Kind.RANK]
        rows += max(steps, default=0) * attempt[0].values.get("samples_per_step", 0)
    return rows


def _train_scores(points: Sequence[Event]) -> dict[str, float | None]:
    if not points:
        return {"loss": None, "accuracy": None}
    first_step = points[-1].step * (TAIL - 1) / TAIL
    tail = [point for point in points if point.step > first_step]
    rows = sum(point.values["rows"] for point in tail)
    return {
        name: sum(point.values[name] * point.values["rows"] for point in tail) / (rows or 1)
        for name in ("loss", "accuracy")
    }


def _test_scores(record: Sequence[Event]) -> dict[str, Any]:
    names = {
        "loss": "log_loss",
        "accuracy": "accuracy",
        "auc": "auc",
        "normalized_entropy": "normalized_entropy",
        "base_rate": "base_rate",
    }
    scores = [event.values for event in record if event.kind is Kind.EVALUATED]
    return {name: scores[-1][source] if scores else None for name, source in names.items()}


def _leaders_cpu(points: Sequence[Event]) -> dict[str, float | None]:
    """Where no rank has told anything, of the one that wrote the points."""
    _, seconds, cpu_seconds = _timed(points)
    utilization = cpu_seconds / seconds if seconds else None
    return {"utilization": utilization, "seconds": cpu_seconds or None}


def _leaders_role(record: Sequence[Event], points: Sequence[Event]) -> dict[str, Any]:
    """Where no rank has told anything, of the one that wrote the points."""
    started = [event.values for event in record if event.kind is Kind.STARTED]
    if not started:
        return {}
    _, seconds, cpu_seconds = _timed(points)
    phases = {"train": seconds}
    for phase, kind in ((Phase.EVALUATE, Kind.EVALUATED), (Phase.CHECKPOINT, Kind.SAVED)):
        phases[phase] = sum(event.values["seconds"] for event in record if event.kind is kind)
    return {
        str(started[-1]["rank"]): {
            "role": started[-1]["role"],
            "cpu_utilization": cpu_seconds / seconds if seconds else None,
            "bytes_sent": None,
            "bytes_received": None,
            "seconds_by_span": {
                span: sum(point.values["seconds_by_span"].get(span, 0.0) for point in points)
                for span in Span
            },
            "seconds_by_phase": phases,
        }
    }
