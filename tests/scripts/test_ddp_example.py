"""The tutorial of the compressors trains on two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "ddp.py"


@pytest.mark.slow
def test_a_hundredth_of_the_bytes_trains_as_well() -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "150", "--seeds", "1"]
    done = subprocess.run(
        [*command, "--methods", "NoCompression", "TopK", "CltK", "TernGrad"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    losses = {name: float(mean) for name, mean, *_ in rows}
    bytes_per_step = {name: int(sent.replace(",", "")) for name, _, _, sent, _ in rows}
    assert list(losses) == ["NoCompression", "TopK", "CltK", "TernGrad"]
    dense = bytes_per_step["NoCompression"]
    for name, least in (("TopK", 50), ("CltK", 50), ("TernGrad", 10)):
        assert losses[name] < 1.25 * losses["NoCompression"]
        assert bytes_per_step[name] * least < dense
