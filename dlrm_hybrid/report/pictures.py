"""The pictures of a report; one that nothing is known for is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import final

import pandas as pd
from matplotlib.figure import Figure

from dlrm_hybrid.report import charts, curves
from dlrm_hybrid.report.axes import AxesText, keyed, style
from dlrm_hybrid.report.charts import MAX_LABELS, Line
from dlrm_hybrid.report.curves import Axis, Band, Curve, cpu_use, cpu_use_of_all, network_use
from dlrm_hybrid.report.measures import BYTES, TEST_LOSS
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.tables import by_run, bytes_by_class, cpu_seconds_by_role, span_bars
from dlrm_hybrid.telemetry import compression

KEY_COLUMNS = 2
LOSS_CAPTIONS = {
    Axis.STEPS: "Lines: mean training loss since the point before; diamonds: log-loss on the test "
    "part, or on the part to validate where that is scored.",
    Axis.SECONDS: "Evaluation, checkpoints and the first five steps of an attempt do not count.",
    Axis.BYTES: "Samples times the mean bytes per sample of the whole run.",
}

DENSITY_CAPTION = "All tensors together, since the point before."
THRESHOLD_CAPTION = "Line: the median tensor's mean threshold; shaded: from lowest to highest."
KINDS = ((compression.GRADIENT, "gradients"), (compression.ACTIVATION, "activations"))


@final
@dataclass(frozen=True, slots=True)
class Picture:
    """A picture with its title and what there is to know about it.

    Attributes:
        title: of the picture.
        figure: the picture.
        caption: what there is to know.
        has_key: its lines are the runs, in their colours; named beside it.
    """

    title: str
    figure: Figure
    caption: str
    has_key: bool

    @contextmanager
    def alone(self) -> Generator[Figure, None, None]:
        """The figure with its key in it, for as long."""
        with keyed(self.figure, KEY_COLUMNS) if self.has_key else nullcontext():
            yield self.figure


def losses(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Loss over steps, over seconds and over bytes."""
    for axis, caption in LOSS_CAPTIONS.items():
        drawn = [
            Line(
                label=label,
                style=style(number),
                curve=curves.training_loss(run, axis),
                dots=curves.evaluated_loss(run, axis),
                band=None,
            )
            for number, (label, run) in enumerate(zip(labels, runs, strict=True))
        ]
        if _something(drawn):
            unit = "B" if axis is Axis.BYTES else ""
            text = AxesText(axis.value, "log-loss", unit, x_is_whole=axis is Axis.STEPS)
            figure = charts.losses(drawn, text, above_zero=axis is Axis.BYTES)
            yield Picture(f"Loss over {axis.value}", figure, caption, has_key=True)


def traffic(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Bytes by class, and their shares."""
    counted = by_run(runs, labels, bytes_by_class).dropna(how="all")
    caption = "Sent while training; every message counts once."
    yield from _bars("Bytes by class", counted, BYTES.title, caption)
    shares = counted.div(counted.sum(axis="columns") / 100, axis="index")
    caption = "The same bytes, scaled to 100 % for each run."
    yield from _bars("Shares of the classes", shares, "% of the bytes of each run", caption)


def quality(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """What quality the bytes of each run bought; nothing for a run alone."""
    scored = [
        (num_bytes, loss, label, style(number))
        for number, (label, run) in enumerate(zip(labels, runs, strict=True))
        if (num_bytes := BYTES.pick(run.summary))
        and (loss := TEST_LOSS.pick(run.summary)) is not None
    ]
    if len(scored) > 1:
        positions = [(num_bytes, loss) for num_bytes, loss, *_ in scored]
        figure = charts.points(
            positions,
            [label for *_, label, _ in scored],
            [drawn for *_, drawn in scored],
            AxesText(BYTES.title, TEST_LOSS.title, "B"),
        )
        caption = "Lower is better, further left is cheaper."
        yield Picture("Quality and bytes", figure, caption, has_key=len(scored) > MAX_LABELS)


def time_by_span(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """What the ranks of each role do all the time."""
    caption = "Wall time of training steps per sample of all trainers."
    return _bars("Time by span", span_bars(runs, labels), "µs per sample", caption)


def cpu(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """CPU seconds by role."""
    spent = by_run(runs, labels, cpu_seconds_by_role).dropna(how="all")
    caption = "A stage's workers are summed over all trainers."
    return _bars("CPU seconds by role", spent, "CPU seconds of training steps", caption)


def usage(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """How busy links and processors were: of each run, or of each rank of a run alone."""
    is_alone = len(runs) == 1
    if is_alone:
        network = _named(network_use(runs[0]))
        processors = _named(cpu_use(runs[0]))
        whose = "Each rank's link, the busiest first", "Each rank, of one core."
    else:
        network = _lines(runs, labels, lambda run: next(iter(network_use(run).values()), None))
        processors = _lines(runs, labels, cpu_use_of_all)
        whose = "The busiest link of each run", "All ranks, of the cores that they can use."
    caption = f"{whose[0]}; in each window of time the busier direction."
    for title, drawn, y, text in (
        ("Network use over time", network, "% of the link's rate", caption),
        ("CPU use over time", processors, "CPU use, %", whose[1]),
    ):
        if _something(drawn):
            axes = AxesText("seconds since training began", y)
            figure = charts.shares(drawn, axes, with_key=is_alone)
            yield Picture(title, figure, text, has_key=not is_alone)


def compressed(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Density and thresholds of gradients and activations over steps."""
    for prefix, what in KINDS:
        for title, found, y, caption in (
            ("Density", curves.density, "share of elements sent", DENSITY_CAPTION),
            ("Thresholds", curves.threshold, "threshold", THRESHOLD_CAPTION),
        ):
            drawn = _lines(runs, labels, functools.partial(found, prefix=prefix))
            if _something(drawn):
                figure = charts.magnitudes(drawn, AxesText(Axis.STEPS.value, y, x_is_whole=True))
                yield Picture(f"{title} of {what}", figure, caption, has_key=True)


def _bars(title: str, parts: pd.DataFrame, x_text: str, caption: str) -> Iterator[Picture]:
    if not parts.empty:
        yield Picture(title, charts.stacked(parts, x_text), caption, has_key=False)


def _named(shapes: Mapping[str, Curve]) -> list[Line]:
    """In the order given; a name has the same colour in every picture of the same names."""
    numbers = {name: number for number, name in enumerate(sorted(shapes))}
    return [
        Line(label=name, style=style(numbers[name]), curve=curve, dots=None, band=None)
        for name, curve in shapes.items()
    ]


def _lines(
    runs: Sequence[Run], labels: Sequence[str], found: Callable[[Run], Curve | Band | None]
) -> list[Line]:
    drawn: list[Line] = []
    for number, (label, run) in enumerate(zip(labels, runs, strict=True)):
        shape = found(run)
        curve, band = (shape["middle"], shape) if isinstance(shape, Mapping) else (shape, None)
        drawn.append(Line(label=label, style=style(number), curve=curve, dots=None, band=band))
    return drawn


def _something(drawn: Sequence[Line]) -> bool:
    return any(line.curve is not None or line.dots is not None for line in drawn)
