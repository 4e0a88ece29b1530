"""What the study says of MLPerf's tables follows from their sizes alone."""

import subprocess
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parent.parent.parent / "scripts" / "studies" / "mlperf.py"


@pytest.mark.slow
def test_memory_and_bytes_are_those_of_the_tables() -> None:
    done = subprocess.run([sys.executable, STUDY], capture_output=True, text=True, check=True)
    head, *lines = done.stdout.strip().splitlines()
    assert head.startswith("tables: 204,184,588 rows, 104.5 GB")  # 128 numbers of 4 bytes a row
    rows = {cells[1].strip(): [one.strip() for one in cells[2:]] for cells in map(_cells, lines)}
    recipe = rows["8 trainers (the recipe)"]
    # 214 ids and 26 lengths of 4 bytes one way, 26 vectors both ways; an eighth stays here
    wanted = 7 / 8 * (214 * 4 + 26 * 4 + 2 * 26 * 512)
    assert abs(float(recipe[1].replace(",", "")) - wanted) / wanted < 0.001
    # a copy of tables and adagrad's state while a checkpoint is written, an eighth each
    assert 2 * 209.1 / 8 < float(recipe[4].removesuffix(" GB")) < 2 * 209.1 / 8 + 3


def _cells(line: str) -> list[str]:
    return line.split("|")
