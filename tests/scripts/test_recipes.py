"""docs/recipes.md does what it says: its commands run, with small settings, on days of a log."""

import json
import runpy
import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch
from drifting import Log, write
from emulation_hosts import able
from pages import commands, files
from world_runs import summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.types import ExitCode

PAGE = "recipes.md"
NIGHTLY, WEEKLY, DELTA, MACHINES, GPU = (shlex.split(one)[3:] for one in commands(PAGE))
QUICK = ("model=dlrm_small", "train.batch_size=64", "telemetry.tensorboard=false")


@pytest.fixture
def days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a schema, and three days that have not come yet."""
    write(Log(rows=2000, days=3, new=0.2), tmp_path / "log")
    (tmp_path / "log/day1.yaml").rename(tmp_path / "mine.yaml")
    (tmp_path / "inbox").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_learns_every_night_and_a_server_takes_the_change(
    days: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("2026-11-27.parquet", "2026-11-28.parquet")
    for day, name in enumerate(names, 1):
        (days / f"log/day{day}.parquet").rename(days / "inbox" / name)
        assert run(["dlrm_hybrid", *NIGHTLY, *QUICK]) == 0
    learned = json.loads((days / "runs/live/summary.json").read_text())["files"]
    assert [(one["file"], one["samples"]) for one in learned] == [(name, 1984) for name in names]
    assert run(["dlrm_hybrid", *WEEKLY]) == 0
    assert names[1] in (days / "report.html").read_text()
    assert run(["dlrm_hybrid", *DELTA]) == 0
    rows = pd.read_parquet(days / "log/day3.parquet")
    rows.drop(columns="clicked").to_parquet(days / "tomorrow.parquet")
    capsys.readouterr()
    (days / "take_over.py").write_text(files(PAGE)["take_over.py"])
    runpy.run_path("take_over.py")
    assert capsys.readouterr().out == "True True\n"


def test_without_links_or_a_gpu_the_machine_says_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = [one for one in MACHINES if not one.startswith("network")]
    assert run(["dlrm_hybrid", *without]) == 2
    assert "torchrun --nnodes=4 --nproc-per-node=1" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        assert run(["dlrm_hybrid", *GPU]) == ExitCode.RESOURCES
        assert "device = cuda: torch" in capsys.readouterr().err
        assert not [*tmp_path.iterdir()]  # before rows are prepared


@pytest.mark.slow
@pytest.mark.skipif(not able(), reason="needs what network=emulated needs")
def test_four_machines_are_tried_on_one(tmp_path: Path, small_rows: list[str]) -> None:
    rows = [one for one in small_rows if not one.startswith("model=")]
    more = ("model=dlrm_small", "train.steps=4", f"hydra.run.dir={tmp_path / 'four'}")
    assert run(["dlrm_hybrid", *MACHINES, *rows, *more]) == 0
    assert summary(tmp_path / "four")["steps"] == 4
