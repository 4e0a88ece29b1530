"""What spans cost is measured by a script that runs, and is within the bound it sets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "spans.py"


@pytest.mark.slow
@pytest.mark.parametrize("world", [(), ("parallel=hybrid", "gradient=dct")])
def test_spans_cost_a_hundredth_at_most(
    world: tuple[str, ...], small_rows: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), *small_rows, *world]
    done = subprocess.run(
        [*command, "train.steps=40"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("% |")]
    assert len(rows) == (2 * 3 + 1 if world else 1)
    assert all(int(row.split("|")[2]) > 3 for row in rows)
