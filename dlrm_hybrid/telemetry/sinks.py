"""Sinks of events: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dlrm_hybrid.disk import RUN_FOLDER_KEY, append, writing
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ScoredPart

EVENT_PB2, SUMMARY_PB2 = cast(Any, event_pb2), cast(Any, summary_pb2)  # made by protoc, untyped
_DENSITIES = (
    ("compression/gradient_density", compression.GRADIENT),
    ("compression/activation_density", compression.ACTIVATION),
)


class Sink(Protocol):
    """Takes the events of one process, in order."""

    def write(self, event: Event) -> None:
        """Take the next event of the run."""
        ...

    def close(self) -> None:
        """Make all events taken so far durable."""
        ...


class JsonLines:
    """Sink that appends events to `events.jsonl`.

    Raises:
        ResourceError: the disk is full, or not writable; earlier lines are kept, this one is not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path, RUN_FOLDER_KEY):
            self._file = path.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        """Append the event as a line, which is in the file when this returns."""
        with writing(self._path, RUN_FOLDER_KEY):
            append(self._file.fileno(), f"{event.to_json()}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Sink of scalars for TensorBoard; its step is the number of training rows seen.

    `train/step` is the training step. `time` and `cpu` are the leader's, milliseconds per step and
    percent of a core; `net` is of all ranks.

    Raises:
        ResourceError: the disk is full, or not writable; may be raised some events later.
    """

    def __init__(self, folder: Path, first_samples: int) -> None:
        self._folder = folder
        with self._writing():
            self._writer = EventFileWriter(str(folder))
        if first_samples:
            # Makes TensorBoard discard what a killed attempt wrote after its last checkpoint.
            session = EVENT_PB2.SessionLog(status=EVENT_PB2.SessionLog.START)
            self._writer.add_event(EVENT_PB2.Event(step=first_samples + 1, session_log=session))

    def write(self, event: Event) -> None:
        """Write the event's scalars, if it has any."""
        values = [
            SUMMARY_PB2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event)
        ]
        if values:
            with self._writing():
                self._writer.add_event(
                    EVENT_PB2.Event(
                        wall_time=event.time_seconds,
                        step=event.values["samples"],
                        summary=SUMMARY_PB2.Summary(value=values),
                    )
                )

    def close(self) -> None:
        """Write the queued events and end the writer's thread."""
        with self._writing():
            self._writer.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._folder, f"{RUN_FOLDER_KEY}, or telemetry.tensorboard=false")


def scalars(event: Event) -> Iterator[tuple[str, float]]:
    """Yield tags and values of an event for a tracker; most kinds of events have none."""
    values = event.values
    if event.kind is Kind.PROGRESS:
        yield from _progress(event)
    if event.kind is Kind.COMPRESSION:
        for tag, prefix in _DENSITIES:
            density = compression.density([values["of"]], prefix)
            if density is not None:
                yield tag, density
    if event.kind is Kind.EVALUATED:
        group = "test" if values.get("part") == ScoredPart.TEST else "val"
        yield from _scores(group, values)
        for name, of_label in values.get("labels", {}).items():
            yield from _scores(f"{group}/{name}", of_label)


def _scores(group: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield f"{group}/loss", values["log_loss"]
    yield f"{group}/accuracy", values["accuracy"]
    named = {name: name for name in ("auc", "gauc", "calibration")} | {"ne": "normalized_entropy"}
    for tag, name in named.items():
        if values.get(name) is not None:
            yield f"{group}/{tag}", values[name]


def _progress(event: Event) -> Iterator[tuple[str, float]]:
    values = event.values
    yield "train/step", event.step
    if not values.get("is_short"):
        yield "train/loss", values["loss"]
        yield "train/accuracy", values["accuracy"]
    yield "lr", values["lr"]
    rows, seconds = values["timed_rows"], values["timed_seconds"]
    if rows:  # not during warm-up
        yield "throughput/examples_per_s", rows / seconds
        yield "cpu/percent", 100 * values["timed_cpu_seconds"] / seconds
        for span, spent in values["seconds_by_span"].items():
            yield f"time/{span}_ms", 1000 * spent * values["samples_per_step"] / rows
    if values["sent_bytes"]:
        steps = values["sent_rows"] / values["samples_per_step"]
        yield "net/tx_bytes_per_step", values["sent_bytes"] / steps
        yield "net/compression_ratio", values["dense_equivalent_bytes"] / values["sent_bytes"]
