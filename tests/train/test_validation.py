"""Rows with a part to validate: it decides while a run trains, and the test part is for the end."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from world_runs import assert_same, checkpoint, summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.train.progress import Plan, Progress
from dlrm_hybrid.types import ScoredPart

ROWS = 1_500
SCHEMA = """
label: bought
dense: [{name: price}]
categorical: [{name: shop}, {name: city}]
split: {by: fraction, validation: 0.2, test: 0.3, seed: 1}
"""
HYBRID = ("parallel=hybrid", "parallel.trainers=2", "network.patience_seconds=30")
IN_PROCESS = "parallel.world=in_process"
APART = ("sync=async", "embedding=served", "parallel.table_servers=1", "parallel.elastic=true")
VALIDATION, TEST = ScoredPart.VALIDATION, ScoredPart.TEST
Train = Callable[..., tuple[int, Path]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    shops = rng.integers(0, 9, ROWS)
    columns = {
        "bought": (rng.random(ROWS) < np.where(shops % 2, 0.7, 0.3)).astype(np.int8),
        "price": rng.random(ROWS),
        "shop": [f"shop {one}" for one in shops],
        "city": [f"city {one}" for one in rng.integers(0, 50, ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    (folder / "mine.yaml").write_text(SCHEMA)
    rows = ("data=table", f"data.schema={folder / 'mine.yaml'}", f"data.raw={folder}/rows.parquet")
    return (*rows, f"data.prepared={folder / 'rows'}", "model=dlrm_small", "train.batch_size=16")


@pytest.fixture
def train(table: tuple[str, ...], tmp_path: Path) -> Train:
    def train_here(name: str, *options: str) -> tuple[int, Path]:
        folder = tmp_path / name
        due = ("train.steps=20", "train.evaluate_every=8", "checkpoint.every=8")
        base = (*table, *due, "checkpoint.keep=9", "telemetry.tensorboard=false")
        return run(["dlrm_hybrid", "train", *base, f"hydra.run.dir={folder}", *options]), folder

    return train_here


def evaluated(folder: Path) -> list[tuple[int, str, float]]:
    found = events.read(folder / "events.jsonl")
    return [
        (one.step, one.values["part"], one.values["log_loss"])
        for one in found
        if one.kind is Kind.EVALUATED
    ]


def steps_and_parts(folder: Path) -> list[tuple[int, str]]:
    return [(step, part) for step, part, _ in evaluated(folder)]


EXPECTED = [(8, "validation"), (16, "validation"), (20, "validation"), (20, "test")]


def score(folder: Path, step: int) -> dict[str, object] | None:
    return json.loads((checkpoint(folder, step) / "manifest.json").read_text())["score"]


def test_processes_score_what_one_process_does(train: Train) -> None:
    code, processes = train("processes", *HYBRID)
    assert code == 0
    code, alone = train("alone", *HYBRID, IN_PROCESS)
    assert code == 0
    assert evaluated(processes) == evaluated(alone)
    assert steps_and_parts(alone) == EXPECTED
    for part in ("validation", "test"):
        assert summary(processes)[part] == summary(alone)[part]
    losses = {step: loss for step, part, loss in evaluated(alone) if part == "validation"}
    wanted = {"part": "validation", "monitor": "log_loss"}
    assert [score(processes, step) for step in losses] == [
        {**wanted, "value": loss} for loss in losses.values()
    ]


def test_trainers_that_do_not_wait_for_each_other_score_both_parts_too(train: Train) -> None:
    code, folder = train("apart", *HYBRID, *APART)
    assert code == 0
    assert steps_and_parts(folder) == EXPECTED
    code, recorded = train("record", *HYBRID, *APART[:3])
    assert code == 0
    assert steps_and_parts(recorded) == EXPECTED


def test_a_signal_between_the_last_two_scores(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, unbroken = train("unbroken")
    assert code == 0
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:testing_rank")
    code, folder = train("stopped")
    assert code == 75
    assert steps_and_parts(folder) == EXPECTED[:3]
    assert train("stopped", "checkpoint.resume=auto")[0] == 0
    assert evaluated(folder) == evaluated(unbroken)
    assert_same(folder, unbroken, 20)
    facts = [
        json.loads((checkpoint(one, 20) / "manifest.json").read_text())["progress"]
        for one in (folder, unbroken)
    ]
    assert facts[0] == facts[1]
    assert (facts[0]["evaluated_step"], facts[0]["tested_step"]) == (20, 20)


@pytest.mark.parametrize("monitor", ["auc", "log_loss"])
def test_the_best_is_that_of_the_monitored_score(monitor: str, train: Train) -> None:
    noisy = ("train.evaluate_every=2", "checkpoint.every=2", "checkpoint.keep=99")
    code, folder = train("run", *noisy, "optimizer.lr=2.0", f"train.monitor={monitor}")
    assert code == 0
    found = {
        one.step: one.values["auc" if monitor == "auc" else "log_loss"]
        for one in events.read(folder / "events.jsonl")
        if one.kind is Kind.EVALUATED and one.values["part"] == "validation"
    }
    wanted = max(found.values()) if monitor == "auc" else min(found.values())
    best = (folder / "checkpoints" / "best").read_text().strip()
    assert found[int(best.removeprefix("step_"))] == wanted


def plan(*parts: ScoredPart, every: int = 4) -> Plan:
    return Plan(
        steps=10,
        samples_per_step=1,
        report_every=0,
        evaluate_every=every,
        checkpoint_every=0,
        checkpoint_minutes=0.0,
        parts=parts,
    )


def test_which_parts_are_due() -> None:
    both = plan(VALIDATION, TEST)
    assert both.evaluations(Progress(step=3), at_end=False) == ()
    assert both.evaluations(Progress(step=4), at_end=False) == (VALIDATION,)
    assert both.evaluations(Progress(step=4, evaluated_step=4), at_end=False) == ()
    assert both.evaluations(Progress(step=10), at_end=True) == (VALIDATION, TEST)
    assert both.evaluations(Progress(step=10, evaluated_step=10), at_end=True) == (TEST,)
    done = Progress(step=10, evaluated_step=10, tested_step=10)
    assert both.evaluations(done, at_end=True) == ()
    assert plan(VALIDATION, TEST, every=0).evaluations(Progress(step=4), at_end=False) == ()
    for part in ScoredPart:
        assert plan(part).evaluations(Progress(step=8), at_end=False) == (part,)
        assert plan(part).evaluations(Progress(step=10), at_end=True) == (part,)
        assert plan(part).evaluations(Progress(step=10, evaluated_step=10), at_end=True) == ()
