"""Bytes per sample by class of several runs: a Markdown table and a picture.

    python scripts/compare_bytes.py RUN... --output bytes.png

The first run is what the others are compared with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import axes, traffic
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.telemetry import markdown


def main() -> None:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, of worlds")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    options = parser.parse_args()
    runs = read_runs(options.runs)
    names = labels(runs)
    axes.save(traffic.figure(runs, names), options.output)
    table = traffic.against_first(runs, names)
    print(markdown.table(table.columns, table.rows, table.is_number), end="")


if __name__ == "__main__":
    main()
