"""The scripts that hold methods against each other, on tiny runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

SCRIPTS = Path(__file__).parents[2] / "scripts"


def rows_of(name: str, *arguments: str | Path) -> list[list[str]]:
    """Cells of the table that a script prints, headings first."""
    command = [sys.executable, SCRIPTS / name, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]


def test_estimates_of_an_exact_rule_are_right(paper_runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "estimates.png"
    heads, _, row = rows_of("studies/estimates.py", paper_runs / "dp_0", "--output", output)
    told = dict(zip(heads, row, strict=True))
    assert (told["density"], told["estimator"], told["within 20%"]) == ("0.05", "exact", "100%")
    assert float(told["mean"]) == pytest.approx(1.0, abs=0.1)
    assert output.read_bytes().startswith(b"\x89PNG")


def test_a_pull_of_one_trainer_is_what_it_pushed(paper_runs: Path, tmp_path: Path) -> None:
    run, output = paper_runs / "dp_0", tmp_path / "buildup.png"
    summary = json.loads((run / "summary.json").read_text())
    density = summary["network"]["pull_density"]
    assert density == summary["compression"]["gradient_density"]
    heads, _, row = rows_of("studies/buildup.py", run, "--output", output)
    assert heads == ["method", "n = 1", "loss, n = 1", "seeds"]
    loss = summary["test"]["loss"]
    assert row[1:] == [f"{100 * density:.2f} % (1.00×)", f"{loss:.4f}", "1"]
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_worlds_are_compared_bit_by_bit(is_spoilt: bool, paper_runs: Path, tmp_path: Path) -> None:
    one, other = paper_runs / "dp_0", tmp_path / "dp_0"
    shutil.copytree(one, other)
    config = json.loads((other / "config.json").read_text())
    config["parallel"]["world"] = "processes"
    (other / "config.json").write_text(json.dumps(config))
    if is_spoilt:
        latest = other / "checkpoints" / (other / "checkpoints" / "latest").read_text().strip()
        dense = latest / "dense.worker-0.safetensors"
        held = bytearray(dense.read_bytes())
        held[-1] ^= 1  # one bit of the last tensor
        dense.write_bytes(held)
    heads, _, row = rows_of("studies/worlds.py", one, other)
    told = dict(zip(heads, row, strict=True))
    tensors = told["tensors in the checkpoint"]
    assert tensors.startswith("1 of ") if is_spoilt else tensors.startswith("all ")
    assert told["ratio"] == "1.00"
