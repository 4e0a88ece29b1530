"""Checkpoints with batches in flight, of runs with `schedule=dsp`."""

import pytest
from saved_tensors import saved_groups
from world_runs import Trained, checkpoint, summary

STEPS = 16
STALE = (
    *("parallel=hybrid", "parallel.servers=2", "parallel.world=in_process", "optimizer.lr=0.2"),
    *(f"train.steps={STEPS}", "schedule=dsp", "gradient=dct", "activation=dct"),
    *("activation.sparsity=0.5", "train.evaluate_every=8"),
    *("checkpoint.every=5", "checkpoint.keep=9"),
)


def test_what_is_in_flight_is_dropped_with_its_schedule(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = trained("unbroken", *STALE)
    assert all("flight" in saved_groups(checkpoint(unbroken, step)) for step in (5, 10, 15))
    assert "flight" not in saved_groups(checkpoint(unbroken, STEPS))
    resume = f"checkpoint.resume={checkpoint(unbroken, 5)}"
    other = trained("other", *STALE, "schedule.staleness=[3,1,0]", resume)
    assert summary(unbroken)["samples"] == summary(other)["samples"] == STEPS * 2 * 64
    begun = "go on; residuals and thresholds, batches in flight begin anew"
    assert begun in " ".join(capsys.readouterr().out.split())
