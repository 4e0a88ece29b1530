"""Worlds that go on without a trainer that dies, and take it up again."""

from pathlib import Path

import pytest
import world_faults
from elastic_runs import ELASTIC, Fault, assert_all_learned, reached, run
from world_runs import (
    Train,
    Trained,
    assert_moved,
    assert_same,
    checkpoint,
    largest_difference,
    summary,
    tensors,
)

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE


def test_others_go_on_without_a_killed_trainer(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes in a step of its own, so however slow the machine is it is in the middle of it."""
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    world_faults.plan(tmp_path / "run", world_faults.Fault(rank=3, step=10))
    folder, told = run(train, tmp_path, [], "train.steps=40")
    assert world_faults.planned(folder) == []
    assert_all_learned(folder, told, 1)


@pytest.mark.slow
def test_others_go_on_without_a_killed_trainer_of_threads(train: Train, tmp_path: Path) -> None:
    kills = [Fault("worker-1.1", reached(20)), Fault("worker-0.0", reached(30))]
    folder, told = run(train, tmp_path, kills, "train.steps=400", "parallel.threads=2")
    assert_all_learned(folder, told, 2, threads=2)


@pytest.mark.slow
def test_a_trainer_may_be_killed_twice(train: Train, tmp_path: Path) -> None:
    kills = [Fault("worker-0.0", reached(20)), Fault("worker-0.0", reached(30))]
    folder, told = run(train, tmp_path, kills, "train.steps=300")
    assert_all_learned(folder, told, 2)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker-0.0", "worker-2.1"])
def test_a_trainer_killed_while_evaluating(role: str, train: Train, tmp_path: Path) -> None:
    kills = [Fault(role, reached(50))]
    options = ("train.steps=100", "train.evaluate_every=50", "evaluate.batch_size=16")
    folder, told = run(train, tmp_path, kills, *options)
    assert_all_learned(folder, told, 1)
    assert [one.step for one in told if one.kind is Kind.EVALUATED] == [50, 100]


@pytest.mark.slow
def test_a_trainer_killed_while_a_checkpoint_is_saved(train: Train, tmp_path: Path) -> None:
    def saving(folder: Path) -> bool:
        return bool(list((folder / "checkpoints").glob("*partial*"))) and reached(20)(folder)

    options = ("train.steps=200", "checkpoint.every=30", "gradient=dct", "gradient.density=0.1")
    folder, told = run(train, tmp_path, [Fault("worker-2.0", saving)], *options)
    assert_all_learned(folder, told, 1)
    saved = [one.step for one in told if one.kind is Kind.SAVED]
    assert saved == [30, 60, 90, 120, 150, 180, 200]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["sync=sync", "sync=async"])
def test_a_trainer_that_comes_again_is_sent_tables_of_levels(
    sync: str, train: Train, tmp_path: Path
) -> None:
    kills = [Fault("worker-1.1", reached(20)), Fault("worker-1.0", reached(60))]
    options = (sync, "gradient=dct", "gradient.density=0.1", "gradient.precision=levels")
    options = (*options, "pull.precision=levels", "train.steps=300")
    folder, told = run(train, tmp_path, kills, *options)
    assert_all_learned(folder, told, 2)


@pytest.mark.slow
def test_in_rounds_others_go_on_and_the_killed_trainer_comes_again(
    train: Train, tmp_path: Path
) -> None:
    kills = [Fault("worker-1.1", reached(20))]
    options = ("sync=sync", "train.steps=300", "gradient=dct", "gradient.density=0.1")
    folder, told = run(train, tmp_path, kills, *options)
    assert_all_learned(folder, told, 1)
    batches = [event.values["batches"] for event in told if event.kind is Kind.PROGRESS]
    first, second, third = batches[-1]
    # It has missed some turns; in the end, as before, it takes as many as the others.
    assert second < first and abs(first - third) <= 1
    gained = [now - before for before, now in zip(batches[-4], batches[-1], strict=True)]
    assert max(gained) - min(gained) <= 2 * MOST_AT_ONCE and min(gained) > 0


@pytest.mark.slow
@pytest.mark.parametrize("roles", [["worker-0.0", "worker-0.0"], ["worker-0.1", "worker-2.0"]])
def test_in_rounds_several_may_be_killed(roles: list[str], train: Train, tmp_path: Path) -> None:
    kills = [Fault(role, reached(20 + 10 * number)) for number, role in enumerate(roles)]
    options = ("sync=sync", "train.steps=300", "train.evaluate_every=100", "embedding.staleness=2")
    folder, told = run(train, tmp_path, kills, *options)
    assert_all_learned(folder, told, 2)


def test_while_nobody_dies_dense_weights_are_those_of_lock_step(trained: Trained) -> None:
    """Rows that a rate of nearly nothing does not move are the same in whatever order."""
    options = (*ELASTIC, "sync=sync", "parallel.trainers=2", "train.steps=20", "embedding.lr=1e-35")
    options = (*options, "checkpoint.every=10", "gradient=dct", "gradient.density=0.1")
    elastic = trained("elastic", *options)
    plain = ("parallel.elastic=false", "parallel.world=in_process")
    lockstep = trained("lockstep", *options, *plain)
    assert_same(elastic, lockstep, 20)
    first, last = tensors(elastic, 10), tensors(elastic, 20)
    assert all(largest_difference(first, last, part) >= 1e-3 for part in ("bottom", "top"))
    assert summary(elastic)["test"] == summary(lockstep)["test"]


@pytest.mark.slow
@pytest.mark.parametrize("elastic", ["true", "false"])
def test_one_trainer_in_rounds_learns_the_bits_of_lock_step(elastic: str, trained: Trained) -> None:
    options = (
        *ELASTIC,
        "sync=sync",
        "parallel.trainers=1",
        "train.steps=60",
        "checkpoint.every=30",
    )
    rounds = trained("rounds", *options)
    plain = ("parallel.elastic=false", "parallel.world=in_process")
    lockstep = trained("lockstep", *options, *plain)
    assert_same(rounds, lockstep, 60)
    # Either goes on from what the other has saved.
    resumed = (f"checkpoint.resume={checkpoint(rounds, 30)}", f"parallel.elastic={elastic}")
    again = trained("again", *options, *resumed)
    assert_same(again, lockstep, 60)
    assert_moved(rounds, 30, 60)
