"""Trainers that are told to go hand over what they have, and come again."""

import signal
from pathlib import Path

import pytest
from elastic_runs import Fault, assert_all_learned, reached, record, run
from world_runs import Train, assert_moved

from dlrm_hybrid.telemetry.events import Kind

COMPRESSED = ("gradient=dct", "gradient.density=0.1")


def leave(role: str, step: int) -> Fault:
    return Fault(role, reached(step), signal.SIGTERM)


def goings(folder: Path, role: str) -> tuple[int, int]:
    """How often a worker has left, and come again."""
    text = (folder / "log" / f"{role}.log").read_text()
    return text.count("leaves after SIGTERM"), text.count("goes on at batch")


def test_a_trainer_leaves_and_no_batch_is_given_out_again(train: Train, tmp_path: Path) -> None:
    options = ("train.steps=120", "checkpoint.every=60", *COMPRESSED)
    folder, told = run(train, tmp_path, [leave("worker-1.1", 20)], *options)
    assert assert_all_learned(folder, told, 0, left=1) == 0
    assert [goings(folder, f"worker-1.{stage}") for stage in (0, 1)] == [(1, 1), (1, 1)]
    assert_moved(folder, 60, 120)


@pytest.mark.slow
def test_a_trainer_that_is_told_to_go_before_it_has_begun_leaves(
    train: Train, tmp_path: Path
) -> None:
    begun = Fault("worker-1.0", lambda folder: bool(record(folder)), signal.SIGTERM)
    folder, told = run(train, tmp_path, [begun], "train.steps=60", *COMPRESSED)
    assert assert_all_learned(folder, told, 0, left=1) == 0


@pytest.mark.slow
def test_a_trainer_that_keeps_rows_leaves(train: Train, tmp_path: Path) -> None:
    cache = ("embedding.cache_rows=200", "embedding.cache_batches=8")
    options = ("train.steps=120", "checkpoint.every=60", *cache, *COMPRESSED)
    folder, told = run(train, tmp_path, [leave("worker-1.0", 20)], *options)
    assert assert_all_learned(folder, told, 0, left=1) == 0
    assert_moved(folder, 60, 120)


@pytest.mark.slow
def test_all_trainers_leave_one_after_the_other(train: Train, tmp_path: Path) -> None:
    leaves = [leave(f"worker-{trainer}.{trainer % 2}", 20) for trainer in (0, 1, 2)]
    folder, told = run(train, tmp_path, leaves, "train.steps=300", *COMPRESSED)
    assert assert_all_learned(folder, told, 0, left=3) == 0


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker-0.0", "worker-2.1"])
def test_a_trainer_leaves_an_evaluation(role: str, train: Train, tmp_path: Path) -> None:
    options = ("train.steps=100", "train.evaluate_every=50", "evaluate.batch_size=4", *COMPRESSED)
    folder, told = run(train, tmp_path, [leave(role, 50)], *options)
    assert assert_all_learned(folder, told, 0, left=1) == 0
    assert [one.step for one in told if one.kind is Kind.EVALUATED] == [50, 100]
