"""The document of one run that may still be training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import final

from dlrm_hybrid.report.figures import Over, losses, rates, sent, speed
from dlrm_hybrid.report.labels import labels, trained
from dlrm_hybrid.report.measures import RATIO, digits, integer
from dlrm_hybrid.report.page import Document, Progress, Section
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.events import Event, Kind, part_of
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import UNFINISHED
from dlrm_hybrid.types import ScoredPart

RUNNING = "running"
LATEST = 12  # events listed
SPEED_POINTS = 10  # points of the curve whose speed predicts the end
HAPPENED = {
    Kind.STARTED: "started",
    Kind.EVALUATED: "evaluated",
    Kind.SAVED: "saved a checkpoint",
    Kind.STOPPED: "stopped",
    Kind.FINISHED: "finished",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """State of a run at a moment.

    Attributes:
        is_running: whether a process works on it.
        now: seconds since 1970.
    """

    run: Run
    is_running: bool
    now: float

    @property
    def status(self) -> str:
        """`running`, or the status of the summary."""
        return RUNNING if self.is_running and self.run.status == UNFINISHED else self.run.status

    @property
    def progress(self) -> list[Event]:
        """Events with the points of the loss curve."""
        return self.of(Kind.PROGRESS)

    @property
    def step(self) -> int:
        """The last step of which an event was recorded; 0 if none was."""
        return max((event.step for event in self.run.events), default=0)

    @property
    def steps_total(self) -> int | None:
        """Number of planned steps, if known."""
        started = self.of(Kind.STARTED)
        return started[-1].values["steps_total"] if started else None

    def of(self, kind: Kind) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.run.events if event.kind is kind]

    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step, at the speed of the last points; None if unknown."""
        started = [event.time_seconds for event in self.of(Kind.STARTED)]
        last = [event for event in self.progress if started and event.time_seconds >= started[-1]]
        last = last[-SPEED_POINTS:]
        if not self.is_running or self.steps_total is None or len(last) < 2:
            return None
        steps, seconds = last[-1].step - last[0].step, last[-1].time_seconds - last[0].time_seconds
        if steps <= 0 or seconds <= 0:
            return None
        left = (self.steps_total - last[-1].step) * seconds / steps
        return max(0.0, left - (self.now - last[-1].time_seconds))


def live_document(watched: Watched) -> Document:
    """Make the document: progress, latest figures, their curves, and the latest events."""
    run, step, total = watched.run, watched.step, watched.steps_total
    (name,) = labels([run])
    share, progress = "", None
    if total:
        share = f"{min(1.0, step / total):.0%}"
        left = watched.seconds_left()
        ends = "" if left is None else f", {timedelta(seconds=round(left))} left"
        text = f"step {step:,} of {total:,} ({share}){ends}"
        progress = Progress(done=step, total=total, text=text)
    moment = datetime.fromtimestamp(watched.now).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    pictures = (*losses([run], [name], [Over.STEPS]), *rates([run], [name]))
    sections = (
        Section("", "" if total else "No step yet.", _figures(watched), pictures),
        Section("Time of the leader", "", _time(watched)),
        Section("What happened", "", _happened(watched)),
    )
    return Document(
        title=f"{share} {watched.status}: {name}".strip(),
        heading=f"Run {name}",
        status=watched.status,
        subtitle=f"{run.folder} · as of {moment}",
        trained=trained([run], with_steps=False),
        progress=progress,
        sections=tuple(section for section in sections if section.table),
    )


def _figures(watched: Watched) -> Table:
    """The last value of each figure that has been measured, with its step."""
    rows = [(name, value, integer(step)) for name, value, step in _latest(watched)]
    return Table(("figure", "value", "at step"), rows or [("nothing yet", MISSING, MISSING)])


def _latest(watched: Watched) -> Iterator[tuple[str, str, int]]:
    points = watched.progress
    if points:
        yield "training log-loss", f"{points[-1].values['loss']:.4f}", points[-1].step
        yield "training accuracy", f"{points[-1].values['accuracy']:.2%}", points[-1].step
    for part in ScoredPart:
        scored = [event for event in watched.of(Kind.EVALUATED) if part_of(event) is part]
        if not scored:
            continue
        last, best = scored[-1], min(scored, key=lambda event: event.values["log_loss"])
        yield f"{part} log-loss", f"{last.values['log_loss']:.4f}", last.step
        if last.values["auc"] is not None:
            yield f"{part} AUC", f"{last.values['auc']:.4f}", last.step
        if best is not last:
            yield f"best {part} log-loss", f"{best.values['log_loss']:.4f}", best.step
    for name, value, show in (
        ("samples a second", speed, integer),
        ("bytes sent a sample", sent, digits),
        ("dense ÷ sent", _dense_ratio, RATIO.show),
    ):
        pairs = [(figure, event) for event in points if (figure := value(event)) is not None]
        if pairs:
            yield name, show(pairs[-1][0]), pairs[-1][1].step
    saved, starts = watched.of(Kind.SAVED), watched.of(Kind.STARTED)
    if saved:
        yield "checkpoints saved", integer(len(saved)), saved[-1].step
    if len(starts) > 1:
        yield "starts", integer(len(starts)), starts[-1].step


def _dense_ratio(event: Event) -> float | None:
    dense_bytes, sent_bytes = event.values["dense_equivalent_bytes"], event.values["sent_bytes"]
    return dense_bytes / sent_bytes if dense_bytes and sent_bytes else None


def _time(watched: Watched) -> Table | None:
    """Shares of the leader's time by span, for the last point of the curve and in all."""
    timed = [event.values["seconds_by_span"] for event in watched.progress if speed(event)]
    if not timed:
        return None
    last, every = sum(timed[-1].values()), sum(sum(spent.values()) for spent in timed)
    rows = [
        (span, f"{timed[-1].get(span, 0.0) / last:.0%}", f"{seconds / every:.0%}")
        for span in Span
        if (seconds := sum(spent.get(span, 0.0) for spent in timed))
    ]
    return Table(("span", "last", "all"), rows)


def _happened(watched: Watched) -> Table | None:
    happened = [event for event in watched.run.events if event.kind in HAPPENED][-LATEST:]
    rows = [
        (
            datetime.fromtimestamp(event.time_seconds).astimezone().strftime("%H:%M:%S"),
            integer(event.step),
            HAPPENED[event.kind] + _more(event),
        )
        for event in reversed(happened)
    ]
    return Table(("time", "step", "what"), rows, align="lrl") if rows else None


def _more(event: Event) -> str:
    values = event.values
    if event.kind is Kind.EVALUATED:
        return f" the {part_of(event)} part: log-loss {values['log_loss']:.4f}"
    if event.kind is Kind.SAVED:
        return f": training stood still for {1000 * values['seconds']:.0f} ms"
    if event.kind is Kind.STARTED and values["attempt"]:
        return f" again, attempt {values['attempt'] + 1}"
    return ""
