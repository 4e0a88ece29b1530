"""Compares initial values of embedding tables: the best validation score by data and law.

    python scripts/studies/table_init.py RUN...

A row for each `data.raw` of the runs, a column for each `embedding.init`: mean and deviation over
`train.seed` of the score that `train.monitor` names, at the best evaluation of each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from frame import study

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.types import ConfigError


def table(runs: Sequence[Run]) -> Table:
    """A row for each table of raw rows, a column for each law.

    Raises:
        ConfigError: a run has no evaluations on its way, and so no best one.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        best = run.summary.get("best")
        if best is None:
            raise ConfigError(f"{run.folder}: needs train.evaluate_every")
        rows = Path(str(run.config["data"]["raw"])).stem
        laws = found.setdefault(rows, {})
        laws.setdefault(str(run.config["embedding"]["init"]), []).append(best["value"])
    names = list(dict.fromkeys(law for laws in found.values() for law in laws))
    lines = [
        (rows, *(mean_spread(laws[law], 4) if law in laws else MISSING for law in names))
        for rows, laws in found.items()
    ]
    return Table(("rows", *names), lines)


def main() -> None:
    """Print the table."""
    study(__doc__, list, table)


if __name__ == "__main__":
    main()
