"""How much denser a pull is than the pushes it is made from, over the number of trainers.

    python scripts/studies/buildup.py FOLDER... --output buildup.png

Trainers that select alone select different elements, and a version changes all of them: figure 4 of
DEFT (Yoon and Oh, ICPP 2023) for this model, beside the figures that its text gives. Runs are of
one density; those with one method and number of trainers are averaged.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from method_names import method_of

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.axes import AxesText, add_key, drawing, logarithmic, panels, style
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ConfigError

SIZE_INCHES = (9.6, 4.4)
KEY_COLUMNS = 4
LARGEST_MARKER = 10.0
BLACK, GREY = "#1a1a1a", "#777777"
PUBLISHED_TRAINERS = 16
PUBLISHED = {"ResNet-18, 0.01": 13.59, "LSTM, 0.001": 14.18, "NCF, 0.1": 5.31}
"""Density of what DEFT's top-k changes over what was asked for, by model and density."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method with so many trainers; means over seeds.

    Attributes:
        method: its name, see `methods.method_of`.
        trainers: how many.
        asked: share of the elements that should leave each trainer.
        pushed: share that left.
        pulled: share of the weights that a version changed.
        seeds: how many.
    """

    method: str
    trainers: int
    asked: float
    pushed: float
    pulled: float
    seeds: int

    @property
    def growth(self) -> float:
        """How many times more elements a version changes than one trainer sent."""
        return self.pulled / self.pushed


def points(runs: Sequence[Run]) -> list[Point]:
    """Of all complete runs, by method in the order of the runs, then by trainers.

    Raises:
        ConfigError: one sent whole gradients or did not count what its servers told, or they are of
            several densities, or none is here.
    """
    complete = [run for run in runs if run.status == COMPLETE]
    asked = sorted({1.0 - run.config["gradient"]["sparsity"] for run in complete})
    if len(asked) != 1:
        raise ConfigError(f"runs of densities {asked}: their pulls are no one picture")
    groups: defaultdict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in complete:
        network, compression = run.summary["network"], run.summary["compression"]
        if None in (network.get("pull_density"), compression["gradient_density"]):
            raise ConfigError(f"{run.folder}: says nothing of the density of pushes and pulls")
        groups[method_of(run.config), run.config["parallel"]["trainers"]].append(run)
    order = list(dict.fromkeys(name for name, _ in groups))
    return [
        Point(
            method=name,
            trainers=trainers,
            asked=asked[0],
            pushed=mean(run.summary["compression"]["gradient_density"] for run in group),
            pulled=mean(run.summary["network"]["pull_density"] for run in group),
            seeds=len(group),
        )
        for (name, trainers), group in sorted(
            groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    ]


def independent(pushed: float, trainers: int) -> float:
    """Density of the union of choices that know nothing of each other."""
    return 1.0 - (1.0 - pushed) ** trainers


def table(found: Sequence[Point]) -> Table:
    """A row for each method: what is pulled in percent of the weights, over what each pushed."""
    trainers = sorted({point.trainers for point in found})
    return Table(
        ("method", *(f"n = {number}" for number in trainers), "seeds"),
        tuple(
            (
                name,
                *(_cell(own[number]) if number in own else MISSING for number in trainers),
                str(min(point.seeds for point in own.values())),
            )
            for name, own in _by_method(found).items()
        ),
    )


def figure(found: Sequence[Point]) -> Figure:
    """Pulls over what was asked for, with what DEFT's text tells, and over pushes."""
    asked = found[0].asked
    with drawing():
        texts = [
            AxesText("trainers", f"density of a pull, times {asked:.3g}"),
            AxesText("trainers", "density of a pull, times that of a push"),
        ]
        picture, (total, growth) = panels(SIZE_INCHES, texts, [1.0])
        for mark, (name, times) in zip("x+d", PUBLISHED.items(), strict=True):
            total.plot(
                PUBLISHED_TRAINERS,
                times,
                color=BLACK,
                marker=mark,
                linestyle="none",
                label=f"DEFT's top-k, {name}",
                zorder=5,
            )
        _draw(total, found, lambda point: point.pulled / asked)
        _draw(growth, found, lambda point: point.growth)
        add_key(picture, KEY_COLUMNS)
        return picture


def _draw(axes: Axes, found: Sequence[Point], value: Callable[[Point], float]) -> None:
    """A line for each method, markers of the later ones smaller: some lie on each other."""
    trainers, asked = sorted({point.trainers for point in found}), found[0].asked
    bound = [independent(asked, number) / asked for number in trainers]
    axes.plot(trainers, bound, color=GREY, dashes=(4, 2), label="independent choices")
    for number, (name, own) in enumerate(_by_method(found).items()):
        axes.plot(
            list(own),
            [value(point) for point in own.values()],
            color=style(number).color,
            marker=style(number).marker,
            markersize=max(LARGEST_MARKER - 1.5 * number, 2.0),
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(trainers, [str(number) for number in trainers])
    logarithmic(axes.yaxis)


def _by_method(found: Sequence[Point]) -> Mapping[str, Mapping[int, Point]]:
    grouped: dict[str, dict[int, Point]] = {}
    for point in found:
        grouped.setdefault(point.method, {})[point.trainers] = point
    return grouped


def _cell(point: Point) -> str:
    return f"{100 * point.pulled:.2f} % ({point.growth:.2f}×)"


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
