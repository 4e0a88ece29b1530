"""How far runs are behind a baseline: `python scripts/plot_gap.py --baseline B... --runs R...`.

Runs that see the same rows in the same order are compared step by step: test log-loss where both
were evaluated (diamonds), and training loss, a mean over the last tenth of the run before each
point (lines). Runs of one name but for the `_<seed>` behind it are averaged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.paper import gaps
from dlrm_hybrid.report.runs import read_runs


def main() -> None:
    """Read the run folders of the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="run folders")
    parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    arguments = parser.parse_args()
    drawn = gaps.gaps(read_runs(arguments.baseline), read_runs(arguments.runs))
    axes.save(gaps.figure(drawn), arguments.output)


if __name__ == "__main__":
    main()
