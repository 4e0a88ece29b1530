"""Runs that end where their scores get no better."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_runs import Trained, assert_same, assert_same_state, checkpoint, summary, tensors

from dlrm_hybrid.bounds import Monitor
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.train.patience import Course, Patience, monitored
from dlrm_hybrid.types import ScoredPart

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
    patience = Patience(ends_after=3, lowers_after=2, min_delta=min_delta)
    course, best, since = Course(), found[0], 0
    for number, score in enumerate(found):
        gain = best - score if monitor == "log_loss" else score - best
        better = number == 0 or gain > min_delta
        best, since = (score, 0) if better else (best, since + 1)
        one = scores(score, 0.0) if monitor == "log_loss" else scores(0.0, score)
        told = monitored(one, ScoredPart.TEST, monitor)
        course = patience.after(course, told, 5 * number)
        assert (course.best, course.since_best, course.step) == (best, since, 5 * number)
        assert patience.ends(course, 5 * number + 1) == (since >= 3)
        assert not patience.ends(course, 5 * number)
        assert not patience.lowers(course, 5 * number)
        if lowers := patience.lowers(course, 5 * number + 1):
            course = course.lowered_at(5 * number + 1)
        assert lowers == (since > 0 and since % 2 == 0)


def test_no_auc_is_no_better_one():
    patience = Patience(ends_after=2, lowers_after=None, min_delta=0.0)
    before = Course(best=0.7, since_best=1, since_lowered=1)
    none = monitored(scores(0.1, None), ScoredPart.TEST, "auc")
    assert patience.after(before, none, 9) == Course(0.7, 2, 2, 9)
    assert patience.after(Course(), none, 9) == Course(None, 1, 1, 9)
    assert not patience.lowers(Course(None, 9, 9, 1), 5)


def ended(folder: Path) -> None:
    assert summary(folder)["status"] == "complete"
    assert (summary(folder)["steps"], summary(folder)["steps_planned"]) == (END, 40)
    facts = json.loads((checkpoint(folder, END) / "manifest.json").read_text())
    assert facts["progress"]["course"]["since_best"] == 2


@pytest.mark.parametrize("world", [(), WORLD], ids=["one", "ranks"])
def test_a_run_ends_one_step_after_the_last_evaluation_it_waits_for(
    world: tuple[str, ...], trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("early", *NEVER, *world)
    ended(folder)
    assert f"ended after {END} of 40 steps: scores got no better" in capsys.readouterr().out


def broken_at(step: int, last: int, unbroken: Path) -> Path:
    """A copy of a run as if it had been killed after this checkpoint."""
    broken = unbroken.with_name("broken")
    shutil.copytree(unbroken, broken)
    (broken / "summary.json").unlink()
    (broken / "checkpoints" / "latest").unlink()
    for later in range(step + 1, last + 1):
        shutil.rmtree(checkpoint(broken, later), ignore_errors=True)
    return broken


@pytest.mark.parametrize(
    "step", [15, *(pytest.param(one, marks=pytest.mark.slow) for one in (12, END))]
)
def test_a_broken_run_ends_where_an_unbroken_one_does(step: int, trained: Trained) -> None:
    options = (*NEVER, *WORLD, IN_PROCESS, "checkpoint.every=3", "checkpoint.keep=9")
    unbroken = trained("unbroken", *options)
    broken = broken_at(step, END, unbroken)
    _ = trained("broken", *options, "checkpoint.resume=auto")
    ended(broken)
    assert_same_state(unbroken, broken, END)


def test_a_new_run_from_it_waits_anew(trained: Trained) -> None:
    first = trained("first", *NEVER)
    second = trained("second", *NEVER, f"checkpoint.resume={first}")
    assert summary(second)["steps"] == END + 15  # evaluations after 20, 25 and 30 steps


FALLING = (*NEVER[:2], "optimizer.schedule=plateau", "optimizer.plateau_factor=0.5")
FALLING += ("optimizer.plateau_patience=2", "train.steps=40", "telemetry.every=1")
LOWERED = (16, 26, 36)  # after evaluations at 10 and 15, 20 and 25, 30 and 35


def rates(folder: Path) -> dict[int, float]:
    found = events.read(folder / "events.jsonl")
    return {one.step: one.values["lr"] for one in found if one.kind is Kind.PROGRESS}


@pytest.mark.parametrize(
    "world",
    [
        (),
        pytest.param((*WORLD, IN_PROCESS), marks=pytest.mark.slow),
        pytest.param(
            ("parallel=hybrid", "parallel.trainers=1", "parallel.servers=0"), marks=pytest.mark.slow
        ),
    ],
    ids=["one", "all", "ranks"],
)
def test_rates_fall_one_step_after_evaluations(world: tuple[str, ...], trained: Trained) -> None:
    folder = trained("falls", *FALLING, "optimizer.lr=0.2", *world)
    falls = {step: sum(first < step for first in LOWERED) for step in range(1, 41)}
    assert rates(folder) == {step: 0.2 * 0.5**times for step, times in falls.items()}
    constant = trained("constant", *world, "train.steps=40", "optimizer.lr=0.2")
    for name in ("top.1.weight", "embedding.3.weight"):
        assert not np.array_equal(tensors(constant, 40)[name], tensors(folder, 40)[name])


def test_falling_rates_are_those_of_one_process_on_servers_too(trained: Trained) -> None:
    short = (*FALLING, "train.steps=20")
    plain = trained("plain", *short)
    world = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.2]", IN_PROCESS)
    folder = trained("world", *short, *world, "parallel.servers=2")
    assert_same(plain, folder, 20)


@pytest.mark.slow
@pytest.mark.parametrize("step", [15, 21])
def test_rates_of_a_broken_run_fall_as_those_of_an_unbroken_one(
    step: int, trained: Trained
) -> None:
    options = (*FALLING, *WORLD, IN_PROCESS, "checkpoint.every=3", "checkpoint.keep=20")
    unbroken = trained("unbroken", *options)
    broken = broken_at(step, 40, unbroken)
    trained("broken", *options, "checkpoint.resume=auto")
    assert_same_state(unbroken, broken, 40)
    assert rates(broken) == rates(unbroken)


@pytest.mark.parametrize(
    "world",
    [
        ("parallel.servers=2", "embedding=served", "parallel.table_servers=2"),
        pytest.param(
            (
                *("parallel.servers=1", "sync=bounded", "sync.staleness=2", "embedding=served"),
                *("parallel.table_servers=1", "embedding.staleness=3"),
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sync", "bounded"],
)
def test_rates_of_servers_in_processes_fall_as_those_of_one_process(
    world: tuple[str, ...], trained: Trained
) -> None:
    short = ("train.steps=8", "checkpoint.every=3", "checkpoint.keep=20")
    often = ("train.evaluate_every=2", "optimizer.plateau_patience=1")
    options = (*FALLING, *WORLD, *world, *short, *often)
    processes = trained("unbroken", *options)
    alone = trained("alone", *options, IN_PROCESS)
    assert_same_state(processes, alone, 8)
    assert rates(processes) == rates(alone)
    assert len(set(rates(processes).values())) == 3


def test_scores_that_get_better_end_nothing(trained: Trained) -> None:
    better = ("train.evaluate_every=20", "train.patience=1", "train.steps=80", "optimizer.lr=0.05")
    folder = trained("on", *better)
    assert summary(folder)["steps"] == 80
