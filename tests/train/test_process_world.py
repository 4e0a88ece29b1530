"""Worlds of processes: equal to the in-process world, stopped together, nobody left behind."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import world_faults
from patience import HANG_SECONDS, PATIENT
from world_faults import Fault
from world_runs import Train, Trained, assert_same, pids, summary

from dlrm_hybrid.run import training

WORLD = ("parallel=hybrid", PATIENT)


class Watcher(threading.Thread):
    """Acts on a run from outside, once all its ranks train."""

    def __init__(self, folder: Path, ranks: int, act: Callable[[dict[str, int]], None]) -> None:
        super().__init__()
        self.folder, self.ranks, self.act = folder, ranks, act
        self.acted = False

    def run(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        events = self.folder / "events.jsonl"
        while time.monotonic() < deadline:
            if events.exists() and '"kind": "progress"' in events.read_text():
                assert len(pids(self.folder)) == self.ranks
                self.acted = True
                self.act(pids(self.folder))
                return
            time.sleep(0.005)


SMALL = (*WORLD, "parallel.cuts=[bottom.2]", "train.batch_size=16")
LONG = (*SMALL, "train.epochs=400", "telemetry.every=10")
RANKS = 5


def test_orders_are_for_many_steps(trained: Trained) -> None:
    folder = trained(
        "run", *SMALL, "train.steps=45", "checkpoint.every=20", "train.evaluate_every=20"
    )
    # Of the 40 steps that are counted: each of three workers gets orders to train at steps 10, 20,
    # 30 and 40, and one to end, and reports at 10, 20, 30, 40 and 45; four say goodbye.
    assert summary(folder)["network"]["by_class"]["control"]["messages"] == 3 * (5 + 5) + 4


@pytest.mark.parametrize(
    "role",
    [
        "worker-0.1",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("worker-1.1", "server-0")),
    ],
)
def test_a_killed_rank_is_named_and_ends_the_others(
    role: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = Watcher(tmp_path / "run", RANKS, lambda ranks: os.kill(ranks[role], signal.SIGKILL))
    watcher.start()
    code, folder = train("run", *LONG, "checkpoint.max_restarts=0")
    watcher.join()
    assert watcher.acted, "the fault did not strike"
    assert code == 1
    assert f"{role} (rank " in capsys.readouterr().err
    assert not any(psutil.pid_exists(pid) for pid in pids(folder).values())
    assert summary(folder)["status"] == "failed"


def test_sigterm_stops_all_at_one_step_and_the_run_goes_on(
    train: Train, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*SMALL, "train.steps=20")
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    world_faults.plan(tmp_path / "run", Fault(rank=3, step=8, signal="SIGTERM"))
    code, folder = train("run", *options)
    assert (code, summary(folder)["status"]) == (75, "preempted")
    step = int((folder / "checkpoints" / "latest").read_text()[5:])
    assert 8 <= step < 20
    trained("run", *options, "checkpoint.resume=auto")
    unbroken = trained("unbroken", *options, "parallel.world=in_process")
    assert_same(folder, unbroken, 20)
