"""Worlds of processes whose workers have several threads each (hogwild)."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from test_async_world import ASYNC, IN_PROCESS, layout, progress
from test_process_world import Watcher
from world_runs import Train, Trained, assert_moved, checkpoint, pids, summary

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.types import ExitCode

THREADS = 2
HOGWILD = (
    *(*ASYNC, *layout(2), f"parallel.threads={THREADS}", "gradient=dct", "gradient.density=0.1"),
    *("activation=dct", "activation.sparsity=0.5", "telemetry.every=10", "sync.lr_scale=one"),
    # At 0.1 the order of four threads' pushes moves the loss of 150 steps by up to 15 %, here 1 %.
    *("optimizer.lr=0.03", "embedding.lr=0.03"),
)
RANKS = 6


def assert_all_learned_once(folder: Path, steps: int) -> None:
    """By the leader's counts, by the rows told of, and by the pushes that came."""
    batches = progress(folder, steps)["batches"]
    assert sum(batches) == 2 * steps
    record = list(events.read(folder / "events.jsonl"))
    rows = {one.step: one.values["rows"] for one in record if one.kind is Kind.PROGRESS}
    assert sum(rows.values()) == 16 * sum(batches)


def test_threads_learn_each_batch_once_and_go_on_from_a_checkpoint(trained: Trained) -> None:
    every = "checkpoint.every=20"
    folder = trained("threads", *HOGWILD, "train.steps=40", every)
    assert_all_learned_once(folder, 40)
    assert_moved(folder, 20, 40)
    told = summary(folder)
    pushes = [one["pushes"] for one in told["sync"]["staleness"]["by_trainer"].values()]
    assert pushes == [2 * count for count in progress(folder, 40)["batches"]]  # of both stages
    assert 1.0 < told["sync"]["staleness"]["mean"] < 2 * THREADS
    for role in told["roles"].values():
        assert role["threads"] == (THREADS if role["role"].startswith("worker") else 1)
        assert 0 < role["thread_cpu_seconds"] <= role["cpu_seconds"] + 0.01
    assert 0.05 < told["compression"]["gradient_density"] < 0.2

    resumed = trained(
        "resumed", *HOGWILD, "train.steps=60", every, f"checkpoint.resume={checkpoint(folder, 40)}"
    )
    assert sum(progress(resumed, 60)["batches"]) == 120
    alone = trained("alone", *HOGWILD, IN_PROCESS, "parallel.threads=1", "train.steps=60")
    loss, plain = summary(resumed)["test"]["loss"], summary(alone)["test"]["loss"]
    assert loss == pytest.approx(plain, rel=0.03)


@pytest.mark.slow
def test_a_signal_stops_threads_at_rest_and_the_run_goes_on(train: Train, tmp_path: Path) -> None:
    options = (*HOGWILD, "train.steps=400", "checkpoint.every=0")
    act = lambda ranks: os.kill(ranks["worker-1.0"], signal.SIGTERM)  # noqa: E731
    watcher = Watcher(tmp_path / "run", RANKS, act)
    watcher.start()
    code, folder = train("run", *options)
    watcher.join()
    assert watcher.acted, "the fault did not strike"
    assert code == ExitCode.PREEMPTED
    assert not any(psutil.pid_exists(pid) for pid in pids(folder).values())
    (saved,) = (folder / "checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert 0 < step < 400 and sum(progress(folder, step)["batches"]) == 2 * step
    code, _ = train("run", *options, "checkpoint.resume=auto")
    assert (code, summary(folder)["status"]) == (0, "complete")
    assert_all_learned_once(folder, 400)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_all_threads(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", *HOGWILD, "train.steps=400", "optimizer.lr=1e18")
    assert code == ExitCode.DIVERGED
    assert "is not finite" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"
    assert not any(psutil.pid_exists(pid) for pid in pids(folder).values())
