"""Rows with a part to validate: it decides while a run trains, and the test part is for the end."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from patience import PATIENT
from world_runs import Train, assert_same, checkpoint, summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.predict.predictor import Predictor
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
HYBRID = ("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[]", PATIENT)
IN_PROCESS = "parallel.world=in_process"
APART = ("sync=async", "embedding=served", "parallel.table_servers=1", "parallel.elastic=true")
VALIDATION, TEST = ScoredPart.VALIDATION, ScoredPart.TEST


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


@pytest.mark.slow
def test_trainers_that_do_not_wait_for_each_other_score_both_parts_too(train: Train) -> None:
    code, folder = train("apart", *HYBRID, *APART)
    assert code == 0
    assert steps_and_parts(folder) == EXPECTED


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


def test_the_best_is_that_of_the_monitored_score(train: Train) -> None:
    noisy = ("train.evaluate_every=2", "checkpoint.every=2", "checkpoint.keep=99")
    code, folder = train("run", *noisy, "optimizer.lr=2.0", "train.monitor=auc")
    assert code == 0
    found = {
        one.step: one.values["auc"]
        for one in events.read(folder / "events.jsonl")
        if one.kind is Kind.EVALUATED and one.values["part"] == "validation"
    }
    losses = validated(folder)
    assert best_step(folder) != min(losses, key=losses.__getitem__)
    assert found[best_step(folder)] == max(found.values())


@pytest.mark.parametrize(("part", "clicks"), [("validation", 0), ("test", 1)])
def test_an_auc_of_rows_with_one_label_is_refused_before_the_first_step(
    part: str, clicks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.csv").write_text("bought,price,shop\n" + "1,0.5,a\n0,0.25,b\n" * 40)
    (tmp_path / "other.csv").write_text("bought,price,shop\n" + f"{clicks},0.5,a\n" * 7)
    (tmp_path / "last.csv").write_text("bought,price,shop\n" + "1,0.5,a\n0,0.25,b\n" * 5)
    tests = "test: [other.csv]" if part == "test" else "validation: [other.csv], test: [last.csv]"
    columns = "label: bought\ndense: [{name: price}]\ncategorical: [{name: shop}]\n"
    (tmp_path / "mine.yaml").write_text(f"{columns}split: {{by: file, {tests}}}\n")
    names = ["train", "other", *(["last"] if part == "validation" else [])]
    rows = f"data.raw=[{','.join(str(tmp_path / f'{name}.csv') for name in names)}]"
    given = ("data=table", f"data.schema={tmp_path / 'mine.yaml'}", rows, "model=dlrm_small")
    places = (f"data.prepared={tmp_path / 'rows'}", f"hydra.run.dir={tmp_path / 'run'}")
    argv = ["dlrm_hybrid", "train", *given, *places, "train.batch_size=16"]
    assert run([*argv, "train.monitor=auc"]) == 2
    assert (
        f"train.monitor = auc: of the 7 rows of the {part} part of {tmp_path / 'rows'} "
        f"{7 * clicks} are clicks"
    ) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run(argv) == 0


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("", r"ROWS was prepared without a column of groups \(group of data.schema\)"),
        ("group: shop\n", "no group of 'shop' in the test part of ROWS has rows of both labels"),
    ],
)
def test_a_gauc_without_groups_of_both_labels_is_refused_before_the_first_step(
    group: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text(
        "bought,price,shop\n" + "1,0.5,a\n0,0.25,b\n1,1,\n0,1,\n" * 40
    )
    columns = "label: bought\ndense: [{name: price}]\ncategorical: [{name: shop}]\n"
    split = "split: {by: fraction, test: 0.2}\n"
    (tmp_path / "mine.yaml").write_text(f"{columns}{group}{split}")
    given = ("data=table", f"data.schema={tmp_path}/mine.yaml", f"data.raw={tmp_path}/rows.csv")
    places = (f"data.prepared={tmp_path / 'rows'}", f"hydra.run.dir={tmp_path / 'run'}")
    argv = ["dlrm_hybrid", "train", *given, *places, "model=dlrm_small", "train.batch_size=16"]
    assert run([*argv, "train.monitor=gauc"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(
        f"train.monitor = gauc: {reason}".replace("ROWS", str(tmp_path / "rows")), told
    )
    assert not (tmp_path / "run").exists()


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


OUTPUT = "predict.output=FOLDER/scores.csv"
WORLDS = {
    "one process": (),
    "in process": (*HYBRID, IN_PROCESS),
    "processes": HYBRID,
    "stages": (*HYBRID, "parallel.trainers=1", "parallel.cuts=[bottom.2]"),
    "asynchronous": (*HYBRID, *APART),
    "batches in flight": (*HYBRID, IN_PROCESS, "parallel.cuts=[bottom.2,top.2]", "schedule=dsp"),
}
NOISY = ("train.evaluate_every=2", "checkpoint.every=0", "checkpoint.keep=1", "optimizer.lr=2.0")


def best_step(folder: Path) -> int:
    return int((folder / "checkpoints" / "best").read_text().strip().removeprefix("step_"))


def validated(folder: Path) -> dict[int, float]:
    return {step: loss for step, part, loss in evaluated(folder) if part == "validation"}


@pytest.mark.parametrize(
    "world",
    [pytest.param(one, marks=() if one == "one process" else pytest.mark.slow) for one in WORLDS],
)
def test_the_best_evaluation_saves_where_no_checkpoint_is_due(world: str, train: Train) -> None:
    code, folder = train("run", *NOISY, *WORLDS[world])
    assert code == 0
    losses = validated(folder)
    assert world == "asynchronous" or min(losses.values()) < losses[20]
    assert losses[best_step(folder)] == min(losses.values())
    kept = {
        int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*")
    }
    assert kept == {best_step(folder), 20}


def test_a_resumed_run_knows_what_was_best(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = (*NOISY, "checkpoint.keep=99")
    code, unbroken = train("unbroken", *noisy)
    assert code == 0
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:sixth_evaluation_rank")
    code, folder = train("stopped", *noisy)
    assert code == 75
    assert train("stopped", *noisy, "checkpoint.resume=auto")[0] == 0
    assert best_step(folder) == best_step(unbroken)
    saved = [{path.name for path in (one / "checkpoints").iterdir()} for one in (folder, unbroken)]
    assert saved[0] == saved[1] | {"step_00000012"}
    assert "step_00000012" not in saved[1]


def test_what_fails_in_the_last_evaluation_does_not_cost_the_training(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:failing_rank")
    code, folder = train("failing", "checkpoint.every=0")
    assert code == 5
    assert summary(folder)["steps_saved"] == 20
    assert score(folder, 20) is None
    assert train("failing", "checkpoint.every=0", "checkpoint.resume=auto")[0] == 0
    assert steps_and_parts(folder) == EXPECTED
    assert score(folder, 20) is not None


def test_a_batch_and_a_point_have_no_more_than_there_is(train: Train) -> None:
    code, folder = train("large", "evaluate.batch_size=1000000000000", "telemetry.every=30")
    assert code == 0
    assert steps_and_parts(folder) == EXPECTED
    assert [one.step for one in events.curve(events.read(folder / "events.jsonl"))] == [20]


def test_commands_take_the_best_and_say_so(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", *NOISY)
    assert code == 0
    step, root = best_step(folder), folder / "checkpoints"
    text = f"validation log-loss {validated(folder)[step]:.4f}"
    assert f"best: step {step}, {text}: {root / 'best'}" in capsys.readouterr().out.replace(
        "\n", ""
    )
    told = {"part": "validation", "monitor": "log_loss", "value": validated(folder)[step]}
    assert summary(folder)["best"] == {"step": step, **told}
    best = f"{checkpoint(folder, step)}, step {step}, the best: {text}; {root}/latest is step 20"
    latest = f"{checkpoint(folder, 20)}, step 20, the latest; {root}/best is step {step}: {text}"
    rows = tmp_path / "new.csv"
    rows.write_text("price,shop,city\n0.5,shop 1,city 2\n")
    for given, line in ((folder, best), (root, best), (root / "latest", latest)):
        for name, *options in (
            ("evaluate", f"evaluate.checkpoint={given}"),
            ("predict", f"predict.checkpoint={given}", f"predict.rows={rows}", OUTPUT),
        ):
            told_to = [one.replace("FOLDER", str(tmp_path)) for one in options]
            assert run(["dlrm_hybrid", name, *told_to]) == 0
            assert f"checkpoint {line}" in capsys.readouterr().out.replace("\n", "")
    assert Predictor(folder).step == step
    exported = (f"export.checkpoint={folder}", f"export.output={tmp_path}/out")
    assert run(["dlrm_hybrid", "export", *exported, "export.format=safetensors"]) == 0
    assert json.loads((tmp_path / "out" / "model.json").read_text())["checkpoint"]["step"] == step


@pytest.mark.parametrize(
    "world", ["one process", pytest.param("asynchronous", marks=pytest.mark.slow)]
)
def test_the_last_steps_are_no_point_where_they_are_fewer(world: str, train: Train) -> None:
    code, folder = train("run", *WORLDS[world], "telemetry.every=8")
    assert code == 0
    record = list(events.read(folder / "events.jsonl"))
    assert [one.step for one in record if one.kind is Kind.PROGRESS] == [8, 16, 20]
    assert [one.step for one in events.curve(record)] == [8, 16]


def test_an_epoch_has_as_many_steps_as_the_world_makes_of_it(train: Train) -> None:
    for name, world in (("one", ()), ("two", (*HYBRID, IN_PROCESS))):
        options = ("train.evaluate_every=epoch", "train.steps=null", "train.epochs=3")
        code, folder = train(name, *options, "checkpoint.every=0", *world)
        assert code == 0
        steps = summary(folder)["steps"]
        assert list(validated(folder)) == [steps // 3, 2 * steps // 3, steps]


def test_without_keep_best_only_the_last_is_saved(train: Train) -> None:
    code, folder = train("run", *NOISY, "checkpoint.keep_best=false", "checkpoint.keep=9")
    assert code == 0
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_00000020"]
