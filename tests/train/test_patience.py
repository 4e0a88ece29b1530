"""Runs that end where their scores get no better."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_runs import Train, assert_same_state, checkpoint, summary

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.train.patience import Course, Monitor, Patience
from dlrm_hybrid.types import ConfigError

# No score is better by 1: the first of those after 5, 10, 15 steps stays the best.
NEVER = ("train.evaluate_every=5", "train.min_delta=1.0", "train.patience=2", "train.steps=40")
WORLD = ("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[bottom.2]", "gradient=dct")
IN_PROCESS = "parallel.world=in_process"
END = 16


def scores(loss: float, auc: float | None) -> BinaryScores:
    return BinaryScores(
        rows=9,
        log_loss=loss,
        accuracy=0.5,
        auc=auc,
        normalized_entropy=1.0,
        base_rate=0.3,
        calibration=1.0,
    )


@given(
    found=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    min_delta=st.sampled_from([0.0, 0.05]),
    monitor=st.sampled_from(["log_loss", "auc"]),
)
def test_a_course_counts_what_came_since_the_best(
    found: list[float], min_delta: float, monitor: Monitor
):
    patience = Patience(evaluations=3, min_delta=min_delta, monitor=monitor)
    course, best, since = Course(), found[0], 0
    for number, score in enumerate(found):
        gain = best - score if monitor == "log_loss" else score - best
        better = number == 0 or gain > min_delta
        best, since = (score, 0) if better else (best, since + 1)
        one = scores(score, 0.0) if monitor == "log_loss" else scores(0.0, score)
        course = patience.after(course, one)
        assert course == Course(best, since)
        assert patience.is_over(course) == (since >= 3)


def test_no_auc_is_no_better_one():
    patience = Patience(evaluations=2, min_delta=0.0, monitor="auc")
    assert patience.after(Course(0.7, 1), scores(0.1, None)) == Course(0.7, 2)
    assert patience.after(Course(), scores(0.1, None)) == Course(None, 1)


def ended(folder: Path) -> None:
    assert summary(folder)["status"] == "complete"
    assert (summary(folder)["steps"], summary(folder)["steps_planned"]) == (END, 40)
    facts = json.loads((checkpoint(folder, END) / "manifest.json").read_text())
    assert facts["progress"]["course"]["since_best"] == 2


@pytest.mark.parametrize("world", [(), (*WORLD, IN_PROCESS), WORLD], ids=["one", "all", "ranks"])
def test_a_run_ends_one_step_after_the_last_evaluation_it_waits_for(
    world: tuple[str, ...], train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("early", *NEVER, *world)
    assert code == 0
    ended(folder)
    assert f"ended after {END} of 40 steps: scores got no better" in capsys.readouterr().out


@pytest.mark.parametrize("step", [13, END])
def test_a_broken_run_ends_where_an_unbroken_one_does(step: int, train: Train) -> None:
    options = (*NEVER, *WORLD, IN_PROCESS, "checkpoint.every=13", "checkpoint.keep=9")
    _, unbroken = train("unbroken", *options)
    broken = unbroken.with_name("broken")
    shutil.copytree(unbroken, broken)
    (broken / "summary.json").unlink()
    (broken / "checkpoints" / "latest").unlink()
    if step < END:
        shutil.rmtree(checkpoint(broken, END))
    code, _ = train("broken", *options, "checkpoint.resume=auto")
    assert code == 0
    ended(broken)
    assert_same_state(unbroken, broken, END)


def test_a_new_run_from_it_waits_anew(train: Train) -> None:
    _, first = train("first", *NEVER)
    code, second = train("second", *NEVER, f"checkpoint.resume={first}")
    assert code == 0
    assert summary(second)["steps"] == END + 15  # evaluations after 20, 25 and 30 steps


def test_scores_that_get_better_end_nothing(train: Train) -> None:
    better = ("train.evaluate_every=20", "train.patience=1", "train.steps=80", "optimizer.lr=0.05")
    code, folder = train("on", *better)
    assert code == 0
    assert summary(folder)["steps"] == 80


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("train.patience=2", "train.patience = 2: counts evaluations; needs train.evaluate_every"),
        ("train.min_delta=0.1", "train.min_delta = 0.1: only applies to train.patience"),
        ("train.monitor=auc", "train.monitor = 'auc': only applies to train.patience"),
        (
            "train.patience=2 train.evaluate_every=9 parallel=hybrid sync=async embedding=served "
            "parallel.table_servers=1",
            "train.patience = 2: trainers that do not wait for others have no common end; needs",
        ),
        (
            "train.patience=2 train.evaluate_every=9 parallel=hybrid parallel.cuts=[bottom.2] "
            "schedule=dsp schedule.delays=[0,0] schedule.staleness=[1,0]",
            "train.patience = 2: schedule=dsp has batches in flight where evaluations end the run",
        ),
    ],
)
def test_faults_name_their_keys(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        values_of(overrides.split())
    assert message in str(raised.value)
