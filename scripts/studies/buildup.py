"""Shows how much denser a pull is than the pushes it is made from, over the number of trainers.

    python scripts/studies/buildup.py FOLDER... --output buildup.png

Trainers that select on their own select different elements, and a version changes all of them:
figure 4 of DEFT (Yoon and Oh, ICPP 2023) for this model, beside the figures in its text, and the
test log-loss. All runs must have one density; those with the same method and number of trainers are
averaged. With pull.sparsity a run counts as another method.
"""

from __future__ import annotations

from collections.abc import Sequence

from frame import Frame, frame, study
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import add_key, drawing, logarithmic, panels, style
from dlrm_hybrid.report.figures import AxesText
from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.types import ConfigError

SIZE_INCHES = (9.6, 4.4)
KEY_COLUMNS = 4
LARGEST_MARKER = 10.0
BLACK, GREY = "#1a1a1a", "#777777"
PUBLISHED_TRAINERS = 16
PUBLISHED = {"ResNet-18, 0.01": 13.59, "LSTM, 0.001": 14.18, "NCF, 0.1": 5.31}
"""Density of what DEFT's top-k changes over what was asked for, by model and density."""


def points(runs: Sequence[Run]) -> Frame:
    """A row for each method and number of trainers, means over seeds, in the order of the runs.

    `growth` is how many times more elements a pull sends than one trainer; `losses` has a test
    loss for each seed.

    Raises:
        ConfigError: one sent whole gradients or did not count what its servers sent, or they are of
            several densities, or none is here.
    """
    found = frame(runs)
    asked = sorted(found["density"].unique())
    if len(asked) != 1:
        raise ConfigError(f"runs of densities {asked}: their pulls are no one picture")
    for row in found[found[["sent", "pulled"]].isna().any(axis=1)].itertuples():
        raise ConfigError(
            f"{runs[row.run].folder}: says nothing of the density of pushes and pulls"
        )
    means = found.groupby(["method", "trainers"], observed=True).agg(
        density=("density", "first"),
        sent=("sent", "mean"),
        pulled=("pulled", "mean"),
        losses=("loss", list),
        seeds=("seed", "size"),
    )
    means["growth"] = means["pulled"] / means["sent"]
    return means.reset_index()


def independent(pushed: float, trainers: int) -> float:
    """Density of the union of choices that know nothing of each other."""
    return 1.0 - (1.0 - pushed) ** trainers


def table(found: Frame) -> Table:
    """A row for each method: what is pulled in percent of the weights, over what each pushed.

    Then the test losses.
    """
    cells = found.assign(
        pull=[f"{100 * one.pulled:.2f} % ({one.growth:.2f}×)" for one in found.itertuples()],
        loss=[mean_spread(one.losses, 4) for one in found.itertuples()],
    )
    pulls, losses = (
        cells.pivot(index="method", columns="trainers", values=name).fillna(MISSING)
        for name in ("pull", "loss")
    )
    seeds = found.groupby("method", observed=True)["seeds"].min()
    heads = (f"{what}n = {number}" for what in ("", "loss, ") for number in pulls.columns)
    return Table(
        ("method", *heads, "seeds"),
        tuple(
            (name, *pulls.loc[name], *losses.loc[name], str(seeds[name]))
            for name in found["method"].unique()
        ),
    )


def figure(found: Frame) -> Figure:
    """Pulls over what was asked for, with what DEFT's text tells, and over pushes."""
    asked = found["density"].iloc[0]
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
        _draw(total, found, found["pulled"] / asked)
        _draw(growth, found, found["growth"])
        add_key(picture, KEY_COLUMNS)
        return picture


def _draw(axes: Axes, found: Frame, values: Frame) -> None:
    """A line for each method, markers of the later ones smaller: some lie on each other."""
    trainers, asked = sorted(found["trainers"].unique()), found["density"].iloc[0]
    bound = [independent(asked, number) / asked for number in trainers]
    axes.plot(trainers, bound, color=GREY, dashes=(4, 2), label="independent choices")
    for number, (name, own) in enumerate(found.groupby("method", observed=True)):
        axes.plot(
            own["trainers"],
            values[own.index],
            color=style(number).color,
            marker=style(number).marker,
            markersize=max(LARGEST_MARKER - 1.5 * number, 2.0),
            label=str(name),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(trainers, [str(number) for number in trainers])
    logarithmic(axes.yaxis)


def main() -> None:
    """Print the table, write the picture."""
    study(__doc__, points, table, figure)


if __name__ == "__main__":
    main()
