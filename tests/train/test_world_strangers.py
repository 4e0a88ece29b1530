"""Whoever is no rank of the run finds every port shut while it trains."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
import world_faults
from world_runs import Train, Trained, assert_same, pids

from dlrm_hybrid.comm.zmq.curve import make_key_file
from dlrm_hybrid.run import training

STEPS = 20
WORLD = (
    *("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]"),
    *("train.batch_size=16", f"train.steps={STEPS}"),
)
RANKS = 3
ADDRESS = "127.0.0.1"


def ports(folder: Path) -> list[int]:
    """On which the ranks of a run listen, one for each."""
    found = [
        connection.laddr
        for pid in pids(folder).values()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {where.ip for where in found} == {ADDRESS}
    assert len(found) == RANKS
    return [where.port for where in found]


def test_a_run_goes_on_unharmed_among_strangers(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all ranks are there nobody else can connect; there is no second chance to be one."""
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    world_faults.plan(tmp_path / "visited", world_faults.Fault(rank=0, step=9, signal="SIGSTOP"))
    refused: list[int] = []

    def visit() -> None:
        stopped = world_faults.await_stop(tmp_path / "visited", "worker-0.0")
        try:
            for port in ports(tmp_path / "visited"):
                with pytest.raises(TimeoutError):
                    # One that is open would answer at once.
                    socket.create_connection((ADDRESS, port), timeout=0.02)
                refused.append(port)
        finally:
            os.kill(stopped, signal.SIGCONT)

    stranger = threading.Thread(target=visit)
    stranger.start()
    code, _ = train("visited", *WORLD)
    stranger.join()
    assert code == 0
    assert len(refused) == RANKS


@pytest.mark.slow
def test_the_secret_of_a_run_goes_nowhere(trained: Trained, tmp_path: Path) -> None:
    make_key_file(tmp_path / "keys.json")
    guarded = (f"network.bind={ADDRESS}", f"network.keys={tmp_path / 'keys.json'}")
    folder = trained("guarded", *WORLD, *guarded)
    secret = json.loads((tmp_path / "keys.json").read_text())["secret"]
    for path in folder.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    unbroken = trained("unbroken", *WORLD, "parallel.world=in_process")
    assert_same(folder, unbroken, STEPS)
