"""The scripts that make the paper's tables and figures, on tiny runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import pytest

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

SCRIPTS = Path(__file__).parents[2] / "scripts"
WORLD = ("parallel.world=in_process", "parallel.trainers=1", "train.steps=24")
EXACT = ("gradient.threshold=exact", "gradient.lifespan=1", "gradient.renewal=fixed")
CONSTANT = ("optimizer.schedule=constant",)
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def folder(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs NAME_SEED: a baseline of each seed, DCT-DP of each seed, DCT-MP measured and applied."""
    from dlrm_hybrid.__main__ import run

    runs = tmp_path_factory.mktemp("runs")

    def train(name: str, *overrides: str) -> None:
        argv = ["dlrm_hybrid", "train", *small_rows, *WORLD, f"hydra.run.dir={runs / name}"]
        assert run([*argv, "train.evaluate_every=8", "telemetry.every=2", *overrides]) == 0

    for seed in SEEDS:
        train(f"base_{seed}", "+experiment=baseline", f"train.seed={seed}")
        dp = ("+experiment=dct_dp", "parallel.cuts=[]", "gradient.sparsity=0.95", *EXACT)
        train(f"dp_{seed}", f"train.seed={seed}", *dp)
    train("mp_0", "+experiment=dct_mp", "activation.sparsity=[0.5,0.75]")
    train("top_0", "+experiment=dct_mp", "parallel.cuts=[top.1]", "activation.sparsity=0.75")
    train("zero_0", "+experiment=paper_table3", "activation.sparsity=0.0", *CONSTANT)
    train("observed_0", "+experiment=baseline", "activation.observe=0.75")
    return runs


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def loss_of(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["test"]["loss"]


def cells(page: str, first: str) -> tuple[str, ...]:
    """Of the row that begins so; the same in all tables that have it."""
    lines = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in page.splitlines()}
    (row,) = (line for line in lines if line[:1] == (first,))
    return row


def test_tables_hold_runs_against_the_baseline_of_their_seed(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "tables.md"
    done = script("paper_tables.py", folder, "--output", output)
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
    done = script("paper_tables.py", *bases, folder / "dp_0", "--output", output)
    assert done.returncode == 0, done.stderr
    change = 100 * (loss_of(folder / "dp_0") / loss_of(folder / "base_0") - 1)
    assert f"{change:+z.2f}" in cells(output.read_text(), "95 %, L = 1")


def test_tables_refuse_two_runs_of_one_seed_in_a_row(folder: Path, tmp_path: Path) -> None:
    again = folder / "dp_0"
    done = script("paper_tables.py", folder, again, "--output", tmp_path / "tables.md")
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
    done = script("plot_thresholds.py", "--runs", *paths, "--names", name, "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
    for path, label in zip(paths, labels, strict=True):
        thresholds = recorded(path, name)
        assert len(thresholds) == 12
        assert thresholds[0] > 0
        told = f"{name} {label}: first {thresholds[0]:.3g}, last {thresholds[-1]:.3g}"
        assert told in done.stdout.splitlines(), "too short to say how steady"


def test_thresholds_of_an_unknown_name_are_refused(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "thresholds.png"
    arguments = ("--runs", folder / "mp_0", "--names", "activation.7", "--output", output)
    done = script("plot_thresholds.py", *arguments)
    assert done.returncode != 0
    assert "no thresholds of activation.7" in done.stderr
    assert not output.exists()


def test_gaps_are_drawn(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "gap.png"
    bases = [folder / f"base_{seed}" for seed in SEEDS]
    runs = [folder / name for name in ("dp_0", "dp_1", "mp_0")]
    done = script("plot_gap.py", "--baseline", *bases, "--runs", *runs, "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Imports a script by its name."""
    import importlib

    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_gap_arithmetic(module: Callable[[str], object]) -> None:
    script = module("plot_gap")
    loss = {100 * i: float(i) for i in range(1, 21)}
    assert script.smooth(loss) == {100 * i: i - 0.5 for i in range(2, 21)}
    assert script.gap({1: 1.5, 2: 3.0, 3: 1.0}, {2: 2.0, 3: 1.0}) == {2: 50.0, 3: 0.0}
    assert script.averaged([{1: 1.0, 2: 2.0}, {2: 4.0}]) == {2: 3.0}


def test_deviation_is_of_the_mean_before(module: Callable[[str], object]) -> None:
    script = module("plot_thresholds")
    thresholds = [2.0] * 10 + [3.0, 2.1]
    curve = {"sparsity": 0.5, "applied": True, "steps": [10 * i for i in range(1, 13)]}
    assert script.deviations(script.Curve(**curve, thresholds=thresholds)) == [0.5, 0.0]
