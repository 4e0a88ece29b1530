"""Run folders as the program leaves them, made without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dlrm_hybrid.config import compose
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.histogram import Histogram
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.summary import summarise
from dlrm_hybrid.telemetry.traffic import Counters, Phase, Traffic

SAMPLES_PER_STEP = 64
BEGIN = 1_790_000_000.0


def progress(step: int, loss: float, time_seconds: float | None = None, **changes: Any) -> Event:
    """A point of the loss curve: by default after a second for each step."""
    values = {
        "samples": step * SAMPLES_PER_STEP,
        "rows": 10 * SAMPLES_PER_STEP,
        "loss": loss,
        "accuracy": 0.7,
        "lr": 0.1,
        "samples_per_step": SAMPLES_PER_STEP,
        "timed_rows": 10 * SAMPLES_PER_STEP,
        "timed_seconds": 1.0,
        "timed_cpu_seconds": 0.5,
        "seconds_by_span": dict.fromkeys(Span, 1.0 / len(Span)),
        **dict.fromkeys(("sent_bytes", "dense_equivalent_bytes", "sent_rows")),
        **changes,
    }
    return Event(Kind.PROGRESS, step, time_seconds or BEGIN + step, values)


def evaluated(step: int, loss: float) -> Event:
    scores = {"log_loss": loss, "accuracy": 0.75, "auc": 0.7, "normalized_entropy": 0.9}
    values = {"samples": step * SAMPLES_PER_STEP, "seconds": 0.5, "rows": 100, **scores}
    return Event(Kind.EVALUATED, step, BEGIN + step, {**values, "base_rate": 0.26})


def compressed(step: int, sent: int, threshold: float) -> Event:
    counts = {
        "gradient.top.1.weight": compression.counted(1000, sent, threshold * 10, 10),
        "activation.0": compression.counted(400, 40, 2.0, 1),
    }
    values = {"samples": step * SAMPLES_PER_STEP, "of": compression.values_of(counts)}
    return Event(Kind.COMPRESSION, step, BEGIN + step, values)


def told(rank: int, role: str, bytes_pushed: int) -> Event:
    """What a rank says at its end: `bytes_pushed` in training, four times that much if dense."""
    counters: list[Counters] = []
    meter = RankMeter(on_phase=counters.append, clock=SpanClock())
    meter.switch(Phase.TRAIN)
    counters[-1].sent.add(Traffic.GRADIENT_PUSH, bytes_pushed, 4 * bytes_pushed)
    values = {"rank": rank, "role": role, **meter.values()}
    values["timed_steps"] = 20
    values["cpu_series"] = [[BEGIN + 12 + 2 * half, 2.0, (1 + rank) / 2] for half in (0, 1)]
    values["seconds"][Phase.TRAIN], values["cpu_seconds"][Phase.TRAIN] = 4.0, 1.0 + rank
    return Event(Kind.RANK, 20, BEGIN + 30, values)


def plain_events(loss: float = 0.5) -> list[Event]:
    started: dict[str, Any] = {
        "attempt": 0,
        "rank": 0,
        "role": "worker",
        "pid": 1,
        "steps_total": 20,
    }
    started["samples_per_step"] = SAMPLES_PER_STEP
    return [
        Event(Kind.STARTED, 0, BEGIN, started),
        progress(10, loss + 0.1),
        progress(20, loss),
        evaluated(20, loss + 0.01),
        Event(Kind.FINISHED, 20, BEGIN + 21, {}),
    ]


def world_events(loss: float = 0.5) -> list[Event]:
    started, first, second, *end = plain_events(loss)
    started.values["role"] = "worker-0.0"
    ranks = [told(0, "worker-0.0", 6400), told(1, "worker-0.1", 6400), told(2, "server-0", 0)]
    early, late = compressed(10, 20, 0.5), compressed(20, 10, 0.25)
    return [started, first, early, second, late, *end, *ranks]


def counted(*numbers: int) -> Histogram:
    found = Histogram()
    for number in numbers:
        found.add(number)
    return found


def async_events() -> list[Event]:
    """The same, of trainers that have not waited for each other."""
    *record, server = world_events()
    server.values["staleness"] = {
        trainer: counted(*missed).to_json()
        for trainer, missed in {"0": (0, 1, 1), "1": (4,)}.items()
    }
    for event in record:
        if event.kind is Kind.PROGRESS:
            event.values["batches"] = [event.step * 3 // 2, event.step // 2]
    return [*record, server]


@cache
def values_of(*overrides: str) -> dict[str, Any]:
    """What these overrides are composed to."""
    return compose.values_of(overrides)


def make_run(
    folder: Path,
    overrides: Sequence[str] = (),
    record: Iterable[Event] = (),
    status: str | None = "complete",
) -> dict[str, Any]:
    """A run folder; without a status nobody has summed it up. Returns its configuration."""
    folder.mkdir(parents=True)
    record = list(record)
    config = values_of(*overrides)
    lines = "".join(f"- {json.dumps(text)}\n" for text in overrides)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "overrides.yaml").write_text(lines or "[]\n")
    (folder / "environment.json").write_text(json.dumps({"when": "today", "cores": 2}))
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in record))
    if status is not None:
        (folder / "summary.json").write_text(json.dumps(summarise(record, status, cores=2)))
    return config
