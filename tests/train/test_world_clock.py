"""No deadline goes by the clock on the wall, which somebody may set while a run goes on."""

from pathlib import Path

import jumping_clock
import pytest
from world_runs import Trained, assert_same, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events

STEPS = 20
WORLD = (
    *("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[bottom.1]", "telemetry.every=1"),
    *(f"train.steps={STEPS}", "checkpoint.every=7", "train.batch_size=16"),
)


@pytest.mark.slow
def test_a_clock_that_jumps_by_a_day_changes_nothing(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained("whole", *WORLD, "parallel.world=in_process")
    monkeypatch.setattr(training, "TRAIN_RANK", jumping_clock.ENTRY)
    folder = trained("jumping", *WORLD)
    assert summary(folder)["restarts"] == 0
    assert_same(folder, whole, STEPS)
    asked = [int(path.read_text()) for path in tmp_path.glob("jumping.asked-*")]
    assert len(asked) == 5
    assert max(asked) > STEPS


@pytest.mark.parametrize(
    ("cut", "saved"),
    [("top.1", [0, 10, 20]), pytest.param("bottom.1", [20], marks=pytest.mark.slow)],
)
def test_the_leaders_clock_decides_when_all_save(
    cut: str, saved: list[int], trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cut after `top.1` the first worker leads, with one after `bottom.1` the second."""
    monkeypatch.setattr(training, "TRAIN_RANK", "jumping_clock:hasty_world_rank")
    one = ("parallel.trainers=1", f"parallel.cuts=[{cut}]", "checkpoint.every=0")
    folder = trained("hasty", *WORLD, *one, "telemetry.every=100", "checkpoint.keep=9")
    found = events.read(folder / "events.jsonl")
    assert [event.step for event in found if event.kind is events.Kind.SAVED] == saved
