"""How dense a pull becomes with more trainers, from runs of several methods and numbers of them.

    python scripts/plot_buildup.py FOLDER... --output buildup.png

Runs are of one density; those with one method and number of trainers are averaged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import axes, buildup
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
    points = buildup.points(read_runs(options.folders))
    axes.save(buildup.figure(points), options.output)
    table = buildup.table(points)
    print(markdown.table(table.columns, table.rows, table.is_number), end="")


if __name__ == "__main__":
    main()
