"""Thresholds over steps, figures 2 and 5 of the DCT paper (Gupta et al., KDD 2021), from runs.

    python scripts/plot_thresholds.py --runs RUN... --names gradient.top.1.weight --output f.png
    python scripts/plot_thresholds.py --runs RUN... --names activation.0 activation.1 --output f.png

`dlrm_hybrid.report.paper.thresholds` says which runs. Prints how steady the thresholds are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.paper import thresholds
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.telemetry import markdown


def main() -> None:
    """Read the run folders of the command line, write the picture and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--names", nargs="+", required=True, help="of tensors or boundaries")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    arguments = parser.parse_args()
    runs = read_runs(arguments.runs)
    found = [thresholds.thresholds(runs, name) for name in arguments.names]
    axes.save(thresholds.figure(found), arguments.output)
    table = thresholds.steadiness([one for panel in found for one in panel])
    print(markdown.table(table.columns, table.rows, table.is_number), end="")


if __name__ == "__main__":
    main()
