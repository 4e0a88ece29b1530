"""How far runs are behind a baseline: `python scripts/plot_gap.py --baseline B... --runs R...`.

Runs that see the same rows in the same order are compared step by step: the test log-loss where
both were evaluated (dots), and the training loss, a mean over the last tenth of the run before each
point (lines). Runs of one name but for the `_<seed>` behind it are averaged.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

SMOOTH_PART = 10
Curve = Mapping[int, float]


def main() -> None:
    """Read the run folders of the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    arguments = parser.parse_args()
    baselines = {seed_of(folder): folder for folder in arguments.baseline}
    names: defaultdict[str, list[Path]] = defaultdict(list)
    for folder in arguments.runs:
        names[folder.name.rpartition("_")[0] or folder.name].append(folder)
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for index, (name, folders) in enumerate(names.items()):
        pairs = [(folder, baselines[seed_of(folder)]) for folder in folders]
        training = averaged([gap(smooth(trained(a)), smooth(trained(b))) for a, b in pairs])
        tested = averaged([gap(scored(a), scored(b)) for a, b in pairs])
        label = f"{name}, {len(folders)} seed{'s' if len(folders) > 1 else ''}"
        axes.plot(list(training), list(training.values()), color=f"C{index}", alpha=0.35)
        axes.plot(list(tested), list(tested.values()), "o-", color=f"C{index}", label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("steps")
    axes.set_ylabel("log-loss against baseline, %")
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(arguments.output, dpi=150)


def seed_of(folder: Path) -> int:
    """The seed of a run."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["train"]["seed"]


def trained(folder: Path) -> Curve:
    """Training loss of each interval by its last step."""
    record = events.read(folder / "events.jsonl")
    return {event.step: event.values["loss"] for event in record if event.kind is Kind.PROGRESS}


def scored(folder: Path) -> Curve:
    """Test log-loss by step."""
    record = events.read(folder / "events.jsonl")
    return {
        event.step: event.values["log_loss"] for event in record if event.kind is Kind.EVALUATED
    }


def smooth(curve: Curve) -> Curve:
    """The moving mean; starts where its window is full."""
    losses, window = list(curve.values()), max(1, len(curve) // SMOOTH_PART)
    return {
        step: mean(losses[place + 1 - window : place + 1])
        for place, step in enumerate(curve)
        if place + 1 >= window
    }


def gap(curve: Curve, baseline: Curve) -> Curve:
    """How much higher the first is, in percent, at the steps that both have."""
    return {step: 100 * (curve[step] / baseline[step] - 1) for step in curve if step in baseline}


def averaged(curves: Sequence[Curve]) -> Curve:
    """The mean at the steps that all have."""
    steps: Iterable[int] = (step for step in curves[0] if all(step in one for one in curves))
    return {step: mean(one[step] for one in curves) for step in steps}


if __name__ == "__main__":
    main()
