"""Pictures of runs as data, from their events and summaries; pure. `drawing` draws them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median
from typing import Any, TypeAlias, final

import numpy as np
import pandas as pd

from dlrm_hybrid.report.measures import BYTES, TEST_LOSS
from dlrm_hybrid.report.runs import Run, steps_before
from dlrm_hybrid.report.tables import by_run, bytes_by_class, cpu_seconds_by_role, span_bars
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind, curve, part_of
from dlrm_hybrid.types import ScoredPart

MAX_POINTS = 120  # of a line; more cannot be distinguished
MAX_LABELS = 12  # with more points their names would overlap
MOST_WINDOWS = 60  # the use of single steps is noise; trends are longer
START, SECONDS = 0, 1  # columns of a recorded series

Curve: TypeAlias = pd.Series
"""Points of a line: values by their position on the x-axis, left to right."""

Band = Mapping[str, Curve]
"""A curve `middle` between curves `low` and `high`."""

Window = tuple[float, float, float]
"""Start since 1970, seconds, and the amount used in them."""


class Over(Enum):
    """The x-axis of a loss curve, as its text."""

    STEPS = "training steps"
    SECONDS = "seconds of training"
    BYTES = "bytes sent in training"


class Range(Enum):
    """The rule for the range of a figure's y-axis."""

    LOSSES = auto()  # all but outliers far above
    MAGNITUDES = auto()  # from zero, or logarithmic if the values differ much
    SHARES = auto()  # 0 to 100


@final
@dataclass(frozen=True, slots=True)
class AxesText:
    """Texts of a panel's axes, with units.

    Attributes:
        x_unit: unit at the ticks of the x-axis, e.g. B for 12.3 MB; empty for 12.3M.
        x_is_whole: whether ticks are whole numbers.
    """

    x: str
    y: str
    x_unit: str = ""
    x_is_whole: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a picture.

    Attributes:
        label: name in the key.
        number: number of its style.
        dots: single points beside it.
        band: shaded area around the line.
    """

    label: str
    number: int
    curve: Curve | None
    dots: Curve | None = None
    band: Band | None = None


@final
@dataclass(frozen=True, slots=True)
class Lines:
    """A panel with lines, and how its axes are drawn.

    Attributes:
        shows: range of the y-axis.
        x_positive: no x is 0, so the axis is logarithmic if one line ends far before another.
        x_doubles: x has few whole numbers, each about twice the one before; all are ticks.
        has_key: whether the key to the lines is part of the picture.
    """

    lines: Sequence[Line]
    text: AxesText
    shows: Range
    x_positive: bool = False
    x_doubles: bool = False
    has_key: bool = False


@final
@dataclass(frozen=True, slots=True)
class Points:
    """A named point for each run, on a logarithmic x-axis.

    Attributes:
        places: x and y of each point.
        numbers: number of each point's style.
    """

    places: Sequence[tuple[float, float]]
    labels: Sequence[str]
    numbers: Sequence[int]
    text: AxesText


@final
@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars of stacked parts, with their sum at the end.

    Attributes:
        parts: a row for each bar, a column for each part.
        x_text: meaning and unit of the lengths.
    """

    parts: pd.DataFrame
    x_text: str


@final
@dataclass(frozen=True, slots=True)
class Picture:
    """A picture with title and caption.

    Attributes:
        caption: explanation for the reader.
        has_runs: whether its lines or points are the runs, whose key a page shows beside it.
    """

    title: str
    content: Lines | Points | Bars
    caption: str
    has_runs: bool


LOSS_CAPTIONS = {
    Over.STEPS: "Lines: mean training loss since the point before; diamonds: log-loss on the test "
    "part, or on the part to validate where that is scored. A run with new rows goes on where the "
    "one that it began from ends.",
    Over.SECONDS: "Evaluation, checkpoints and warm-up do not count.",
    Over.BYTES: "Samples times the mean bytes per sample of the whole run.",
}
DENSITY_CAPTION = "All tensors together, since the point before."
THRESHOLD_CAPTION = "Line: the median tensor's mean threshold; shaded: from lowest to highest."
KINDS = ((compression.GRADIENT, "gradients"), (compression.ACTIVATION, "activations"))
ALL_STEPS = "Of all steps; the summary's figure leaves out warm-up."


def losses(
    runs: Sequence[Run], labels: Sequence[str], axes: Sequence[Over] = tuple(Over)
) -> Iterator[Picture]:
    """Yield pictures of the loss over steps, seconds and bytes; none where nothing is known."""
    before = steps_before(runs)
    for over in axes:
        lines = [
            Line(
                label=label,
                number=number,
                curve=_after(training_loss(run, over), start if over is Over.STEPS else 0),
                dots=_after(evaluated_loss(run, over), start if over is Over.STEPS else 0),
            )
            for number, (label, run, start) in enumerate(zip(labels, runs, before, strict=True))
        ]
        unit = "B" if over is Over.BYTES else ""
        text = AxesText(over.value, "log-loss", unit, x_is_whole=over is Over.STEPS)
        content = Lines(lines, text, Range.LOSSES, x_positive=over is Over.BYTES)
        yield from _picture(f"Loss over {over.value}", content, LOSS_CAPTIONS[over])


def label_losses(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield a picture of the log-loss of each of several labels over steps, one without any."""
    lines: list[Line] = []
    for run, of_run, start in zip(runs, labels, steps_before(runs), strict=True):
        for name in run.summary["test"].get("labels", {}):
            curve = _after(evaluated_loss(run, Over.STEPS, name), start)
            label = name if len(runs) == 1 else f"{of_run} · {name}"
            lines.append(Line(label=label, number=len(lines), curve=curve))
    text = AxesText(Over.STEPS.value, "log-loss", x_is_whole=True)
    content = Lines(lines, text, Range.LOSSES, has_key=True)
    yield from _picture("Loss of each label", content, "Of each evaluation.")


def rates(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield pictures of samples per second and bytes sent per sample over steps."""
    for title, value, caption in (
        ("Samples a second", speed, "Training steps alone, as their leader sees them."),
        ("Bytes sent a sample", sent, ALL_STEPS),
    ):
        text = AxesText(Over.STEPS.value, "", x_is_whole=True)
        lines = _lines(runs, labels, functools.partial(_over_steps, value=value))
        yield from _picture(title, Lines(lines, text, Range.MAGNITUDES), caption)


def traffic(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield pictures of bytes by class of traffic, and of their shares."""
    sizes = by_run(runs, labels, bytes_by_class).dropna(how="all")
    caption = "Sent while training; every message counts once."
    yield from _bars("Bytes by class", sizes, BYTES.title, caption)
    shares = sizes.div(sizes.sum(axis="columns") / 100, axis="index")
    caption = "The same bytes, scaled to 100 % for each run."
    yield from _bars("Shares of the classes", shares, "% of the bytes of each run", caption)


def quality(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield a picture of test loss over bytes per sample, unless fewer than two runs have both."""
    scored = [
        ((num_bytes, loss), label, number)
        for number, (label, run) in enumerate(zip(labels, runs, strict=True))
        if (num_bytes := BYTES.pick(run.summary))
        and (loss := TEST_LOSS.pick(run.summary)) is not None
    ]
    if len(scored) > 1:
        text = AxesText(BYTES.title, TEST_LOSS.title, "B")
        places, names, numbers = zip(*scored, strict=True)
        content = Points(places, names, numbers, text)
        caption = "Lower is better, further left is cheaper."
        yield Picture("Quality and bytes", content, caption, has_runs=len(scored) > MAX_LABELS)


def time_by_span(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield a picture of each role's time by span."""
    caption = "Wall time of training steps per sample of all trainers."
    return _bars("Time by span", span_bars(runs, labels), "µs per sample", caption)


def cpu(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield a picture of CPU seconds by role."""
    seconds = by_run(runs, labels, cpu_seconds_by_role).dropna(how="all")
    caption = "A stage's workers are summed over all trainers."
    return _bars("CPU seconds by role", seconds, "CPU seconds of training steps", caption)


def usage(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield pictures of network and CPU use: of each run, or of each rank of a single run."""
    is_alone = len(runs) == 1
    if is_alone:
        network, processors = _named(network_use(runs[0])), _named(cpu_use(runs[0]))
        whose = "Each rank's link, the busiest first", "Each rank, of one core."
    else:
        network = _lines(runs, labels, lambda run: next(iter(network_use(run).values()), None))
        processors = _lines(runs, labels, cpu_use_of_all)
        whose = "The busiest link of each run", "All ranks, of the cores that they can use."
    caption = f"{whose[0]}; in each window of time the busier direction."
    for title, lines, y, text in (
        ("Network use over time", network, "% of the link's rate", caption),
        ("CPU use over time", processors, "CPU use, %", whose[1]),
    ):
        axes = AxesText("seconds since training began", y)
        content = Lines(lines, axes, Range.SHARES, has_key=is_alone)
        yield from _picture(title, content, text)


def compressed(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Yield pictures of density and thresholds of gradients and activations over steps."""
    for prefix, what in KINDS:
        for title, shape, y, caption in (
            ("Density", density, "share of elements sent", DENSITY_CAPTION),
            ("Thresholds", threshold, "threshold", THRESHOLD_CAPTION),
        ):
            lines = _lines(runs, labels, functools.partial(shape, prefix=prefix))
            text = AxesText(Over.STEPS.value, y, x_is_whole=True)
            content = Lines(lines, text, Range.MAGNITUDES)
            yield from _picture(f"{title} of {what}", content, caption)


def _picture(title: str, content: Lines, caption: str) -> Iterator[Picture]:
    if any(line.curve is not None or line.dots is not None for line in content.lines):
        yield Picture(title, content, caption, has_runs=not content.has_key)


def _bars(title: str, parts: pd.DataFrame, x_text: str, caption: str) -> Iterator[Picture]:
    if not parts.empty:
        yield Picture(title, Bars(parts, x_text), caption, has_runs=False)


def _named(curves: Mapping[str, Curve]) -> list[Line]:
    """Make lines in the order given; styles go by the sorted names, equal in all pictures."""
    numbers = {name: number for number, name in enumerate(sorted(curves))}
    return [Line(label=name, number=numbers[name], curve=curves[name]) for name in curves]


def _lines(
    runs: Sequence[Run], labels: Sequence[str], shape_of: Callable[[Run], Curve | Band | None]
) -> list[Line]:
    lines: list[Line] = []
    for number, (label, run) in enumerate(zip(labels, runs, strict=True)):
        shape = shape_of(run)
        line, band = (shape["middle"], shape) if isinstance(shape, Mapping) else (shape, None)
        lines.append(Line(label=label, number=number, curve=line, band=band))
    return lines


def _after(curve: Curve | None, start: int) -> Curve | None:
    """A curve that begins at `start`, not at 0."""
    return curve if curve is None or not start else curve.set_axis(curve.index + start)


def training_loss(run: Run, over: Over) -> Curve | None:
    """Mean training loss of the steps before each point; None if the axis was not measured."""
    position = _positions(run, over)
    parts = _parts(curve(run.events))
    if position is None or not parts:
        return None
    return pd.Series([_mean(part) for part in parts], [position(part[-1]) for part in parts])


def evaluated_loss(run: Run, over: Over, label: str | None = None) -> Curve | None:
    """Log-loss of each evaluation on the validation part, or on the test part without one.

    Of one label if there are several; None without evaluations or if the axis was not measured.
    """
    position = _positions(run, over)
    evaluations = [event for event in run.events if event.kind is Kind.EVALUATED]
    validations = [event for event in evaluations if part_of(event) is ScoredPart.VALIDATION]
    points = validations or evaluations
    if position is None or not points:
        return None
    scores = [x.values if label is None else x.values["labels"][label] for x in points]
    return pd.Series([x["log_loss"] for x in scores], [position(event) for event in points])


def density(run: Run, prefix: str) -> Curve | None:
    """Share of elements sent before each point, over all names with a prefix."""
    shares = {
        part[-1].step: compression.density((event.values["of"] for event in part), prefix)
        for part in _parts([event for event in run.events if event.kind is Kind.COMPRESSION])
    }
    return _curve({step: share for step, share in shares.items() if share is not None})


def threshold(run: Run, prefix: str) -> Band | None:
    """Median, lowest and highest threshold of all names with a prefix, by step."""
    by_step: dict[float, list[float]] = {}
    for part in _parts([event for event in run.events if event.kind is Kind.COMPRESSION]):
        last = part[-1]
        values = [
            value["threshold"]
            for name, value in last.values["of"].items()
            if name.startswith(prefix) and value["threshold"]
        ]
        if values:
            by_step[last.step] = values
    if not by_step:
        return None
    figures: Mapping[str, Callable[[list[float]], float]]
    figures = {"middle": median, "low": min, "high": max}
    return {
        name: pd.Series({step: figure(values) for step, values in by_step.items()})
        for name, figure in figures.items()
    }


def speed(event: Event) -> float | None:
    """Samples per second of the training steps before a point of the loss curve."""
    rows, seconds = event.values["timed_rows"], event.values["timed_seconds"]
    return rows / seconds if rows and seconds else None


def sent(event: Event) -> float | None:
    """Bytes per sample of all steps before a point of the loss curve; None if not counted."""
    num_bytes, rows = event.values["sent_bytes"], event.values["sent_rows"]
    return num_bytes / rows if num_bytes and rows else None


def _over_steps(run: Run, value: Callable[[Event], float | None]) -> Curve | None:
    points = {event.step: value(event) for event in run.events if event.kind is Kind.PROGRESS}
    pairs = [(step, number) for step, number in points.items() if number is not None]
    return _curve({part[-1][0]: sum(y for _, y in part) / len(part) for part in _parts(pairs)})


def _curve(points: Mapping[Any, float]) -> Curve | None:
    return pd.Series(points, dtype=float) if points else None


def _parts(points: Sequence[Any]) -> list[Sequence[Any]]:
    """Group neighbouring points, so that at most `MAX_POINTS` groups are left."""
    size = -(-len(points) // MAX_POINTS)
    return [points[start : start + size] for start in range(0, len(points), size or 1)]


def _mean(points: Sequence[Event]) -> float:
    rows = sum(point.values["rows"] for point in points)
    return sum(point.values["loss"] * point.values["rows"] for point in points) / (rows or 1)


def _positions(run: Run, over: Over) -> Callable[[Event], float] | None:
    """A function from an event to its position on the axis; None if that was not measured."""
    if over is Over.STEPS:
        return lambda event: event.step
    if over is Over.BYTES:
        per_sample = run.summary["network"]["bytes_per_sample"]
        return None if per_sample is None else lambda event: event.values["samples"] * per_sample
    seconds, at_step = 0.0, {0: 0.0}
    for event in run.events:
        if event.kind is Kind.PROGRESS:
            seconds += event.values["timed_seconds"]
        if event.kind is not Kind.SAVED:  # known steps later, when its files are written
            at_step[event.step] = seconds
    return (lambda event: at_step[event.step]) if seconds else None


def network_use(run: Run) -> dict[str, Curve]:
    """Percent of the link's rate in the busier direction, over time, by role of each rank.

    Ranks without a link of known rate are left out. The busiest rank is the first.
    """

    def of_link(rank: Mapping[str, Any]) -> Iterator[Window]:
        interface = rank.get("interface")
        if interface is not None and interface["rate_bits_per_second"]:
            rate_bytes = interface["rate_bits_per_second"] / 8
            for start, seconds, *num_bytes in interface["series"]:
                # Of a point that joins windows, the busier bytes exceed either direction's sum.
                yield start, seconds, max(num_bytes) / rate_bytes

    windows = _windows(run, of_link)
    busy = {role: _mean_use(series) for role, series in windows.items()}
    return _use({role: windows[role] for role in sorted(busy, key=lambda role: -busy[role])})


def cpu_use(run: Run) -> dict[str, Curve]:
    """Percent of a core over time, by role of each rank."""
    used = _windows(run, lambda rank: ((x, y, z) for x, y, z in rank.get("cpu_series", ())))
    return _use(used)


def cpu_use_of_all(run: Run) -> Curve | None:
    """Percent over time of all cores that the ranks can use."""
    cores_used = pd.DataFrame(cpu_use(run))
    cores = min(len(cores_used.columns), run.environment.get("cores", len(cores_used.columns)))
    return None if cores_used.empty else cores_used.dropna().sum(axis="columns") / cores


def _windows(
    run: Run, of_rank: Callable[[Mapping[str, Any]], Iterable[Window]]
) -> dict[str, list[Window]]:
    """The series of all ranks by role, of all attempts; roles without any are left out."""
    windows: dict[str, list[Window]] = {}
    for event in run.events:
        if event.kind is Kind.RANK:
            windows.setdefault(event.values["role"], []).extend(of_rank(event.values))
    return {role: series for role, series in windows.items() if series}


def _mean_use(series: Sequence[Window]) -> float:
    return sum(used for *_, used in series) / (sum(seconds for _, seconds, _ in series) or 1.0)


def _use(windows: Mapping[str, Sequence[Window]]) -> dict[str, Curve]:
    """Resample all series to the same times, in seconds since the first window."""
    if not windows:
        return {}
    all_windows = [window for series in windows.values() for window in series]
    first = min(window[START] for window in all_windows)
    last = max(window[START] + window[SECONDS] for window in all_windows)
    most = max(len(series) for series in windows.values())
    edges = np.linspace(first, last, min(most, MOST_WINDOWS) + 1)
    middles = (edges[1:] + edges[:-1]) / 2 - first
    curves = {role: _share(series, edges, middles) for role, series in windows.items()}
    return {role: share for role, share in curves.items() if len(share)}


def _share(series: Sequence[Window], edges: np.ndarray, middles: np.ndarray) -> Curve:
    """Percent used between each two edges, of the time measured between them.

    A window that an edge cuts counts on both sides in proportion.
    """
    starts, seconds, used = np.array(sorted(series)).T
    times = np.stack([starts, starts + seconds], axis=1).ravel()
    measured, spent = (
        np.diff(np.interp(edges, times, _sums(amounts))) for amounts in (seconds, used)
    )
    is_measured = measured > 0.5 * (edges[1] - edges[0])
    return pd.Series(100 * spent[is_measured] / measured[is_measured], middles[is_measured])


def _sums(amounts: np.ndarray) -> np.ndarray:
    """The cumulative sum before and after each amount, in turn."""
    ends = np.cumsum(amounts)
    return np.stack([ends - amounts, ends], axis=1).ravel()
