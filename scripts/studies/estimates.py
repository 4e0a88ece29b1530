"""Shows how near estimated thresholds come to the wanted density, by estimator.

    python scripts/studies/estimates.py FOLDER... --output estimates.png

Figure 9 of SIDCo (Abdelmoniem et al., MLSys 2021) for this model: a panel for each estimator, k̂ / k
over steps. Prints medians, ranges and how many steps come near. Runs with `telemetry.every=1` have
a point for every step; points are means over all trainers and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import pandas as pd
from frame import Frame, estimator_of, study
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import add_key, drawing, logarithmic, panels, style
from dlrm_hybrid.report.figures import AxesText, Curve
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ConfigError

COLUMNS = 3
PANEL_INCHES = (3.4, 2.2)
SHOWN = (0.1, 10.0)  # what is beyond lies on the edge
NEAR = 0.2  # of k: SIDCo's tolerance
SMOOTHED_POINTS = 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Of one run.

    Attributes:
        estimator: what found the thresholds.
        density: share of the elements that was asked for.
        curve: k̂ / k, what left over what was asked for, over the step where its interval ends.
    """

    estimator: str
    density: float
    curve: Curve


def estimates(runs: Sequence[Run]) -> list[Estimates]:
    """Of all complete runs, in their order.

    Raises:
        ConfigError: a run has no density to come near to, or nothing of it is on record; or two
            runs have one estimator and density.
    """
    found = [_of_run(run) for run in runs if run.status == COMPLETE]
    seen: set[tuple[str, float]] = set()
    for one in found:
        if (one.estimator, one.density) in seen:
            raise ConfigError(f"two runs of {one.estimator} at density {one.density:.3g}")
        seen.add((one.estimator, one.density))
    return found


def table(found: Sequence[Estimates]) -> Table:
    """A row for each estimator at each density, of all its points."""
    ordered = sorted(found, key=lambda one: -one.density)
    return Table(
        ("density", "estimator", "mean", "median", "5 to 95 %", f"within {NEAR:.0%}"),
        tuple((f"{one.density:.3g}", one.estimator, *_spread(one.curve)) for one in ordered),
        align="llr",
    )


def figure(found: Sequence[Estimates]) -> Figure:
    """A panel for each estimator, k̂ / k pale and smoothed; colours are densities."""
    densities, grouped = _densities(found), _by_estimator(found)
    num_rows = -(-len(grouped) // COLUMNS)
    texts = [AxesText("training steps", "k̂ / k")] * (COLUMNS * num_rows)
    size_inches = (PANEL_INCHES[0] * COLUMNS, PANEL_INCHES[1] * num_rows)
    with drawing():
        picture, placed = panels(size_inches, texts, [1.0] * num_rows)
        for axes in placed[len(grouped) :]:
            axes.remove()
        for axes, (name, own) in zip(placed, grouped.items(), strict=False):
            axes.set_title(name, fontsize="medium", loc="left")
            for number, density in enumerate(densities):
                if density in own:
                    _draw(axes, own[density], number)
            _scale(axes)
        add_key(picture, len(densities))
        return picture


def _of_run(run: Run) -> Estimates:
    density = run.config["gradient"]["density"]
    if "warmup_steps" in run.config["gradient"]:
        raise ConfigError(
            f"{run.folder}: gradient={run.config['gradient']['name']} asks for other densities as "
            "it warms up; use gradient=dct gradient.threshold=dgc gradient.lifespan=1"
        )
    points: dict[int, float] = {}
    for event in run.events:
        if event.kind is Kind.COMPRESSION:
            share = compression.density([event.values["of"]], compression.GRADIENT)
            points[event.step] = (share or 0.0) / density
    if not points or density == 1.0:
        raise ConfigError(f"{run.folder}: nothing of its gradients was held back")
    curve = pd.Series(points)
    return Estimates(estimator=estimator_of(run.config), density=density, curve=curve)


def _by_estimator(found: Sequence[Estimates]) -> Mapping[str, Mapping[float, Estimates]]:
    grouped: dict[str, dict[float, Estimates]] = {}
    for one in found:
        grouped.setdefault(one.estimator, {})[one.density] = one
    return grouped


def _densities(found: Sequence[Estimates]) -> list[float]:
    return sorted({one.density for one in found}, reverse=True)


def _spread(found: Frame) -> tuple[str, ...]:
    return (
        f"{found.mean():.2f}",
        f"{found.median():.2f}",
        f"{found.quantile(0.05):.2f} – {found.quantile(0.95):.2f}",
        f"{(abs(found - 1) <= NEAR).mean():.0%}",
    )


def smoothed(curve: Frame) -> Curve:
    """The mean of every point and up to 19 before it."""
    return curve.rolling(SMOOTHED_POINTS, min_periods=1).mean()


def _draw(axes: Axes, one: Estimates, number: int) -> None:
    """Every point pale, and their running mean."""
    color, label = style(number).color, f"density {one.density:.3g}"
    axes.plot(one.curve.clip(*SHOWN), color=color, linewidth=0.4, alpha=0.3)
    axes.plot(smoothed(one.curve).clip(*SHOWN), color=color, linewidth=1.4, label=label)


def _scale(axes: Axes) -> None:
    axes.axhline(1, color="#1a1a1a", linewidth=0.6, zorder=0)
    axes.set_yscale("log")
    axes.set_ylim(*SHOWN)
    logarithmic(axes.yaxis)


def main() -> None:
    """Print the table, write the picture."""
    study(__doc__, estimates, table, figure)


if __name__ == "__main__":
    main()
