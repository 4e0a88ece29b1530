"""What one run has come to, as one HTML page that a browser loads anew by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, final

from dlrm_hybrid.report.labels import labels, trained
from dlrm_hybrid.report.live.plot import Plot, Point
from dlrm_hybrid.report.measures import digits, integer
from dlrm_hybrid.report.page import STYLE_FILE
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table, escape
from dlrm_hybrid.telemetry.events import Event, Kind, curve, part_of
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import UNFINISHED
from dlrm_hybrid.types import ScoredPart

RUNNING = "running"
LATEST = 12  # of what has happened, the last ones are listed
SPEED_POINTS = 10  # the speed that tells the end is that of the last so many
ALL_STEPS = "Of all steps; the summary's figure leaves out warm-up."
STYLE = """
progress { width: min(100%, 46rem); height: 1rem; }
.plot { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.plot text { fill: var(--quiet); }
.plot .grid { stroke: var(--line); fill: none; }
.plot .line { stroke: #2f7fc1; stroke-width: 1.8; fill: none; stroke-linejoin: round; }
.plot .alone { fill: #2f7fc1; }
.plot .dots { fill: #d0642b; }
.status { padding: .1rem .5rem; border: 1px solid; border-radius: .3rem; font-size: 1rem; }
"""
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
    """A run at a moment.

    Attributes:
        run: what is on record of it.
        is_running: a process works at it.
        now: seconds since 1970.
    """

    run: Run
    is_running: bool
    now: float

    @property
    def status(self) -> str:
        """As of the summary; one that goes on has none yet."""
        return RUNNING if self.is_running and self.run.status == UNFINISHED else self.run.status

    @property
    def progress(self) -> list[Event]:
        """Points of the loss curve."""
        return _of(self.run, Kind.PROGRESS)

    @property
    def step(self) -> int:
        """The last one on record."""
        return max((one.step for one in self.run.events), default=0)

    @property
    def steps_total(self) -> int | None:
        """How many are planned, where that is known."""
        started = _of(self.run, Kind.STARTED)
        total = started[-1].values.get("steps_total") if started else None
        return total if isinstance(total, int) and total > 0 else None

    def seconds_left(self) -> float | None:
        """To the last step, at the speed of the last points; None where that is not known."""
        started = [one.time_seconds for one in _of(self.run, Kind.STARTED)]
        last = [one for one in self.progress if started and one.time_seconds >= started[-1]]
        last = last[-SPEED_POINTS:]
        if not self.is_running or self.steps_total is None or len(last) < 2:
            return None
        steps, seconds = last[-1].step - last[0].step, last[-1].time_seconds - last[0].time_seconds
        if steps <= 0 or seconds <= 0:
            return None
        left = (self.steps_total - last[-1].step) * seconds / steps
        return max(0.0, left - (self.now - last[-1].time_seconds))


def page(watched: Watched, refresh_seconds: float | None) -> str:
    """The page; every text of the run is escaped.

    Args:
        watched: the run.
        refresh_seconds: after which a browser loads it again; None for one that stays as it is.
    """
    run = watched.run
    name = labels([run])[0]
    again = ""
    if refresh_seconds is not None:
        again = f'<meta http-equiv="refresh" content="{max(1, round(refresh_seconds))}">\n'
    of = datetime.fromtimestamp(watched.now).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{again}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(f"{_share(watched)}{watched.status}: {name}")}</title>
<style>
{STYLE_FILE.read_text(encoding="utf-8")}{STYLE}</style>
</head>
<body>
<h1>Run {escape(name)} <span class="status">{escape(watched.status)}</span></h1>
<p class="subtitle">{escape(str(run.folder))} · as of {escape(of)}</p>
<p>{escape(trained([run], with_steps=False))}</p>
{_bar(watched)}
{_figures(watched).html()}
<div class="pictures">
{"".join(one.svg() for one in _plots(run))}
</div>
{_section("Time of the leader", _time(watched))}
{_section("What happened", _happened(watched))}
</body>
</html>
"""


def _section(heading: str, table: Table | None) -> str:
    return f"<h2>{escape(heading)}</h2>\n{table.html()}" if table is not None else ""


def _of(run: Run, kind: Kind) -> list[Event]:
    return [one for one in run.events if one.kind is kind]


def _share(watched: Watched) -> str:
    total = watched.steps_total
    return f"{min(1.0, watched.step / total):.0%} " if total else ""


def _bar(watched: Watched) -> str:
    total, left = watched.steps_total, watched.seconds_left()
    if total is None:
        return "<p>No step yet.</p>"
    ends = "" if left is None else f", {timedelta(seconds=round(left))} left"
    text = f"step {watched.step:,} of {total:,} ({_share(watched).strip()}){ends}"
    shown = min(watched.step, total)
    return f'<p><progress max="{total}" value="{shown}">{text}</progress><br>{text}</p>'


def _figures(watched: Watched) -> Table:
    """The last of each figure that has been measured, with the step of which it is."""
    rows = [
        (name, value, integer(step))
        for name, value, step in (*_scores(watched), *_speeds(watched), *_lives(watched))
    ]
    return Table(("figure", "value", "at step"), rows or [("nothing yet", MISSING, MISSING)])


def _scores(watched: Watched) -> Iterator[tuple[str, str, int]]:
    if watched.progress:
        last = watched.progress[-1]
        yield "training log-loss", f"{last.values['loss']:.4f}", last.step
        yield "training accuracy", f"{last.values['accuracy']:.2%}", last.step
    for part in ScoredPart:
        scored = [one for one in _of(watched.run, Kind.EVALUATED) if part_of(one) is part]
        if not scored:
            continue
        last, best = scored[-1], min(scored, key=lambda one: one.values["log_loss"])
        yield f"{part} log-loss", f"{last.values['log_loss']:.4f}", last.step
        if last.values["auc"] is not None:
            yield f"{part} AUC", f"{last.values['auc']:.4f}", last.step
        if best is not last:
            yield f"best {part} log-loss", f"{best.values['log_loss']:.4f}", best.step


def _speeds(watched: Watched) -> Iterator[tuple[str, str, int]]:
    speeds, sent = _speed(watched.progress), _sent(watched.progress)
    if speeds:
        yield "samples a second", integer(speeds[-1][1]), round(speeds[-1][0])
    if sent:
        yield "bytes sent a sample", digits(sent[-1][1]), round(sent[-1][0])
    for one in reversed(watched.progress):
        if one.values.get("sent_bytes") and one.values.get("dense_equivalent_bytes"):
            times = one.values["dense_equivalent_bytes"] / one.values["sent_bytes"]
            yield "dense ÷ sent", f"{times:.1f}×", one.step
            break


def _lives(watched: Watched) -> Iterator[tuple[str, str, int]]:
    saved, starts = _of(watched.run, Kind.SAVED), _of(watched.run, Kind.STARTED)
    if saved:
        yield "checkpoints saved", integer(len(saved)), saved[-1].step
    if len(starts) > 1:
        yield "starts", integer(len(starts)), starts[-1].step


def _plots(run: Run) -> Iterator[Plot]:
    points = _of(run, Kind.PROGRESS)
    parts = {part_of(one) for one in _of(run, Kind.EVALUATED)}
    part = ScoredPart.VALIDATION if ScoredPart.VALIDATION in parts else ScoredPart.TEST
    scored = [one for one in _of(run, Kind.EVALUATED) if part_of(one) is part]
    yield Plot(
        title="Log-loss",
        line=[(one.step, one.values["loss"]) for one in curve(run.events)],
        dots=[(one.step, one.values["log_loss"]) for one in scored],
        dots_name=f"on the {part} part",
    )
    yield Plot(title="Samples a second", line=_speed(points), from_zero=True)
    yield Plot(title="Bytes sent a sample", line=_sent(points), from_zero=True, note=ALL_STEPS)


def _speed(points: Sequence[Event]) -> list[Point]:
    """Of training steps, without evaluations and checkpoints."""
    return [
        (one.step, one.values["timed_rows"] / one.values["timed_seconds"])
        for one in points
        if one.values["timed_rows"] and one.values["timed_seconds"]
    ]


def _sent(points: Sequence[Event]) -> list[Point]:
    found: list[Point] = []
    for one in points:
        sent: Any = one.values.get("sent_bytes")
        rows: Any = one.values.get("sent_rows")
        if sent and rows:
            found.append((one.step, sent / rows))
    return found


def _time(watched: Watched) -> Table | None:
    """Where the leader's time goes, since the last point of the curve and in all."""
    last = [one for one in watched.progress if one.values["timed_rows"]]
    if not last:
        return None
    rows: list[tuple[str, str, str]] = []
    for span in Span:
        of_all = [one.values["seconds_by_span"].get(span, 0.0) for one in last]
        seconds = [sum(one.values["seconds_by_span"].values()) for one in last]
        if sum(of_all):
            now = of_all[-1] / seconds[-1] if seconds[-1] else 0.0
            rows.append((span, f"{now:.0%}", f"{sum(of_all) / sum(seconds):.0%}"))
    return Table(("span", "last", "all"), rows)


def _happened(watched: Watched) -> Table | None:
    found = [one for one in watched.run.events if one.kind in HAPPENED][-LATEST:]
    rows = [
        (
            datetime.fromtimestamp(one.time_seconds).astimezone().strftime("%H:%M:%S"),
            integer(one.step),
            HAPPENED[one.kind] + _more(one),
        )
        for one in reversed(found)
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
