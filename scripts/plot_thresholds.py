"""Thresholds over steps, figures 2 and 5 of the DCT paper (Gupta et al., KDD 2021), from runs.

    python scripts/plot_thresholds.py --runs RUN... --names gradient.top.1.weight --output f.png
    python scripts/plot_thresholds.py --runs RUN... --names activation.0 activation.1 --output f.png

Figure 2 wants runs of `gradient=dct` with `gradient.threshold=exact gradient.lifespan=1
gradient.renewal=fixed`, so that the threshold of a step is that of its own top-k. Figure 5 wants
runs of `activation=dct` (solid) and, for each sparsity, one of `activation=none` with
`activation.observe` (dashed). Points are means over `telemetry.every` steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

RUNNING_STEPS = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The thresholds of one tensor or boundary of a run.

    Attributes:
        sparsity: fraction that lies below them.
        applied: whether what lies below was held back, and not only measured.
        steps: where an interval ends.
        thresholds: mean of each interval.
    """

    sparsity: float
    applied: bool
    steps: list[int]
    thresholds: list[float]


def main() -> None:
    """Read the run folders of the command line, write the picture and print how steady they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--names", nargs="+", required=True, help="of tensors or boundaries")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    arguments = parser.parse_args()
    names: list[str] = arguments.names
    figure, panels = plt.subplots(
        1, len(names), figsize=(4 + 4 * len(names), 4.2), layout="constrained", squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        draw(axes, name, [read(folder, name) for folder in arguments.runs])
    last: Axes = panels[0][-1]
    last.legend(frameon=False, title="sparsity", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(arguments.output, dpi=150)


def draw(axes: Axes, name: str, curves: Sequence[Curve]) -> None:
    """All curves of one name, in the order of their sparsities; says how steady they are."""
    sparsities = sorted({curve.sparsity for curve in curves})
    for curve in sorted(curves, key=lambda curve: (curve.sparsity, curve.applied)):
        label = f"{100 * curve.sparsity:.3g} %{'' if curve.applied else ', measured only'}"
        axes.plot(
            curve.steps,
            curve.thresholds,
            "-" if curve.applied else "--",
            color=f"C{sparsities.index(curve.sparsity)}",
            linewidth=1,
            label=label,
        )
        first, last = curve.thresholds[0], curve.thresholds[-1]
        told = f"{name} {label}: first {first:.3g}, last {last:.3g}"
        away = deviations(curve)
        if len(away) > 1:
            usual = quantiles(away, n=100, method="inclusive")[98]
            told += f"; off by {100 * max(away):.0f} % at most, {100 * usual:.0f} % in 99 of 100"
        print(told)
    if name.startswith("gradient"):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("steps")
    axes.set_ylabel(f"threshold of {name}")
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.0f}")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def read(folder: Path, name: str) -> Curve:
    """The curve of `gradient.TENSOR` or `activation.BOUNDARY` in a run.

    Raises:
        SystemExit: the run has no thresholds of that name.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = events.read(folder / "events.jsonl")
    told: dict[int, float | None] = {
        event.step: event.values["of"].get(name, {}).get("threshold")
        for event in record
        if event.kind is Kind.COMPRESSION
    }
    points = {step: threshold for step, threshold in told.items() if threshold is not None}
    if not points:
        raise SystemExit(f"{folder}: no thresholds of {name}")
    sparsity, applied = asked(config, name)
    return Curve(
        sparsity=sparsity, applied=applied, steps=list(points), thresholds=list(points.values())
    )


def asked(config: dict[str, Any], name: str) -> tuple[float, bool]:
    """The sparsity of a tensor or boundary, and whether it was applied."""
    kind, _, place = name.partition(".")
    options = config[kind]
    if kind == "activation" and options["observe"] is not None:
        return options["observe"], False
    sparsity: float | list[float] = options["sparsity"]
    return (sparsity[int(place)] if isinstance(sparsity, list) else sparsity), True


def deviations(curve: Curve) -> list[float]:
    """How far each threshold is from the mean of the 100 steps before it, relative to that."""
    window = RUNNING_STEPS // curve.steps[0]
    return [
        abs(curve.thresholds[place] / mean(curve.thresholds[place - window : place]) - 1)
        for place in range(window, len(curve.thresholds))
    ]


if __name__ == "__main__":
    main()
