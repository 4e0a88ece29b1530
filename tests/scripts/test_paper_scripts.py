"""The scripts that make the paper's tables and figures, on tiny runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.report.measures import digits
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

SCRIPTS = Path(__file__).parents[2] / "scripts"
SEEDS = (0, 1)


@pytest.fixture
def folder(paper_runs: Path) -> Path:
    return paper_runs


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / name, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def loss_of(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["test"]["loss"]


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split("|")[1:-1])


def cells(page: str, first: str) -> tuple[str, ...]:
    """Of the row that begins so; the same in all tables that have it."""
    lines = {cells_of(line) for line in page.splitlines()}
    (row,) = (line for line in lines if line[:1] == (first,))
    return row


def test_tables_hold_runs_against_the_baseline_of_their_seed(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "tables.md"
    done = script("studies/paper_tables.py", folder, "--output", output)
    assert done.returncode == 0, done.stderr
    page = output.read_text()
    assert "## Table 1. DCT-MP" in page
    assert "## Table 2. DCT-DP" in page
    assert "## Table 3" not in page
    losses = [loss_of(folder / f"dp_{seed}") for seed in SEEDS]
    bases = [loss_of(folder / f"base_{seed}") for seed in SEEDS]
    changes = [100 * (loss / base - 1) for loss, base in zip(losses, bases, strict=True)]
    row = cells(page, "95 %, L = 1")
    assert f"{mean(losses):.4f} ± {stdev(losses):.4f}" in row
    assert f"{mean(changes):+z.2f} ± {stdev(changes):.2f}" in row
    assert "0.4538, 78.79 %" in row, "the paper's row of the same sparsity"
    assert f"{mean(bases):.4f} ± {stdev(bases):.4f}" in cells(page, "baseline")
    alone = cells(page, "50 %, 75 %")
    change = 100 * (loss_of(folder / "mp_0") / loss_of(folder / "base_0") - 1)
    assert f"{change:+z.2f}" in alone, "one seed, against that seed"
    assert cells(page, "75 %, after top.1")[-4:] == ("–", "–", "–", "1"), "a cut of our own"


def test_a_sparsity_of_zero_is_the_baseline(folder: Path, tmp_path: Path) -> None:
    assert loss_of(folder / "zero_0") == loss_of(folder / "base_0")
    bases = [folder / "zero_0", folder / "base_1"]
    output = tmp_path / "tables.md"
    done = script("studies/paper_tables.py", *bases, folder / "dp_0", "--output", output)
    assert done.returncode == 0, done.stderr
    change = 100 * (loss_of(folder / "dp_0") / loss_of(folder / "base_0") - 1)
    assert f"{change:+z.2f}" in cells(output.read_text(), "95 %, L = 1")


def test_tables_refuse_two_runs_of_one_seed_in_a_row(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "dp_0"
    shutil.copytree(folder / "dp_0", again)
    done = script("studies/paper_tables.py", folder, again, "--output", tmp_path / "tables.md")
    assert done.returncode != 0
    assert "one row, one seed" in done.stderr


def recorded(run: Path, name: str) -> list[float]:
    record = events.read(run / "events.jsonl")
    return [e.values["of"][name]["threshold"] for e in record if e.kind is Kind.COMPRESSION]


@pytest.mark.parametrize(
    ("name", "runs", "labels"),
    [
        ("gradient.top.1.weight", ("dp_0",), ("95 %",)),
        ("activation.1", ("mp_0", "observed_0"), ("75 %", "75 %, measured only")),
    ],
)
def test_thresholds_are_drawn_and_told(
    name: str, runs: tuple[str, ...], labels: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "thresholds.png"
    paths = [folder / run for run in runs]
    done = script("studies/thresholds.py", "--runs", *paths, "--names", name, "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
    for path, label in zip(paths, labels, strict=True):
        thresholds = recorded(path, name)
        assert len(thresholds) == 12
        assert thresholds[0] > 0
        ends = tuple(digits(threshold) for threshold in (thresholds[0], thresholds[-1]))
        rows = [cells_of(line) for line in done.stdout.splitlines()]
        assert (name, label, *ends, "–", "–") in rows, "too short to say how steady"


def test_thresholds_of_an_unknown_name_are_refused(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "thresholds.png"
    arguments = ("--runs", folder / "mp_0", "--names", "activation.7", "--output", output)
    done = script("studies/thresholds.py", *arguments)
    assert done.returncode != 0
    assert "no thresholds of activation.7" in done.stderr
    assert not output.exists()


def test_gaps_are_drawn(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "gap.png"
    bases = [folder / f"base_{seed}" for seed in SEEDS]
    runs = [folder / name for name in ("dp_0", "dp_1", "mp_0")]
    done = script("studies/gap.py", "--baseline", *bases, "--runs", *runs, "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
