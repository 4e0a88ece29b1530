"""Compares gradient compression methods: a table, and loss against bytes, from their runs.

    python scripts/studies/methods.py FOLDER... --output methods.png

Every complete run below the folders belongs to a point: its method at its density. Runs that differ
only in the seed are averaged, and each is compared with gradient=none with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from frame import WHOLE, Frame, frame, study
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import add_key, drawing, logarithmic, panels, style
from dlrm_hybrid.report.figures import AxesText
from dlrm_hybrid.report.measures import digits, mean_spread, score
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.types import ConfigError

SIZE_INCHES = (8.0, 5.0)
KEY_COLUMNS = 4
COLUMNS = (
    *("method", "density", "sent", "test log-loss", "against none, %", "push B/sample"),
    *("pull B/sample", "fewer bytes", "CPU µs/sample", "seeds"),
)


def points(runs: Sequence[Run]) -> Frame:
    """A row for each method at each density, means over seeds; `gaps` by seed, in percent.

    Whole gradients stand first, then methods in the order of the runs, densities falling.

    Raises:
        ConfigError: no run with whole gradients has the seed of one without, a run has not counted
            its pushes or pulls, or runs of one point and seed differ, so they are not alike in
            something else.
    """
    found: Frame = frame(runs)
    _check(runs, found)
    found = found.drop_duplicates(["method", "sparsity", "seed"])
    whole = found[found["method"] == WHOLE].set_index("seed")["loss"]
    found["gap"] = 100 * (found["loss"] / found["seed"].map(whole) - 1)
    for row in found[found["gap"].isna()].itertuples():
        raise ConfigError(
            f"{runs[row.run].folder}: no run with gradient=none has its train.seed = {row.seed}"
        )
    means = found.groupby(["method", "sparsity"], observed=True).agg(
        density=("density", "first"),
        sent=("sent", "mean"),
        loss=("loss", "mean"),
        gap=("gap", "mean"),
        deviation=("gap", "std"),
        gaps=("gap", list),
        push_bytes=("gradient_push", "mean"),
        pull_bytes=("parameter_pull", "mean"),
        cpu_microseconds=("cpu_microseconds", "mean"),
        seeds=("seed", "size"),
    )
    means["num_bytes"] = means["push_bytes"] + means["pull_bytes"]
    return means.reset_index()


def _check(runs: Sequence[Run], found: Frame) -> None:
    for row in found.itertuples():
        for name in ("gradient_push", "parameter_pull"):
            if pd.isna(getattr(row, name)):
                raise ConfigError(
                    f"{runs[row.run].folder}: its {name} was not counted: it needs parallel.servers"
                )
    alike = found.groupby(["method", "sparsity", "seed"], observed=True)["loss"]
    for row in found[found["loss"] != alike.transform("first")].itertuples():
        raise ConfigError(
            f"{runs[row.run].folder}: another run of {row.method} at density {row.density:.3g} has "
            f"its train.seed = {row.seed} and another loss; name folders of runs that are alike"
        )


def table(found: Frame) -> Table:
    """A row for each point."""
    whole: float = found.loc[found["method"] == WHOLE, "num_bytes"].iloc[0]
    return Table(COLUMNS, tuple(_cells(point, whole) for point in found.itertuples()))


def _cells(point: Any, whole_bytes: float) -> tuple[str, ...]:
    return (
        point.method,
        f"{point.density:.3g}",
        "all" if pd.isna(point.sent) else f"{point.sent:.2g}",
        score(point.loss),
        mean_spread(point.gaps, 2, "+"),
        digits(point.push_bytes),
        digits(point.pull_bytes),
        f"{whole_bytes / point.num_bytes:.1f}×",
        digits(point.cpu_microseconds),
        str(point.seeds),
    )


def figure(found: Frame) -> Figure:
    """Loss against bytes: a line for each method from its highest density to its lowest."""
    with drawing():
        text = AxesText("bytes per sample, gradients and weights", "log-loss against none, %")
        picture, (axes,) = panels(SIZE_INCHES, [text], [1.0])
        axes.axhline(0, color="#1a1a1a", linewidth=0.8)
        sparse = found[found["method"] != WHOLE]
        for number, (method, own) in enumerate(sparse.groupby("method", observed=True)):
            look = style(number)
            axes.errorbar(
                own["num_bytes"],
                own["gap"],
                yerr=own["deviation"].fillna(0.0),
                color=look.color,
                linestyle=look.line,
                marker=look.marker,
                elinewidth=0.8,
                capsize=2,
                label=str(method),
            )
        axes.set_xscale("log")
        logarithmic(axes.xaxis)
        add_key(picture, KEY_COLUMNS)
        return picture


def main() -> None:
    """Print the table, write the picture."""
    study(__doc__, points, table, figure)


if __name__ == "__main__":
    main()
