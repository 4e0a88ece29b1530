"""torchrun starts a run again: its processes find their folder and go on, or say it is hopeless."""

import sys
from itertools import product
from pathlib import Path

import pytest
import world_faults
from launched_runs import SIZE, WORLD, ended, started
from struck_program import FAULTS, STRUCK
from world_faults import Fault
from world_runs import Train, assert_same, summary

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

SERVER, STEPS = SIZE - 1, 130
LENGTH = (f"train.steps={STEPS}", "train.epochs=9", "telemetry.every=10", "checkpoint.every=20")

pytestmark = pytest.mark.slow


def torchrun(folder: Path, restarts: int, *arguments: str) -> list[str]:
    options = f"--standalone --nproc-per-node={SIZE} --max-restarts={restarts}"
    launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    return ["env", "-C", str(folder), *launcher, *STRUCK, "train", *arguments]


def starts(folder: Path) -> list[events.Event]:
    return [one for one in events.read(folder / "events.jsonl") if one.kind is Kind.STARTED]


def test_a_killed_rank_is_restarted_and_the_run_ends_like_the_unbroken_one(
    train: Train, small_rows: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "it's (here), é = 1"  # what Hydra reads otherwise, at each restart
    root.mkdir()
    struck = (SERVER, 30), (1, 70), (0, 110)
    world_faults.plan(root, *(Fault(rank=rank, step=step, sends=1) for rank, step in struck))
    command = torchrun(root, 3, *small_rows, *WORLD, *LENGTH)
    with started([command], [{FAULTS: str(root)}]) as processes:
        (launcher,) = ended(processes)
    assert launcher.code == 0, launcher.text
    assert world_faults.planned(root) == []
    (folder,) = root.glob("runs/default/*")
    assert [one.values["attempt"] for one in starts(folder)] == [0, 1, 2, 3]
    assert summary(folder)["restarts"] == 3
    # A checkpoint counts once somebody has heard that all have written theirs.
    later = tuple(one.step for one in starts(folder)[1:])
    assert later in product((0, 20), (40, 60), (80, 100))
    assert f"restart 3 by the launcher, from step {starts(folder)[-1].step}\n" in launcher.text
    code, unbroken = train("unbroken", *WORLD, *LENGTH, "parallel.world=in_process")
    assert code == 0
    assert_same(folder, unbroken, STEPS)
    assert summary(folder)["test"] == summary(unbroken)["test"]


def test_what_is_wrong_is_not_tried_again(small_rows: list[str], tmp_path: Path) -> None:
    more = ("optimizer.lr=1e18", f"hydra.run.dir={tmp_path / 'run'}")
    with started([torchrun(tmp_path, 3, *small_rows, *WORLD, *more)], [{}]) as processes:
        (launcher,) = ended(processes)
    assert launcher.code == 1  # torchrun's own
    assert len(starts(tmp_path / "run")) == 1
    assert "exitcode  : 4" in launcher.text
    assert "the loss is nan" in launcher.text
