"""No deadline goes by the clock on the wall, which somebody may set while a run goes on."""

from pathlib import Path

import jumping_clock
import pytest
from world_runs import Train, assert_same, summary

import dlrm_hybrid.cli.train as cli_train

STEPS = 20
WORLD = (
    *("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[bottom.1]", "telemetry.every=1"),
    *(f"train.steps={STEPS}", "checkpoint.every=7", "train.batch_size=16"),
    "network.patience_seconds=60",
)


@pytest.mark.slow
def test_a_clock_that_jumps_by_a_day_changes_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, whole = train("whole", *WORLD, "parallel.world=in_process")
    assert code == 0
    monkeypatch.setattr(cli_train, "WORLD_RANK", jumping_clock.ENTRY)
    code, folder = train("jumping", *WORLD)
    assert code == 0
    assert summary(folder)["restarts"] == 0
    assert_same(folder, whole, STEPS)
    asked = [int(path.read_text()) for path in tmp_path.glob("jumping.asked-*")]
    assert len(asked) == 5
    assert max(asked) > STEPS
