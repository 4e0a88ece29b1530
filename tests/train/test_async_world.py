"""Worlds whose trainers do not wait for each other: what is equal in them all the same."""

import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import world_faults
from world_runs import Train, Trained, assert_moved, assert_same, checkpoint, pids, summary, tensors

from dlrm_hybrid.data.profile import NUM_CATEGORICAL
from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.train.asynchronous.order_log import order_file
from dlrm_hybrid.types import ExitCode

ASYNC = (
    *("parallel=hybrid", "sync=async", "embedding=served"),
    *("parallel.cuts=[bottom.2]", "train.batch_size=16", "train.epochs=4", "checkpoint.every=50"),
    *("checkpoint.keep=9", "sync.check_every=1"),
)
IN_PROCESS = "parallel.world=in_process"
ADAM = ("optimizer=adam", "optimizer.lr=0.01", "embedding.lr=0.1")
CACHED = ("embedding.cache_rows=300", "embedding.cache_batches=5")


def layout(trainers: int, servers: int = 1, table_servers: int = 1) -> tuple[str, ...]:
    return (
        *(f"parallel.trainers={trainers}", f"parallel.servers={servers}"),
        f"parallel.table_servers={table_servers}",
    )


def progress(folder: Path, step: int) -> dict:
    return json.loads((checkpoint(folder, step) / "manifest.json").read_text())["progress"]


def test_one_trainer_learns_the_bits_of_lock_step(trained: Trained) -> None:
    method = (*ADAM, "gradient=dct", "gradient.density=0.1", *CACHED)
    length = ("train.steps=40", "checkpoint.every=20")
    options = (*ASYNC, IN_PROCESS, *layout(1, 2, 2), *method, *length)
    alone = trained("async", *options)
    lockstep = trained("sync", *options, "sync=sync")
    assert_same(alone, lockstep, 40)
    assert_moved(alone, 20, 40)
    assert summary(alone)["test"] == summary(lockstep)["test"]


@pytest.mark.parametrize(("scale", "rate"), [("one", 0.01), ("trainers", 0.005)])
def test_a_push_moves_rows_by_its_own_rate(scale: str, rate: float, trained: Trained) -> None:
    """Adagrad's first step moves every element by the rate, whatever the gradient is."""
    options = (*ASYNC, IN_PROCESS, *layout(2), "embedding.optimizer=adagrad", "train.steps=1")
    options = (*options, f"sync.lr_scale={scale}", "train.batch_size=1")
    moved = trained("moved", *options, "embedding.lr=0.01")
    first = trained("first", *options, "embedding.lr=1e-12")
    before, after = tensors(first, 1), tensors(moved, 1)
    names = [name for name in before if name.startswith("embedding") and name.endswith("weight")]
    steps = np.concatenate([np.abs(after[name] - before[name]).ravel() for name in names])
    assert np.median(steps[steps > 0]) == pytest.approx(rate, rel=1e-3)


def assert_told_as_learned(folder: Path) -> None:
    """Of the attempts that have come to their end, and of the whole run."""
    record = list(events.read(folder / "events.jsonl"))
    *_, started = (one for one in record if one.kind is Kind.STARTED)
    ranks = [one.values for one in record if one.kind is Kind.RANK]
    leader = next(one for one in ranks if one["rank"] == started.values["rank"])
    assert started.values["role"] == leader["role"] == "server-0"
    *_, point = (one for one in record if one.kind is Kind.PROGRESS)
    told = summary(folder)["sync"]
    saved = progress(folder, point.step)["batches"]
    assert list(told["batches_by_trainer"].values()) == point.values["batches"] == saved
    learned = [now - before for now, before in zip(saved, started.values["batches"], strict=True)]
    pushes = [one["pushes"] for one in told["staleness"]["by_trainer"].values()]
    servers = sum(one["staleness"] is not None for one in ranks)
    assert pushes == [2 * servers * count for count in learned]  # of each stage, to each server
    assert 0 < told["staleness"]["mean"] < len(saved)
    # All leave out their first steps or batches: the leader's are as many as those of workers.
    timed = [one["timed_steps"] for one in ranks if one["role"].endswith(".0")]
    assert sum(timed) == len(saved) * leader["timed_steps"] > 0
    by_trainer = summary(folder)["step_milliseconds"]["by_trainer"]
    assert sorted(one["steps"] for one in by_trainer.values()) == sorted(timed)
    ids = summary(folder)["distinct_ids_per_batch"]["by_trainer"]
    assert len(ids) == len(saved) and min(ids.values()) > NUM_CATEGORICAL


def test_a_record_of_another_run_is_refused(
    train: Train, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*ASYNC, *layout(2), "train.steps=20")
    recorded = trained("recorded", *options, "sync.record=true")
    path = order_file(recorded, "tables-0")
    whole = path.read_bytes()
    broken = (
        (whole[16:], "deadlock"),
        (whole[:-3], "are no whole records"),
        (None, "was the run made with sync.record=true?"),
    )
    others = (
        ("train.seed=7", "train.seed = 7: the record was made with 0"),
        ("train.evaluate_every=6", "step 6 has an evaluation, a checkpoint or the end of the run"),
    )
    for number, (option, message) in enumerate(others):
        replay = (IN_PROCESS, f"sync.replay={recorded}", option)
        code, _ = train(f"other-{number}", *options, *replay)
        assert code == ExitCode.DATA
        assert message in capsys.readouterr().err
    for number, (content, message) in enumerate(broken):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        code, _ = train(f"played-{number}", *options, IN_PROCESS, f"sync.replay={recorded}")
        assert code != 0
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_trainer_restarts_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    world_faults.Fault(rank=3, step=70).plan(tmp_path / "run")
    code, folder = train("run", *ASYNC, *layout(2), "train.steps=120")
    assert world_faults.planned(folder) == []
    assert (code, summary(folder)["status"]) == (0, "complete")
    record = events.read(folder / "events.jsonl")
    started = [event.step for event in record if event.kind is Kind.STARTED]
    assert len(started) == 2 and started[1] == 50
    assert_told_as_learned(folder)
    assert sum(progress(folder, 120)["batches"]) == 240


# Workers with several threads each (hogwild).
THREADS = 2
HOGWILD = (
    *(*ASYNC, *layout(2), f"parallel.threads={THREADS}", "gradient=dct", "gradient.density=0.1"),
    *("activation=dct", "activation.sparsity=0.5", "telemetry.every=10", "sync.lr_scale=one"),
    # At 0.1 the order of four threads' pushes moves the loss of 150 steps by up to 15 %, here 1 %.
    *("optimizer.lr=0.03", "embedding.lr=0.03"),
)


def assert_all_learned_once(folder: Path, steps: int) -> None:
    """By the leader's counts, by the rows told of, and by the pushes that came."""
    batches = progress(folder, steps)["batches"]
    assert sum(batches) == 2 * steps
    record = list(events.read(folder / "events.jsonl"))
    rows = {one.step: one.values["rows"] for one in record if one.kind is Kind.PROGRESS}
    assert sum(rows.values()) == 16 * sum(batches)


def test_threads_learn_each_batch_once_and_go_on_from_a_checkpoint(trained: Trained) -> None:
    every = "checkpoint.every=10"
    folder = trained("threads", *HOGWILD, "train.steps=20", every)
    assert_all_learned_once(folder, 20)
    assert_moved(folder, 10, 20)
    told = summary(folder)
    pushes = [one["pushes"] for one in told["sync"]["staleness"]["by_trainer"].values()]
    assert pushes == [2 * count for count in progress(folder, 20)["batches"]]  # of both stages
    assert 1.0 < told["sync"]["staleness"]["mean"] < 2 * THREADS
    for role in told["roles"].values():
        assert role["threads"] == (THREADS if role["role"].startswith("worker") else 1)
        assert 0 < role["thread_cpu_seconds"] <= role["cpu_seconds"] + 0.01
    assert 0.05 < told["compression"]["gradient_density"] < 0.2

    resumed = trained(
        "resumed", *HOGWILD, "train.steps=40", every, f"checkpoint.resume={checkpoint(folder, 20)}"
    )
    assert sum(progress(resumed, 40)["batches"]) == 80
    alone = trained("alone", *HOGWILD, IN_PROCESS, "parallel.threads=1", "train.steps=40")
    loss, plain = summary(resumed)["test"]["loss"], summary(alone)["test"]["loss"]
    assert loss == pytest.approx(plain, rel=0.03)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_all_threads(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", *HOGWILD, "train.steps=400", "optimizer.lr=1e18")
    assert code == ExitCode.DIVERGED
    assert "is not finite" in capsys.readouterr().err
    assert summary(folder)["status"] == "diverged"
    assert not any(psutil.pid_exists(pid) for pid in pids(folder).values())
