"""The benchmark of what slow links cost runs, and says what every pause costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "slow_links.py"
SHORT = ("--only", "pauses", "--pauses", "1", "20", "--turns", "2")

pytestmark = pytest.mark.slow


def test_each_kind_of_work_is_measured_after_each_pause() -> None:
    command = [sys.executable, str(SCRIPT), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ["work", "without", "1 ms", "20 ms"]
    works = {row[0]: [float(cell) for cell in row[1:]] for row in rows[2:]}
    assert len(works) == 5
    assert all(without > 0 for without, *_ in works.values())
