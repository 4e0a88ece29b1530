"""Checkpoints with batches in flight, of runs with `schedule=dsp`."""

from pathlib import Path

import numpy as np
import pytest
from saved_tensors import saved_groups
from world_runs import PlainRuns, Train, assert_same, checkpoint, summary, tensors

STEPS = 16
IN_PROCESS = "parallel.world=in_process"
SERVERS = ("parallel=hybrid", "parallel.servers=2", "optimizer.lr=0.2")
STALE = (
    *(*SERVERS, f"train.steps={STEPS}", "schedule=dsp", "gradient=dct", "activation=dct"),
    *("activation.sparsity=0.5", "train.evaluate_every=8"),
    *("checkpoint.every=5", "checkpoint.keep=9"),
)


@pytest.fixture(scope="module")
def unbroken(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process, two trainers, with checkpoints on its way."""
    return PlainRuns(small_rows, tmp_path_factory.mktemp("stale"))(*STALE, IN_PROCESS)


def test_what_is_in_flight_is_dropped_with_its_schedule(
    train: Train, unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all("flight" in saved_groups(checkpoint(unbroken, step)) for step in (5, 10, 15))
    assert "flight" not in saved_groups(checkpoint(unbroken, STEPS))
    assert summary(unbroken)["samples"] == STEPS * 2 * 64
    other = "schedule.staleness=[3,1,0]"
    code, folder = train("other", *STALE, IN_PROCESS, other, _from(unbroken, 5))
    assert code == 0
    assert summary(folder)["samples"] == STEPS * 2 * 64
    begun = "go on; residuals and thresholds, batches in flight begin anew"
    assert begun in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_behind_the_end_of_a_run_any_schedule_may_go_on(train: Train, unbroken: Path) -> None:
    more = (*SERVERS, IN_PROCESS, "train.steps=22", _from(unbroken, STEPS))
    ends = [train(name, *more, f"schedule={name}") for name in ("sequential", "gpipe", "dsp")]
    assert [code for code, _ in ends] == [0, 0, 0]
    assert_same(ends[0][1], ends[1][1], 22)
    before, after = tensors(unbroken, STEPS), tensors(ends[2][1], 22)
    assert all(np.abs(after[name] - one).max() > 0 for name, one in before.items())


def _from(folder: Path, step: int) -> str:
    return f"checkpoint.resume={checkpoint(folder, step)}"
