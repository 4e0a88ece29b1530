"""Worlds of processes: equal to the in-process world, stopped together, nobody left behind."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from patience import HANG_SECONDS, PATIENT
from world_runs import Train, assert_compiled_ahead, assert_same, pids, summary, tensors

WORLD = ("parallel=hybrid", PATIENT)


LAYOUTS = [
    # trainers, cuts, servers, schedule, microbatches, other options
    pytest.param(*(1, "", 1, "sequential", 1, ()), marks=pytest.mark.slow),
    (1, "bottom.2,top.1", 0, "gpipe", 4, ("optimizer=adagrad", "optimizer.lr=0.02")),
    (2, "bottom.2,top.2", 1, "one_f_one_b", 4, ()),
    (2, "bottom.4", 2, "sequential", 1, ("sync=bounded", "sync.staleness=2")),
    pytest.param(
        *(3, "", 2, "sequential", 1, ("embedding.optimizer=rowwise_adagrad",)),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *(2, "top.3", 3, "gpipe", 1, ("precision=bfloat16", "embedding.optimizer=adagrad")),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(
    ("trainers", "cuts", "servers", "schedule", "microbatches", "options"), LAYOUTS
)
def test_processes_equal_the_in_process_world_bit_for_bit(
    trainers: int,
    cuts: str,
    servers: int,
    schedule: str,
    microbatches: int,
    options: tuple[str, ...],
    train: Train,
) -> None:
    layout = (
        *(f"parallel.trainers={trainers}", f"parallel.cuts=[{cuts}]"),
        *(f"parallel.servers={servers}", f"schedule={schedule}"),
        *(f"schedule.microbatches={microbatches}", "train.batch_size=16", "train.epochs=3"),
        *("train.steps=100", "train.evaluate_every=45", "checkpoint.every=50"),
        *("checkpoint.keep=9", *options),
    )
    code, processes = train("processes", *WORLD, *layout)
    assert code == 0
    code, in_process = train("in-process", *WORLD, *layout, "parallel.world=in_process")
    assert code == 0
    assert_same(processes, in_process, 100)
    before = tensors(processes, 50)
    moved = [
        np.abs(tensor - before[name]).max() for name, tensor in tensors(processes, 100).items()
    ]
    assert max(moved) > 1e-3
    assert summary(processes)["test"] == summary(in_process)["test"]
    assert summary(processes)["train"] == pytest.approx(summary(in_process)["train"], rel=1e-12)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_other_shardings_learn_the_same(sharding: str, train: Train) -> None:
    layout = ("parallel.cuts=[bottom.4]", "train.batch_size=16", "train.steps=90")
    options = ("optimizer.lr=0.01", "model=dlrm_small", "model.embedding_dim=16")
    wide = ("model.bottom=[13,32,16]", "parallel.trainers=2", "parallel.cuts=[]")
    options = (*options, *wide)
    assert train("in-process", *WORLD, *layout, *options, "parallel.world=in_process")[0] == 0
    code, folder = train("sharded", *WORLD, *layout, *options, f"embedding.sharding={sharding}")
    assert code == 0
    expected = summary(folder.with_name("in-process"))["test"]["loss"]
    assert summary(folder)["test"]["loss"] == pytest.approx(expected, abs=1e-5)


def test_half_precision_halves_the_embeddings_bytes(train: Train) -> None:
    layout = (*WORLD, "parallel.cuts=[]", "train.steps=30")
    sent = {}
    for precision in ("float32", "float16", "bfloat16"):
        code, folder = train(precision, *layout, f"embedding.comm_precision={precision}")
        assert code == 0
        sent[precision] = summary(folder)["network"]["by_class"]["embedding"]["bytes"]
        assert 0.4 < summary(folder)["test"]["loss"] < 0.8
    assert sent["float16"] == sent["bfloat16"]
    assert 0.5 < sent["float16"] / sent["float32"] < 0.6


def test_the_network_is_counted_by_class_and_rank(train: Train) -> None:
    code, folder = train("run", *WORLD, "train.steps=25")
    assert code == 0
    assert_compiled_ahead(folder)
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
    # Three stages of two trainers push and pull once in each of 20 steps that are counted.
    assert network["by_class"]["gradient_push"]["messages"] == 6 * 20
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


LONG = (*WORLD, "train.epochs=400", "telemetry.every=10", "train.batch_size=16")


@pytest.mark.parametrize("role", ["worker-0.0", "worker-0.1", "worker-1.2", "server-0"])
def test_a_killed_rank_is_named_and_ends_the_others(
    role: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = Watcher(tmp_path / "run", 7, lambda ranks: os.kill(ranks[role], signal.SIGKILL))
    watcher.start()
    code, folder = train("run", *LONG, "checkpoint.max_restarts=0")
    watcher.join()
    assert watcher.acted, "the fault did not strike"
    assert code == 1
    assert f"{role} (rank " in capsys.readouterr().err
    assert not any(psutil.pid_exists(pid) for pid in pids(folder).values())
    assert summary(folder)["status"] == "failed"


def test_sigterm_stops_all_at_one_step_and_the_run_goes_on(train: Train, tmp_path: Path) -> None:
    options = (*WORLD, "train.epochs=4", "telemetry.every=10", "train.batch_size=16")
    watcher = Watcher(tmp_path / "run", 7, lambda ranks: os.kill(os.getpid(), signal.SIGTERM))
    watcher.start()
    code, folder = train("run", *options)
    watcher.join()
    assert (code, summary(folder)["status"]) == (75, "preempted")
    step = int((folder / "checkpoints" / "latest").read_text()[5:])
    steps = 4 * (6000 // 32)
    assert 0 < step < steps
    code, _ = train("run", *options, "checkpoint.resume=auto")
    assert code == 0
    code, unbroken = train("unbroken", *options, "parallel.world=in_process")
    assert code == 0
    assert_same(folder, unbroken, steps)


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

    watcher = Watcher(tmp_path / "run", 7, look)
    watcher.start()
    code, _ = train("run", *LONG)
    watcher.join()
    assert code == 130
    assert len(found) == 7
    for addresses in found.values():
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}
