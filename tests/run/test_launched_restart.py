"""torchrun starts a run again: its processes find their folder and go on, or say it is hopeless."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched_runs import POLL_SECONDS, SIZE, WORLD, ended, program, started
from patience import HANG_SECONDS
from world_runs import Train, assert_same, summary

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

STEPS = 400
LENGTH = ("train.epochs=1000", f"train.steps={STEPS}", "telemetry.every=10")

pytestmark = pytest.mark.slow


def torchrun(folder: Path, restarts: int, *arguments: str) -> list[str]:
    options = f"--standalone --nproc-per-node={SIZE} --max-restarts={restarts}"
    launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    return ["env", "-C", str(folder), *launcher, *program(*arguments)]


def starts(folder: Path) -> list[events.Event]:
    path = folder / "events.jsonl"
    found = events.read(path) if path.exists() else []
    return [event for event in found if event.kind is Kind.STARTED]


def await_attempt(root: Path, number: int, process: subprocess.Popen[str]) -> Path:
    """The run's folder, once this attempt has saved a checkpoint that no other had."""
    until = time.monotonic() + HANG_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for folder in root.glob("runs/default/*"):
            saved = sorted(folder.glob("checkpoints/step_*"))
            begun = starts(folder)
            if len(begun) == number and saved and int(saved[-1].name[5:]) > begun[-1].step:
                return folder
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"attempt {number} did not come to a checkpoint")


def test_a_killed_rank_is_restarted_and_the_run_ends_like_the_unbroken_one(
    train: Train, small_rows: list[str], tmp_path: Path
) -> None:
    every = "checkpoint.every=30"
    root = tmp_path / "it's (here), é = 1"  # what Hydra reads otherwise, at each restart
    root.mkdir()
    command = torchrun(root, 3, *small_rows, *WORLD, *LENGTH, every)
    with started([command], [{}]) as (process,):
        for number, role in enumerate(("server-0", "worker-0.1", "worker-0.0"), 1):
            folder = await_attempt(root, number, process)
            os.kill(int((folder / "log" / f"{role}.pid").read_text()), signal.SIGKILL)
        (launcher,) = ended([process])
    assert launcher.code == 0, launcher.text
    assert list(root.glob("runs/default/*")) == [folder]
    assert [one.values["attempt"] for one in starts(folder)] == [0, 1, 2, 3]
    assert summary(folder)["restarts"] == 3
    assert f"restart 3 by the launcher, from step {starts(folder)[-1].step}\n" in launcher.text
    code, unbroken = train("unbroken", *WORLD, *LENGTH, every, "parallel.world=in_process")
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
