"""Shows bytes per sample by class of traffic: a table and a picture of several runs.

    python scripts/studies/traffic.py RUN... --output bytes.png

The others are compared with the first run. What trainers of one process exchange for tables that
they share is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from frame import Frame, counted_bytes, study
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import KEY_COLUMNS, add_key, draw_bars, drawing, panels
from dlrm_hybrid.report.figures import AxesText
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.measures import nonzero
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table

ALL = "all"
X_TEXT = "bytes per training sample"
CLOSER = 4  # bars shorter than the longest by that factor are drawn once more, larger


def against_first(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """A row for each class and one for all; each run but the first beside the ratio to that.

    Raises:
        ConfigError: a run has counted no bytes.
    """
    counted = [{**sent, ALL: sum(sent.values())} for sent in map(counted_bytes, runs)]
    first, *others = counted
    columns = [labels[0], *(c for label in labels[1:] for c in (label, f"{labels[0]} / {label}"))]
    rows = [
        (
            name,
            _number(first.get(name)),
            *(
                cell
                for sent in others
                for cell in (_number(sent.get(name)), _ratio(first.get(name), sent.get(name)))
            ),
        )
        for name in dict.fromkeys(name for sent in counted for name in sent if name != ALL)
        | {ALL: None}
    ]
    return Table(("bytes per sample", *columns), tuple(rows))


def figure(runs: Sequence[Run], labels: Sequence[str]) -> Figure:
    """A bar for each run, in the colours of the classes, with a closer look at the short ones.

    Raises:
        ConfigError: a run has counted no bytes.
    """
    sent: Frame = nonzero(pd.DataFrame(map(counted_bytes, runs), index=list(labels))).fillna(0.0)
    sums = sent.sum(axis="columns")
    short: Frame = sent.loc[CLOSER * sums < sums.max()]
    drawn: list[Frame] = [sent, short] if len(short) else [sent]
    texts = [AxesText(X_TEXT, ""), AxesText(f"{X_TEXT}, a closer look", "")][: len(drawn)]
    heights = list(map(len, drawn))
    with drawing():
        picture, placed = panels((8.0, 1.8 + 0.5 * sum(heights)), texts, heights)
        for axes, parts in zip(placed, drawn, strict=True):
            draw_bars(axes, parts)
        add_key(picture, 2 * KEY_COLUMNS)
        return picture


def _number(num_bytes: float | None) -> str:
    return f"{num_bytes:,.1f}" if num_bytes else MISSING


def _ratio(base: float | None, num_bytes: float | None) -> str:
    return f"{base / num_bytes:.1f}" if base and num_bytes else MISSING


def main() -> None:
    """Print the table, write the picture."""
    study(
        __doc__,
        lambda runs: (runs, labels(runs)),
        lambda named: against_first(*named),
        lambda named: figure(*named),
    )


if __name__ == "__main__":
    main()
