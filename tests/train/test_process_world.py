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


def test_the_network_is_counted_by_class_and_rank(trained: Trained) -> None:
    folder = trained("run", *WORLD, "train.steps=15")
    told = summary(folder)
    network, roles = told["network"], told["roles"]
    assert [roles[str(rank)]["role"] for rank in range(7)] == [
        *("worker-0.0", "worker-0.1", "worker-0.2"),
        *("worker-1.0", "worker-1.1", "worker-1.2", "server-0"),
    ]
    assert network["bytes_total"] == sum(role["bytes_sent"] for role in roles.values())
    assert network["bytes_total"] == sum(one["bytes"] for one in network["by_class"].values())
    for name in ("gradient_push", "parameter_pull", "activation", "activation_gradient"):
        tally = network["by_class"][name]
        overhead = tally["bytes"] - tally["dense_equivalent_bytes"]
        assert 0 < overhead <= 300 * tally["messages"], name
    # Three stages of two trainers push and pull once in each of 10 steps that are counted.
    assert network["by_class"]["gradient_push"]["messages"] == 6 * 10
    assert network["by_phase"]["evaluate"]["bytes"] > 0
    assert network["by_phase"]["checkpoint"]["bytes"] > 0


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


def test_every_socket_listens_on_loopback_only(train: Train, tmp_path: Path) -> None:
    found: dict[int, list[str]] = {}

    def look(ranks: dict[str, int]) -> None:
        for pid in ranks.values():
            found[pid] = [
                connection.laddr.ip
                for connection in psutil.Process(pid).net_connections(kind="inet")
                if connection.status == psutil.CONN_LISTEN
            ]
        os.kill(os.getpid(), signal.SIGINT)

    watcher = Watcher(tmp_path / "run", RANKS, look)
    watcher.start()
    code, _ = train("run", *LONG)
    watcher.join()
    assert code == 130
    assert len(found) == RANKS
    for addresses in found.values():
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}
