"""Worlds that go on without a trainer that dies, and take it up again."""

from pathlib import Path

import pytest
from elastic_runs import Fault, assert_all_learned, reached, run
from world_runs import Train

from dlrm_hybrid.telemetry.events import Kind


def test_others_go_on_without_a_killed_trainer(train: Train, tmp_path: Path) -> None:
    kills = [Fault("worker-1.1", reached(20))]
    folder, told = run(train, tmp_path, kills, "train.steps=300")
    assert_all_learned(folder, told, 1)
    times = [event.time_seconds for event in told if event.kind is Kind.PROGRESS]
    assert max(after - before for before, after in zip(times[3:], times[4:], strict=False)) < 1.5


@pytest.mark.slow
def test_a_trainer_may_be_killed_twice(train: Train, tmp_path: Path) -> None:
    kills = [Fault("worker-0.0", reached(20)), Fault("worker-0.0", reached(30))]
    folder, told = run(train, tmp_path, kills, "train.steps=300")
    assert_all_learned(folder, told, 2)


@pytest.mark.parametrize("role", ["worker-0.0", pytest.param("worker-2.1", marks=pytest.mark.slow)])
def test_a_trainer_killed_while_evaluating(role: str, train: Train, tmp_path: Path) -> None:
    kills = [Fault(role, reached(50))]
    options = ("train.steps=100", "train.evaluate_every=50", "evaluate.batch_size=16")
    folder, told = run(train, tmp_path, kills, *options)
    assert_all_learned(folder, told, 1)
    assert [one.step for one in told if one.kind is Kind.EVALUATED] == [50, 100]


def test_a_trainer_killed_while_a_checkpoint_is_saved(train: Train, tmp_path: Path) -> None:
    def saving(folder: Path) -> bool:
        return bool(list((folder / "checkpoints").glob("*partial*"))) and reached(20)(folder)

    options = ("train.steps=200", "checkpoint.every=30", "gradient=dct", "gradient.sparsity=0.9")
    folder, told = run(train, tmp_path, [Fault("worker-2.0", saving)], *options)
    assert_all_learned(folder, told, 1)
    saved = [one.step for one in told if one.kind is Kind.SAVED]
    assert saved == [30, 60, 90, 120, 150, 180, 200]
