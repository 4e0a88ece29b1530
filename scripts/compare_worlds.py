"""Worlds of processes beside the same worlds in one process: equal bits, bytes, CPU time.

    python scripts/compare_worlds.py FOLDER...

Takes runs in pairs that differ in parallel.world alone and compares their last checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report import worlds
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.telemetry import markdown


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    options = parser.parse_args()
    table = worlds.table(worlds.pairs(read_runs(options.folders)))
    print(markdown.table(table.columns, table.rows, table.is_number), end="")


if __name__ == "__main__":
    main()
