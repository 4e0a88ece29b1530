"""The program of docs/tutorial.md, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


@pytest.mark.slow
def test_the_tutorial_prints_what_its_page_says(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    printed = re.search(
        r"    loss ([\d.]+)\n    ([\d,]+) bytes a step, float32 takes ([\d,]+)", text
    )
    assert program is not None and printed is not None
    (tmp_path / "tutorial.py").write_text(program[1], "utf-8")
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 tutorial.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    found = re.search(r"loss ([\d.]+)\n([\d,]+) bytes a step, float32 takes ([\d,]+)", done.stdout)
    assert found is not None, done.stdout
    told, said = (
        [float(number.replace(",", "")) for number in one.groups()] for one in (found, printed)
    )
    assert told[0] == pytest.approx(said[0], rel=0.2)  # processors add up differently
    assert told[1] == pytest.approx(said[1], rel=0.05)
    assert told[2] == said[2]
    assert 100 * told[1] < told[2]
