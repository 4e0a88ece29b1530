"""What is said of `schedule=dsp` is measured by scripts that run, and that find what is known."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import dsp
import dsp_gap
import harness
import numpy as np
import pytest
import slow_stages

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.parallel.schedule import Pipeline, sequential
from dlrm_hybrid.run.assembly.build import pipeline


def stages_of(*words: str) -> Pipeline:
    return pipeline(validate(values_of([*dsp.ALONE, *words])))


@pytest.mark.parametrize("schedule", dsp.SCHEDULES)
def test_all_schedules_that_are_measured_are_possible(schedule: str) -> None:
    for world in dsp.WORLDS.values():
        validate(values_of([*world, *dsp.SCHEDULES[schedule]]))


def test_slow_stages_cost_what_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_stages, "BATCHES", 400)
    in_turns = Pipeline.of(sequential, 3, 1)
    even = slow_stages.simulated(in_turns, 0)  # a batch of a second, and 4 ms of cold caches
    assert even == pytest.approx(1 / 3, rel=8e-3)
    # Each stage is slow in a third of the batches, and nobody works meanwhile.
    assert even / slow_stages.simulated(in_turns, 150) == pytest.approx(1.5, rel=0.05)
    short, long = (stages_of(*dsp.STALE[name]) for name in ("4,2,0", "10,5,0"))
    # A stage that computes forward twice is the slowest; the last one does not.
    assert slow_stages.simulated(short, 0) == pytest.approx(1 / 1.36, rel=8e-3)
    # Longer queues lose less; in lock-step nobody would go on while any stage is slow.
    in_step = 1 / (1.36 * (1 + 1.5 * (1 - (2 / 3) ** 3)))
    slow = [slow_stages.simulated(one, 150) for one in (short, long)]
    assert in_step < slow[0] < slow[1] < 1 / 1.36


def test_exact_gradients_are_those_of_a_run_without_staleness(small_rows: Sequence[str]) -> None:
    cuts = "parallel.cuts=[bottom.1,top.1]"
    still, moved = (
        dsp_gap.gaps(
            validate(values_of([*small_rows, *dsp_gap.TRAINED, cuts, *words, "train.steps=30"])), 3
        ).to_numpy()
        for words in (
            ("schedule=dsp", "schedule.delays=[0,0,0]", "schedule.staleness=[0,0,0]"),
            dsp.STALE["4,2,0"],
        )
    )
    assert still.shape == moved.shape == (10, 3)
    assert not still.any()
    # The first batch meets the weights of its forward everywhere; the last stage always does.
    assert not moved[0].any() and not moved[:, 2].any()
    assert (moved[1:, :2] > 1e-3).all() and np.isfinite(moved).all()


def run_here(argv: Sequence[str], **options: object) -> None:
    """What `subprocess.run` does with the program, without the imports of another process."""
    assert (*argv[:3],) == (sys.executable, "-m", "dlrm_hybrid")
    if code := run(argv[2:]):
        raise subprocess.CalledProcessError(code, argv)


def test_scores_stand_beside_those_of_the_sequential_run(
    tmp_path: Path, small_rows: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(run=run_here))
    words = (*small_rows, "parallel.cuts=[bottom.1,top.1]", "train.steps=30")
    rows = dsp.quality(tmp_path, [0], 10, words)
    assert [row["staleness"] for row in rows][:2] == ["sequential", "4,2,0, warm-up"]
    assert rows[0]["test, %"] == "+0.00"
    assert len({row["seed 0"] for row in rows}) == len(rows)
    assert dsp.quality(tmp_path, [0], 10, [*words, "no.such=key"]) == rows, "trained again"


def test_a_run_that_diverges_is_named_so(
    tmp_path: Path, train: Callable[..., tuple[int, Path]]
) -> None:
    words = (*dsp.ALONE, "parallel.world=in_process", "parallel.cuts=[bottom.1,top.1]")
    code, folder = train("run", *words, "optimizer.lr=1e18")
    assert code != 0
    assert dsp.scores(folder) is None
    row = dsp.quality_row("one", [None], [None], [0])
    assert row["seed 0"] == "diverged" and row["test, %"] is None
