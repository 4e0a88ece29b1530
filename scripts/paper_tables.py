"""The tables of the DCT paper from runs: `python scripts/paper_tables.py FOLDER... --output t.md`.

Every complete run below the folders becomes part of a row; its baseline is found by configuration,
in whatever folder it lies.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_hybrid.report.paper.rows import paper_runs
from dlrm_hybrid.report.paper.tables import page, settings
from dlrm_hybrid.report.runs import read_runs


def main() -> None:
    """Read the folders of the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    parser.add_argument("--output", type=Path, required=True, help="a Markdown file")
    arguments = parser.parse_args()
    text = page(settings(paper_runs(read_runs(arguments.folders))))
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
