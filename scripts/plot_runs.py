"""Loss over rows of one or more runs: `python scripts/plot_runs.py RUN... --output loss.png`.

A thick line is the training loss, a dot the test log-loss, a dashed line the best that made-up rows
allow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Event, Kind

SMOOTH_POINTS = 20


def main() -> None:
    """Read the run folders of the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for index, run in enumerate(arguments.runs):
        record = list(events.read(run / "events.jsonl"))
        draw(axes, run, record, f"C{index}")
    axes.set_xlabel("training rows seen")
    axes.set_ylabel("log-loss")
    axes.xaxis.set_major_formatter(lambda rows, _: f"{rows:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(arguments.output, dpi=150)


def draw(axes: Axes, run: Path, record: list[Event], color: str) -> None:
    """One run: its training loss as a moving mean, its test scores as dots."""
    points = [event for event in record if event.kind is Kind.PROGRESS]
    rows = [point.values["samples"] for point in points]
    losses = [point.values["loss"] for point in points]
    window = max(1, min(SMOOTH_POINTS, len(losses) // 10))
    smooth = [
        sum(losses[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(losses))
    ]
    axes.plot(rows, losses, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(rows, smooth, color=color, linewidth=1.8, label=f"{run.name}: training")
    tests = [event.values for event in record if event.kind is Kind.EVALUATED]
    axes.plot(
        [values["samples"] for values in tests],
        [values["log_loss"] for values in tests],
        "o",
        color=color,
        markersize=4,
        label=f"{run.name}: test part",
    )
    best = json.loads((run / "summary.json").read_text())["test"].get("best_reachable")
    if best:
        axes.axhline(best["loss"], color=color, linestyle="--", label="best reachable")


if __name__ == "__main__":
    main()
