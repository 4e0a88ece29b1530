"""Draws thresholds over steps: figures 2 and 5 of the DCT paper (Gupta et al., KDD 2021).

    python scripts/studies/thresholds.py --runs RUN... --names gradient.top.1.weight --output f.png
    python scripts/studies/thresholds.py --runs RUN... --names activation.0 --output f.png

Figure 2 needs runs of `gradient=dct` with `gradient.threshold=exact gradient.lifespan=1
gradient.renewal=fixed`, so that the threshold of a step is that of its own top-k. Figure 5 needs
runs of `activation=dct` (solid) and, for each sparsity, one of `activation=none` with
`activation.observe` (dashed). Points are means over `telemetry.every` steps. Prints how steady the
thresholds are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pandas as pd
from frame import Frame, arguments
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import COLORS, draw_line, drawing, logarithmic, panels, save
from dlrm_hybrid.report.figures import AxesText, Curve, Line
from dlrm_hybrid.report.measures import digits, percent
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.types import ConfigError

RUNNING_STEPS = 100
PANEL_INCHES = (4.6, 3.8)
KEY_INCHES = 2.0
MEASURED = len(COLORS)  # further on are the same colours with dashes: what was measured only
COLUMNS = (
    *("thresholds of", "sparsity", "first", "last"),
    *("off its running mean: at most", "in 99 of 100 steps"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of one tensor or boundary of a run.

    Attributes:
        name: `gradient.TENSOR` or `activation.BOUNDARY`.
        sparsity: fraction that lies below them.
        applied: whether what lies below was held back, and not only measured.
        curve: mean of each interval over the step where it ends.
    """

    name: str
    sparsity: float
    applied: bool
    curve: Curve

    @property
    def label(self) -> str:
        """What tells it from others of its name."""
        return f"{100 * self.sparsity:.3g} %{'' if self.applied else ', measured only'}"


def thresholds(runs: Sequence[Run], name: str) -> list[Thresholds]:
    """Those of one name in every run, by sparsity.

    Raises:
        ConfigError: a run has no thresholds of that name.
    """
    found = [_of_run(run, name) for run in runs]
    return sorted(found, key=lambda one: (one.sparsity, one.applied))


def threshold_names(runs: Sequence[Run]) -> list[str]:
    """All names that every run has thresholds of, in their order."""
    named = [
        {
            name: None
            for event in run.events
            if event.kind is Kind.COMPRESSION
            for name, told in event.values["of"].items()
            if told["threshold"] is not None
        }
        for run in runs
    ]
    return [name for name in named[0] if all(name in names for names in named)]


def figure(drawn: Sequence[Sequence[Thresholds]]) -> Figure:
    """A panel for each name; colours are sparsities."""
    sparsities = sorted({one.sparsity for panel in drawn for one in panel})
    texts = [AxesText("training steps", f"threshold of {panel[0].name}") for panel in drawn]
    size_inches = (PANEL_INCHES[0] * len(drawn) + KEY_INCHES, PANEL_INCHES[1])
    with drawing():
        picture, placed = panels(size_inches, texts, [1.0])
        for axes, panel in zip(placed, drawn, strict=True):
            for one in panel:
                number = sparsities.index(one.sparsity) + (0 if one.applied else MEASURED)
                draw_line(axes, Line(label=one.label, number=number, curve=one.curve))
            _scale(axes, panel)
        placed[-1].legend(title="sparsity", loc="center left", bbox_to_anchor=(1, 0.5))
        return picture


def steadiness(found: Sequence[Thresholds]) -> Table:
    """First and last threshold of each, and how far one is from the mean of those before it."""
    return Table(COLUMNS, tuple(_steadiness(one) for one in found), align="llr")


def deviations(curve: Curve) -> Frame:
    """How far each threshold is from the mean of the 100 steps before it, relative to that."""
    found: Frame = curve
    before = found.rolling(RUNNING_STEPS // int(found.index[0])).mean().shift()
    return (found / before - 1).abs().dropna()


def _of_run(run: Run, name: str) -> Thresholds:
    points = {
        event.step: threshold
        for event in run.events
        if event.kind is Kind.COMPRESSION
        and (threshold := event.values["of"].get(name, {}).get("threshold")) is not None
    }
    if not points:
        raise ConfigError(f"{run.folder}: no thresholds of {name}")
    sparsity, applied = _asked(run.config, name)
    return Thresholds(name=name, sparsity=sparsity, applied=applied, curve=pd.Series(points))


def _asked(config: Mapping[str, Any], name: str) -> tuple[float, bool]:
    """The sparsity of a tensor or boundary, and whether it was applied."""
    kind, _, place = name.partition(".")
    options = config[kind]
    if kind == "activation" and options.get("observe") is not None:
        return options["observe"], False
    if kind == "gradient":
        return round(1 - options["density"], 9), True
    sparsity: float | list[float] = options["sparsity"]
    return (sparsity[int(place)] if isinstance(sparsity, list) else sparsity), True


def _scale(axes: Axes, panel: Sequence[Thresholds]) -> None:
    if panel[0].name.startswith("gradient"):
        axes.set_yscale("log")
        logarithmic(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def _steadiness(one: Thresholds) -> tuple[str, ...]:
    curve: Frame = one.curve.to_numpy()
    away = deviations(one.curve)
    told = (MISSING, MISSING)
    if len(away) > 1:
        told = (percent(away.max()), percent(away.quantile(0.99)))
    return one.name, one.label, digits(curve[0]), digits(curve[-1]), *told


def main() -> None:
    """Read the run folders of the command line, write the picture and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--names", nargs="+", required=True, help="of tensors or boundaries")
    options = parser.parse_args()
    runs = read_runs(options.runs)
    found = [thresholds(runs, name) for name in options.names]
    save(figure(found), options.output)
    print(steadiness([one for panel in found for one in panel]).markdown(), end="")


if __name__ == "__main__":
    main()
