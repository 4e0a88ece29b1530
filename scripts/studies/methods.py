"""Methods of compressing gradients: a table and loss against bytes, from runs of any of them.

    python scripts/studies/methods.py FOLDER... --output methods.png

Every complete run below the folders belongs to a point: its method at its density; those with one
gradient and another seed are averaged, and each is held against gradient=none with the same seed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import final

from matplotlib.figure import Figure
from method_names import WHOLE, method_of

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.axes import AxesText, add_key, drawing, logarithmic, panels, style
from dlrm_hybrid.report.measures import digits, mean_spread, score
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ConfigError

PUSH, PULL = "gradient_push", "parameter_pull"
SIZE_INCHES = (8.0, 5.0)
KEY_COLUMNS = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one method reached at one density.

    Attributes:
        method: its name, see `methods.method_of`.
        density: share of the elements that was asked for; 1 for whole gradients.
        sent: share that left; None where it was not counted.
        losses: test log-loss by seed.
        gaps: log-loss against whole gradients by seed, in percent.
        push_bytes: per sample, of all trainers; mean over seeds.
        pull_bytes: the same of what servers answer.
        cpu_microseconds: per sample, of all ranks.
    """

    method: str
    density: float
    sent: float | None
    losses: Mapping[int, float]
    gaps: Mapping[int, float]
    push_bytes: float
    pull_bytes: float
    cpu_microseconds: float

    @property
    def num_bytes(self) -> float:
        """Of gradients and weights, per sample."""
        return self.push_bytes + self.pull_bytes


def points(runs: Sequence[Run]) -> list[Point]:
    """Of all complete runs, whole gradients first, then by method in the order of the runs.

    Raises:
        ConfigError: no run with whole gradients has the seed of one without, or runs of one point
            and seed differ, so they are not alike in something else.
    """
    groups: defaultdict[tuple[str, float], list[Run]] = defaultdict(list)
    for run in runs:
        if run.status == COMPLETE:
            groups[method_of(run.config), 1.0 - run.config["gradient"]["sparsity"]].append(run)
    whole = {_seed(run): _loss(run) for run in groups.get((WHOLE, 1.0), [])}
    order = list(dict.fromkeys([WHOLE, *(method for method, _ in groups)]))
    ordered = sorted(groups.items(), key=lambda item: (order.index(item[0][0]), -item[0][1]))
    return [_point(method, density, group, whole) for (method, density), group in ordered]


def table(found: Sequence[Point]) -> Table:
    """A row for each point."""
    base = next(point for point in found if point.method == WHOLE)
    columns = ("method", "density", "sent", "test log-loss", "against none, %", "push B/sample")
    return Table(
        (*columns, "pull B/sample", "fewer bytes", "CPU µs/sample", "seeds"),
        tuple(
            (
                point.method,
                f"{point.density:.3g}",
                "all" if point.sent is None else f"{point.sent:.2g}",
                score(mean(point.losses.values())),
                mean_spread(list(point.gaps.values()), 2, "+"),
                digits(point.push_bytes),
                digits(point.pull_bytes),
                f"{base.num_bytes / point.num_bytes:.1f}×",
                digits(point.cpu_microseconds),
                str(len(point.losses)),
            )
            for point in found
        ),
    )


def figure(found: Sequence[Point]) -> Figure:
    """Loss against bytes: a line for each method from its highest density to its lowest."""
    with drawing():
        text = AxesText("bytes per sample, gradients and weights", "log-loss against none, %")
        picture, (axes,) = panels(SIZE_INCHES, [text], [1.0])
        axes.axhline(0, color="#1a1a1a", linewidth=0.8)
        methods = list(dict.fromkeys(point.method for point in found if point.method != WHOLE))
        for number, method in enumerate(methods):
            own = [point for point in found if point.method == method]
            look = style(number)
            axes.errorbar(
                [point.num_bytes for point in own],
                [mean(point.gaps.values()) for point in own],
                yerr=[_deviation(list(point.gaps.values())) for point in own],
                color=look.color,
                linestyle=(0, look.dashes) if look.dashes else "solid",
                marker=look.marker,
                elinewidth=0.8,
                capsize=2,
                label=method,
            )
        axes.set_xscale("log")
        logarithmic(axes.xaxis)
        add_key(picture, KEY_COLUMNS)
        return picture


def _point(method: str, density: float, runs: Sequence[Run], whole: Mapping[int, float]) -> Point:
    for run in runs:
        if _seed(run) not in whole:
            raise ConfigError(
                f"{run.folder}: no run with gradient=none has its train.seed = {_seed(run)}"
            )
    densities = [run.summary["compression"]["gradient_density"] for run in runs]
    sent = [share for share in densities if share is not None]
    return Point(
        method=method,
        density=density,
        sent=mean(sent) if sent else None,
        losses=_losses(method, density, runs),
        gaps={_seed(run): 100 * (_loss(run) / whole[_seed(run)] - 1) for run in runs},
        push_bytes=mean(_bytes(run, PUSH) / _samples(run) for run in runs),
        pull_bytes=mean(_bytes(run, PULL) / _samples(run) for run in runs),
        cpu_microseconds=mean(1e6 * run.summary["cpu"]["seconds"] / _samples(run) for run in runs),
    )


def _losses(method: str, density: float, runs: Sequence[Run]) -> dict[int, float]:
    losses: dict[int, float] = {}
    for run in runs:
        if losses.setdefault(_seed(run), _loss(run)) != _loss(run):
            raise ConfigError(
                f"{run.folder}: another run of {method} at density {density:.3g} has its "
                f"train.seed = {_seed(run)} and another loss; name folders of runs that are alike"
            )
    return losses


def _seed(run: Run) -> int:
    return run.config["train"]["seed"]


def _loss(run: Run) -> float:
    return run.summary["test"]["loss"]


def _samples(run: Run) -> float:
    """Trained on while bytes and CPU time were counted."""
    return run.summary["samples_per_second"] * run.summary["seconds"]


def _bytes(run: Run, traffic: str) -> int:
    counted = run.summary["network"]["by_class"]
    if traffic not in counted:
        raise ConfigError(f"{run.folder}: its {traffic} was not counted: it needs parallel.servers")
    return counted[traffic]["bytes"]


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    options = parser.parse_args()
    found = points(read_runs(options.folders))
    axes.save(figure(found), options.output)
    shown = table(found)
    print(shown.markdown(), end="")


if __name__ == "__main__":
    main()
