"""The pictures of a report; one that nothing is known for is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dlrm_hybrid.report import charts, curves
from dlrm_hybrid.report.charts import AxesText, Line
from dlrm_hybrid.report.curves import Axis, Band, Curve
from dlrm_hybrid.report.document import Picture
from dlrm_hybrid.report.measures import BYTES, TEST_LOSS
from dlrm_hybrid.report.palette import style
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.tables import bytes_by_class, cpu_seconds_by_role
from dlrm_hybrid.telemetry import compression

LOSS_CAPTIONS = {
    Axis.STEPS: "Lines: mean training loss since the point before; diamonds: test log-loss.",
    Axis.SECONDS: "Evaluation, checkpoints and the first five steps of an attempt do not count.",
    Axis.BYTES: "Samples times the mean bytes per sample of the whole run.",
}

KINDS = ((compression.GRADIENT, "gradients"), (compression.ACTIVATION, "activations"))


def losses(runs: Sequence[Run]) -> Iterator[Picture]:
    """Loss over steps, over seconds and over bytes."""
    for axis, caption in LOSS_CAPTIONS.items():
        drawn = [
            Line(
                style=style(number),
                curve=curves.training_loss(run, axis),
                dots=curves.test_loss(run, axis),
                band=None,
            )
            for number, run in enumerate(runs)
        ]
        if _something(drawn):
            svg = charts.losses(drawn, AxesText(axis.value, "log-loss"))
            yield Picture(f"Loss over {axis.value}", svg, caption)


def traffic(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """Bytes by class, their shares, and what quality they bought."""
    counted = {
        label: by_class
        for label, run in zip(labels, runs, strict=True)
        if (by_class := bytes_by_class(run.summary))
    }
    if not counted:
        return
    svg = charts.stacked(list(counted), _by_part(counted), BYTES.title)
    yield Picture("Bytes by class", svg, "Sent while training; every message counts once.")
    shares = {
        label: {name: 100 * part / sum(values.values()) for name, part in values.items()}
        for label, values in counted.items()
    }
    svg = charts.stacked(list(shares), _by_part(shares), "% of the bytes of each run")
    yield Picture("Shares of the classes", svg, "The same bytes, each run's whole as 100 %.")


def quality(runs: Sequence[Run]) -> Iterator[Picture]:
    """What quality the bytes of each run bought; nothing for a run alone."""
    scored = [
        (num_bytes, loss, style(number))
        for number, run in enumerate(runs)
        if (num_bytes := BYTES.pick(run.summary))
        and (loss := TEST_LOSS.pick(run.summary)) is not None
    ]
    if len(scored) > 1:
        places = [(num_bytes, loss) for num_bytes, loss, _ in scored]
        text = AxesText(BYTES.title, TEST_LOSS.title)
        svg = charts.points(places, [drawn for *_, drawn in scored], text)
        yield Picture("Quality and bytes", svg, "Lower is better, further left is cheaper.")


def cpu(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Picture]:
    """CPU seconds by role."""
    spent = {
        label: by_role
        for label, run in zip(labels, runs, strict=True)
        if (by_role := cpu_seconds_by_role(run.summary))
    }
    if spent:
        svg = charts.stacked(list(spent), _by_part(spent), "CPU seconds of training steps")
        yield Picture("CPU seconds by role", svg, "A stage's workers are summed over all trainers.")


def compressed(runs: Sequence[Run]) -> Iterator[Picture]:
    """Density and thresholds of gradients and activations over steps."""
    for prefix, what in KINDS:
        shares = _lines(runs, lambda run, prefix=prefix: curves.density(run, prefix))
        if _something(shares):
            svg = charts.magnitudes(shares, AxesText(Axis.STEPS.value, "share of elements sent"))
            caption = "All tensors together, since the point before."
            yield Picture(f"Density of {what}", svg, caption)
        bands = _lines(runs, lambda run, prefix=prefix: curves.threshold(run, prefix))
        if _something(bands):
            svg = charts.magnitudes(bands, AxesText(Axis.STEPS.value, "threshold"))
            caption = "Line: the median tensor's mean threshold; shaded: from lowest to highest."
            yield Picture(f"Thresholds of {what}", svg, caption)


def _lines(runs: Sequence[Run], found: Callable[[Run], Curve | Band | None]) -> list[Line]:
    drawn: list[Line] = []
    for number, run in enumerate(runs):
        shape = found(run)
        curve, band = (shape.middle, shape) if isinstance(shape, Band) else (shape, None)
        drawn.append(Line(style=style(number), curve=curve, dots=None, band=band))
    return drawn


def _something(drawn: Sequence[Line]) -> bool:
    return any(line.curve is not None or line.dots is not None for line in drawn)


def _by_part(bars: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """By part its length in each bar; a part that is nowhere is left out."""
    names = dict.fromkeys(name for values in bars.values() for name in values)
    lengths = {name: [values.get(name, 0.0) for values in bars.values()] for name in names}
    return {name: values for name, values in lengths.items() if any(values)}
