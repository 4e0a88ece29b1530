"""Methods of compressing gradients: a table and loss against bytes, from runs of any of them.

    python scripts/compare_methods.py FOLDER... --output methods.png

Every complete run below the folders belongs to a point: its method at its density; those with one
gradient and another seed are averaged, and each is held against gradient=none with the same seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import axes, family
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
    points = family.points(read_runs(options.folders))
    axes.save(family.figure(points), options.output)
    table = family.table(points)
    print(markdown.table(table.columns, table.rows, table.is_number), end="")


if __name__ == "__main__":
    main()
