"""A training run as a function: its score, its evaluations on the way, and how it is stopped."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dlrm_hybrid
from dlrm_hybrid import objective
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.jobs.objective import _score
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, ExitCode, RunFailedError


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def starts(folder: Path) -> int:
    return (folder / "events.jsonl").read_text().count('"kind": "started"')


@pytest.mark.slow
def test_threads_may_train_at_one_time_and_a_complete_run_is_not_repeated(
    small_rows: list[str], tmp_path: Path
) -> None:
    seen: dict[int, list[tuple[int, float]]] = {0: [], 1: []}

    def score(seed: int) -> float:
        own = [f"train.seed={seed}", f"hydra.run.dir={tmp_path / str(seed)}"]
        return objective(
            [*small_rows, *own, "train.steps=20", "train.evaluate_every=8", "skip_completed=true"],
            report=lambda step, loss: seen[seed].append((step, loss)),
        )

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(score, (0, 1)))
    for seed in (0, 1):
        told = summary(tmp_path / str(seed))
        assert told["best"]["value"] == found[seed] <= told["test"]["loss"]
        # The last one ends the run: whether it was still seen is chance.
        assert [step for step, _ in seen[seed]][:2] == [8, 16]
        assert "20 steps of 64 samples" in (tmp_path / str(seed) / "output.log").read_text()
    assert found[0] != found[1]

    assert score(0) == found[0]
    assert starts(tmp_path / "0") == 1


@pytest.mark.slow
def test_what_report_raises_stops_the_run_with_a_checkpoint(
    small_rows: list[str], tmp_path: Path
) -> None:
    class PrunedError(Exception):
        pass

    def report(step: int, auc: float) -> None:
        assert 0 < auc < 1
        raise PrunedError(step)

    folder = tmp_path / "run"
    given = ["train.epochs=400", "train.evaluate_every=10", "train.monitor=auc"]
    given = [*small_rows, *given, "train.patience=1000", f"hydra.run.dir={folder}"]
    with pytest.raises(PrunedError):
        objective(given, report=report)
    told = summary(folder)
    assert told["status"] == "preempted"
    assert told["steps"] == told["steps_saved"] > 0
    assert f"checkpoint saved at step {told['steps']}" in (folder / "output.log").read_text()


@pytest.mark.slow
def test_a_run_without_a_score_says_why(small_rows: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunFailedError, match=r"run: step \d+: .*learning rate") as failed:
        objective([*small_rows, "optimizer.lr=1e18", f"hydra.run.dir={folder}"])
    assert failed.value.exit_code == ExitCode.DIVERGED
    assert summary(folder)["status"] == "diverged"


@pytest.mark.parametrize(
    ("best", "score"), [({"step": 8, "part": "test", "value": 0.49}, 0.49), (None, 0.52)]
)
def test_the_score_is_that_of_the_weights_that_predict_takes(
    best: Any, score: float, tmp_path: Path
) -> None:
    told = {"best": best, "test": {"loss": 0.52}}
    (tmp_path / "summary.json").write_text(json.dumps(told))
    values = compose.values_of([])
    assert _score(Request(validate(values), values, tmp_path, [])) == score


def test_all_faults_of_the_overrides_are_named_and_nothing_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError) as refused:
        objective(["train.steps=0", "optimizer.lrr=1", f"hydra.run.dir={folder}"])
    assert str(refused.value).startswith("configuration: 2 faults\n")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["sweep.jobs=2"], "sweep.jobs=2: only applies to a sweep"),
        (iter(["sweep.jobs=2"]), "sweep.jobs=2: only applies to a sweep"),
        ("train.steps=1", "overrides = train.steps=1: must be several, such as ['train.steps=1']"),
        ([1], "overrides: 1: must be a str"),
    ],
)
def test_what_train_would_not_take_is_refused(given: Any, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        objective(given)
    assert str(refused.value) == f"configuration: 1 fault\n  {fault}"


def test_it_is_a_public_name() -> None:
    assert "objective" in dir(dlrm_hybrid)
    assert dlrm_hybrid.objective is objective
