"""Runs with `schedule=dsp`: worlds of processes and of one, checkpoints with batches in flight."""

from pathlib import Path

import numpy as np
import pytest
from saved_tensors import saved_groups
from world_runs import (
    PlainRuns,
    Train,
    assert_same,
    assert_same_state,
    checkpoint,
    summary,
    tensors,
)

STEPS = 40
SAVED = (13, 26, 39)
IN_PROCESS = "parallel.world=in_process"
SERVERS = ("parallel=hybrid", "parallel.servers=2", "optimizer.lr=0.2")
STALE = (
    *(*SERVERS, f"train.steps={STEPS}", "schedule=dsp", "gradient=dct", "activation=dct"),
    *("activation.sparsity=0.5", "train.evaluate_every=20"),
    *("checkpoint.every=13", "checkpoint.keep=9"),
)


@pytest.fixture(scope="module")
def unbroken(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process, two trainers, with checkpoints on its way."""
    return PlainRuns(small_rows, tmp_path_factory.mktemp("stale"))(*STALE, IN_PROCESS)


def test_a_run_goes_on_with_the_batches_in_flight(train: Train, unbroken: Path) -> None:
    code, resumed = train("resumed", *STALE, IN_PROCESS, _from(unbroken, 13))
    assert code == 0
    for step in (*SAVED[1:], STEPS):
        assert_same_state(unbroken, resumed, step)
    first, last = tensors(unbroken, 13), tensors(unbroken, STEPS)
    for name in ("bottom.1.weight", "bottom.3.weight", "top.1.weight", "embedding.3.weight"):
        assert np.abs(last[name] - first[name]).max() > 1e-4, name
    assert all("flight" in saved_groups(checkpoint(unbroken, step)) for step in SAVED)
    assert "flight" not in saved_groups(checkpoint(unbroken, STEPS))
    assert summary(unbroken)["samples"] == summary(resumed)["samples"] == STEPS * 2 * 64


def test_processes_do_what_one_process_does(train: Train, unbroken: Path) -> None:
    code, many = train("many", *STALE, _from(unbroken, 13))
    assert code == 0
    for step in (*SAVED[1:], STEPS):
        assert_same_state(unbroken, many, step)
    assert summary(unbroken)["test"] == summary(many)["test"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("sync=bounded", "sync.staleness=2"), ("embedding.deduplicate=true",)], ids=str
)
def test_processes_save_what_one_process_saves(train: Train, options: tuple[str, ...]) -> None:
    code, many = train("many", *STALE, *options)
    assert code == 0
    code, one = train("one", *STALE, *options, IN_PROCESS)
    assert code == 0
    for step in (*SAVED, STEPS):
        assert_same_state(one, many, step)
    code, resumed = train("resumed", *STALE, *options, _from(many, 26))
    assert code == 0
    assert_same_state(resumed, many, STEPS)


def test_what_is_in_flight_belongs_to_its_schedule(
    train: Train, unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "schedule.staleness=[3,1,0]"
    code, _ = train("other", *STALE, IN_PROCESS, other, _from(unbroken, 13))
    assert code == 3
    assert (
        "schedule.staleness = [3, 1, 0]: the checkpoint was made with [4, 2, 0], and holds batches "
        "in flight; that at the end of its run holds none"
    ) in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_behind_the_end_of_a_run_any_schedule_may_go_on(train: Train, unbroken: Path) -> None:
    more = (*SERVERS, IN_PROCESS, "train.steps=46", _from(unbroken, STEPS))
    ends = [train(name, *more, f"schedule={name}") for name in ("sequential", "gpipe", "dsp")]
    assert [code for code, _ in ends] == [0, 0, 0]
    assert_same(ends[0][1], ends[1][1], 46)
    before, after = tensors(unbroken, STEPS), tensors(ends[2][1], 46)
    assert all(np.abs(after[name] - one).max() > 0 for name, one in before.items())


def _from(folder: Path, step: int) -> str:
    return f"checkpoint.resume={checkpoint(folder, step)}"
