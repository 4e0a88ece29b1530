"""How near estimated thresholds come to the density asked for, from runs of several estimators.

    python scripts/plot_estimates.py FOLDER... --output estimates.png

Writes a panel for each estimator, k̂ / k over steps, and prints medians, ranges and how many steps
come near. `dlrm_hybrid.report.estimates` says which runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import axes, estimates
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.telemetry import markdown


def main() -> None:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    options = parser.parse_args()
    found = estimates.estimates(read_runs(options.folders))
    axes.save(estimates.figure(found), options.output)
    table = estimates.table(found)
    print(markdown.table(table.columns, table.rows, table.is_number), end="")


if __name__ == "__main__":
    main()
