"""Build-up: how much denser a pull is than the pushes it is made from, over trainers: pure.

Trainers that choose alone choose different elements, and a version changes all of them; figure 4 of
DEFT (Yoon and Oh, ICPP 2023) for this model, beside the figures that its text gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import final

from matplotlib.figure import Figure

from dlrm_hybrid.report.axes import AxesText, add_key, drawing, logarithmic, panels
from dlrm_hybrid.report.document import Table
from dlrm_hybrid.report.methods import method_of
from dlrm_hybrid.report.palette import style
from dlrm_hybrid.report.runs import COMPLETE, Run
from dlrm_hybrid.telemetry.markdown import MISSING
from dlrm_hybrid.types import ConfigError

SIZE_INCHES = (9.6, 4.4)
KEY_COLUMNS = 5
GREY = "#777777"
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
        ConfigError: a run sent whole gradients or did not count what its servers told, or runs of
            several densities are here.
    """
    groups: defaultdict[tuple[str, int], list[Run]] = defaultdict(list)
    asked = sorted({1.0 - run.config["gradient"]["sparsity"] for run in runs})
    if len(asked) > 1:
        raise ConfigError(f"runs of densities {asked}: their pulls are no one picture")
    for run in runs:
        network, compression = run.summary["network"], run.summary["compression"]
        if None in (network.get("pull_density"), compression["gradient_density"]):
            raise ConfigError(f"{run.folder}: says nothing of the density of pushes and pulls")
        if run.status == COMPLETE:
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
        num_texts=1,
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
        shown: tuple[Callable[[Point], float], ...] = (
            lambda point: point.pulled / asked,
            lambda point: point.growth,
        )
        for axes, value in zip((total, growth), shown, strict=True):
            for number, (name, own) in enumerate(_by_method(found).items()):
                look = style(number)
                axes.plot(
                    list(own),
                    [value(point) for point in own.values()],
                    color=look.color,
                    marker=look.marker,
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            trainers = sorted({point.trainers for point in found})
            bound = [independent(asked, number) / asked for number in trainers]
            axes.plot(trainers, bound, color=GREY, dashes=(4, 2), label="independent choices")
            axes.set_xticks(trainers, [str(number) for number in trainers])
            logarithmic(axes.yaxis)
        for name, times in PUBLISHED.items():
            total.plot(PUBLISHED_TRAINERS, times, color=GREY, marker="x", linestyle="none")
            total.annotate(
                f"DEFT's top-k: {name}",
                (PUBLISHED_TRAINERS, times),
                xytext=(-8, -3),
                textcoords="offset points",
                ha="right",
                fontsize="x-small",
                color=GREY,
            )
        add_key(picture, KEY_COLUMNS)
        return picture


def _by_method(found: Sequence[Point]) -> Mapping[str, Mapping[int, Point]]:
    grouped: dict[str, dict[int, Point]] = {}
    for point in found:
        grouped.setdefault(point.method, {})[point.trainers] = point
    return grouped


def _cell(point: Point) -> str:
    return f"{100 * point.pulled:.2f} % ({point.growth:.2f}×)"
