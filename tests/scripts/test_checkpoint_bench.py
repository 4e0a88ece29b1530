"""What checkpoints cost is measured by a script that runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "checkpoint.py"


@pytest.mark.slow
def test_a_run_with_checkpoints_is_held_against_one_without(small_rows: list[str]) -> None:
    options = ("--worlds", "single", "--repeats", "2", "--every", "20")
    given = ("train.steps=85", "telemetry.every=5")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, *small_rows, *given],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| single"))
    _, _, _, checkpoints, pause, *_ = (cell.strip() for cell in row.split("|"))
    assert checkpoints == "8"
    assert float(pause.split()[0]) > 0.0
