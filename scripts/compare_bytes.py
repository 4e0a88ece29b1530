"""Bytes per sample by class of several runs: a Markdown table and a picture.

    python scripts/compare_bytes.py RUN... --output bytes.png

The first run is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dlrm_hybrid.bench.table import Row, table

Sent = Mapping[str, float]
"""Bytes per sample by class of traffic."""


def main() -> int:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, of worlds")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    options = parser.parse_args()
    runs = {named(run): sent(run) for run in options.runs}
    print(table(rows_of(runs)))
    draw(runs, options.output)
    return 0


def named(run: Path) -> str:
    """The run's name in its configuration."""
    name: str = json.loads((run / "config.json").read_text(encoding="utf-8"))["name"]
    return name


def sent(run: Path) -> dict[str, float]:
    """Bytes per sample by class, of training steps."""
    network = json.loads((run / "summary.json").read_text(encoding="utf-8"))["network"]
    samples = network["bytes_total"] / network["bytes_per_sample"]
    return {name: tally["bytes"] / samples for name, tally in network["by_class"].items()}


def rows_of(runs: Mapping[str, Sent]) -> list[Row]:
    """One row for each class, and one for all."""
    base, *others = runs
    rows: list[Row] = []
    for name in (*runs[base], "all"):
        values = {run: sum(by.values()) if name == "all" else by[name] for run, by in runs.items()}
        row: dict[str, str] = {"bytes per sample": name.replace("_", " ")}
        row[base] = f"{values[base]:,.1f}"
        for run in others:
            row[run] = f"{values[run]:,.1f}"
            row[f"{base} / {run}"] = f"{values[base] / values[run]:.1f}" if values[run] else "–"
        rows.append(row)
    return rows


def draw(runs: Mapping[str, Sent], output: Path) -> None:
    """A bar for each run, in the colours of the classes, with a closer look at the short ones."""
    figure, panels = plt.subplots(
        2, 1, figsize=(8, 1.6 + 0.9 * len(runs)), layout="constrained", height_ratios=[1, 1]
    )
    short = [name for name in runs if total(runs[name]) < total(next(iter(runs.values()))) / 4]
    _bars(panels[0], runs, list(runs))
    _bars(panels[1], runs, short or list(runs))
    panels[1].set_xlabel("bytes per training sample" + (", a closer look" if short else ""))
    panels[0].legend(frameon=False, ncols=3, fontsize=8, loc="lower right")
    figure.savefig(output, dpi=150)


def total(by_class: Sent) -> float:
    """Of all classes."""
    return sum(by_class.values())


def _bars(axes: Axes, runs: Mapping[str, Sent], names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        left = 0.0
        for index, (traffic, num_bytes) in enumerate(runs[name].items()):
            label = traffic.replace("_", " ") if place == 0 else None
            axes.barh(place, num_bytes, left=left, color=f"C{index}", label=label, height=0.6)
            left += num_bytes
        axes.text(left, place, f" {left:,.0f}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
