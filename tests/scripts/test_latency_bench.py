"""The benchmark of emulated latency runs, and its table says what was asked for and reached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulation_hosts import needs_namespaces

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "latency.py"
SHORT = ("--repeats", "1", "--rates", "50mbit", "--latencies", "0ms", "5ms", "--seconds", "0.2")

pytestmark = [needs_namespaces, pytest.mark.slow]


def test_round_trips_and_rates_are_measured() -> None:
    command = [sys.executable, str(SCRIPT), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("| 50mbit")
    ]
    assert [row[1:3] for row in rows] == [["0ms", "0"], ["5ms", "10"]]
    undelayed, delayed = (float(row[4]) for row in rows)
    assert undelayed < 10 <= delayed
    assert all(5 < float(row[6]) <= 60 for row in rows)
