"""A run that goes on with the rows of another day: what it takes over, and what begins anew."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from drifting import Log, write
from world_runs import assert_same_state, summary, tensors

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.preprocessing import read_kept
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

COLUMNS = ("user", "item", "shop", "city")
STEPS = 12
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four days, of which each is learned and the next one scored."""
    folder = tmp_path_factory.mktemp("log")
    write(Log(rows=2000, days=4, new=0.2), folder)
    return folder


def of_day(log: Path, day: int) -> tuple[str, ...]:
    files = ",".join(str(log / f"day{one}.parquet") for one in (day, day + 1))
    return ("data=table", f"data.raw=[{files}]", f"data.schema={log}/day{day}.yaml")


def trained(log: Path, folder: Path, day: int, *options: str, code: int = 0) -> Path:
    given = (*of_day(log, day), "model=dlrm_small", "train.batch_size=64")
    given += (f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=99")
    more = ("telemetry.tensorboard=false", f"hydra.run.dir={folder}", *options)
    assert run(["dlrm_hybrid", "train", *given, *more]) == code
    return folder


@pytest.fixture(scope="module")
def first(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the first day, which nobody changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("first"))
        return trained(log, Path.cwd() / "day1", 1)


@pytest.fixture
def train(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.chdir(tmp_path)
    return lambda name, day, *more, code=0: trained(log, tmp_path / name, day, *more, code=code)


STATE = ("optimizer=adam", "optimizer.lr=0.01", "embedding.lr=0.1")


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
def test_rows_keep_what_they_learned_and_new_ones_are_those_of_a_fresh_table(
    kind: str, train: Train
) -> None:
    options = (*STATE, f"embedding.optimizer={kind}")
    first = train("day1", 1, *options)
    second = train("day2", 2, *options, f"checkpoint.resume={first}")
    before, after = tensors(first, STEPS), tensors(second, 1)
    fresh = {
        name: torch.zeros(tensor.shape)
        for name, tensor in after.items()
        if name.startswith("embedding") and tensor.ndim == 2
    }
    draw_embeddings({one: fresh[one] for one in fresh if one.endswith(".weight")}, seed=0)
    growth = summary(second)["growth"]
    for number, column in enumerate(COLUMNS, 1):
        name = f"embedding.{number}.weight"
        known = len(before[name])
        assert len(after[name]) == growth[column]["rows"] == known + growth[column]["appended"]
        expected = np.concatenate([before[name], fresh[name][known:].numpy()])
        moved = (expected != after[name]).any(axis=1)
        assert 0 < moved.sum() <= 64
        assert column != "user" or not (moved[:known].all() or moved[known:].all())
        for state in after.keys() - {name}:
            if not state.startswith(f"embedding.{number}.") or state.endswith(".step"):
                continue
            more = np.zeros((len(after[name]) - known, *after[state].shape[1:]), np.float32)
            rest = np.concatenate([before[state], more])
            np.testing.assert_array_equal(after[state][~moved], rest[~moved], state)
    assert growth["user"]["appended"] > 30 < growth["user"]["reused"]
    for name, tensor in before.items():
        if name.startswith("embedding"):
            continue
        change = after[name] - tensor
        if name.endswith(".exp_avg_sq"):
            assert (change >= -0.0011 * tensor).all() and tensor.max() > 0, name
        elif not name.endswith(".exp_avg"):
            assert (change == 1 if name.endswith(".step") else abs(change) < 0.05).all(), name


def test_rows_that_change_hands_are_those_of_a_fresh_table(train: Train, log: Path) -> None:
    for day in (1, 2):
        schema = (log / f"day{day}.yaml").read_text()
        full = schema.replace("{name: user,", "{name: user, max_rows: 60, evict: rarest,")
        assert full != schema
        (log / f"full{day}.yaml").write_text(full)
    options = (*STATE, "embedding.optimizer=adam")
    first = train("day1", 1, *options, f"data.schema={log}/full1.yaml")
    begun = (f"data.schema={log}/full2.yaml", f"checkpoint.resume={first}")
    second = train("day2", 2, *options, *begun)
    evicted = read_kept(second).replaced(read_kept(first))[0]
    assert len(evicted) == summary(second)["growth"]["user"]["evicted"] > 5
    before, after = tensors(first, STEPS), tensors(second, 1)
    assert before["embedding.1.weight"].shape == after["embedding.1.weight"].shape
    fresh = torch.zeros(after["embedding.1.weight"].shape)
    draw_embeddings({"embedding.1.weight": fresh}, seed=0)
    expected = {name: before[name].copy() for name in before if name.startswith("embedding.1.")}
    del expected["embedding.1.step"]
    for name, tensor in expected.items():
        tensor[evicted] = fresh[evicted] if name.endswith(".weight") else 0
    moved = (expected["embedding.1.weight"] != after["embedding.1.weight"]).any(axis=1)
    assert 0 < moved.sum() <= 64 and not moved[evicted].all()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(after[name][~moved], tensor[~moved], name)


def test_steps_rates_and_scores_begin_anew(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("optimizer.schedule=linear", "train.evaluate_every=10", "optimizer.lr=0.5")
    first = train("day1", 1, *options)
    kept = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    rows = {path: path.read_bytes() for path in Path("data/prepared").rglob("*.npy")}
    capsys.readouterr()
    second = train("day2", 2, *options, "threads=2", f"checkpoint.resume={first}")
    told = capsys.readouterr().out
    assert "are appended" in told
    assert "bit-identical" not in told
    assert summary(second)["arithmetic_changes"] == []
    assert "the rows are others than those of" in told
    started, *_ = events.read(second / "events.jsonl")
    assert (started.step, started.values["steps_total"]) == (0, STEPS)
    found = summary(second)
    assert (found["first_step"], found["steps"], found["samples"]) == (0, STEPS, STEPS * 64)
    rates = [
        [event.values["lr"] for event in events.read(one / "events.jsonl") if "lr" in event.values]
        for one in (first, second)
    ]
    assert rates[0] == rates[1]
    assert {path: path.read_bytes() for path in kept} == kept
    assert {path: path.read_bytes() for path in rows} == rows
    third = train("day3", 3, *options, f"checkpoint.resume={second}")
    ancestors = [f"{one}/checkpoints/step_{STEPS:08d}" for one in (first, second)]
    assert summary(third)["descends_from"] == ancestors
    assert json.loads((third / "origin.json").read_text())["ancestors"] == ancestors
    assert summary(first)["descends_from"] is summary(first)["growth"] is None
    kept_rows = [read_kept(one).table_rows for one in (first, second, third)]
    assert all(a < b < c for a, b, c in zip(*kept_rows, strict=True))


def cut_short(folder: Path, step: int) -> None:
    """As if the run had been killed after this step."""
    (folder / "summary.json").unlink()
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(folder / f"checkpoints/step_{later:08d}")


def test_a_broken_second_day_goes_on_as_the_unbroken_one_and_needs_no_first_one(
    train: Train, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*STATE, "embedding.optimizer=adam")
    first = train("day1", 1, *options)
    unbroken = train("unbroken", 2, *options, f"checkpoint.resume={first}")
    broken = Path(shutil.copytree(unbroken, unbroken.with_name("broken")))
    scored = ["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={unbroken}", *of_day(log, 2)]
    assert run([*scored, "evaluate.output=before"]) == 0
    cut_short(broken, 7)
    alone = ["dlrm_hybrid", "train", f"hydra.run.dir={broken}", "checkpoint.resume=auto"]
    assert run(alone) == 0
    assert_same_state(broken, unbroken, STEPS)
    assert summary(broken)["growth"] == summary(unbroken)["growth"]
    cut_short(broken, 9)
    shutil.rmtree(first)
    rows = json.loads((broken / "config.json").read_text())["data"]["prepared"]
    capsys.readouterr()
    again = (*options, "checkpoint.resume=auto")
    train("broken", 2, *again, code=2)
    assert f"to go on there, add data.prepared={rows}\n" in capsys.readouterr().err
    train("broken", 2, *again, f"data.prepared={rows}")
    assert_same_state(broken, unbroken, STEPS)
    half = f"checkpoint.resume={unbroken}/checkpoints/step_00000009"
    new = train("new", 2, *options, half)  # its rows keep their base
    assert_same_state(new, unbroken, STEPS)
    assert summary(new)["first_step"] == 9
    assert run([*scored, "evaluate.output=after"]) == 0
    before, after = (json.loads(Path(one).read_text()) for one in ("before", "after"))
    assert before["log_loss"] == after["log_loss"] == summary(unbroken)["test"]["loss"]


def test_without_growth_a_second_day_is_an_import(train: Train, log: Path) -> None:
    """Of weights that have no other state: exported, imported for the new rows, gone on with."""
    sgd = ("optimizer.lr=0.5", "checkpoint.keep_best=false")
    first = train("day1", 1, *sgd)
    resumed = train("resumed", 2, *sgd, "data.grow=false", f"checkpoint.resume={first}")
    assert {one["appended"] for one in summary(resumed)["growth"].values()} == {0}
    assert sum(one["unknown"] for one in summary(resumed)["growth"].values()) > 50
    out = ("export.format=safetensors", "export.output=out")
    assert run(["dlrm_hybrid", "export", f"export.checkpoint={first}", *out]) == 0
    given = ("model=dlrm_small", "train.batch_size=64", f"data.base={first}", "data.grow=false")
    weights = ("import.file=out/model.safetensors", "import.output=imported", "import.names=ours")
    assert run(["dlrm_hybrid", "import", *of_day(log, 2), *given, *weights]) == 0
    alike = train("alike", 2, *sgd, *given[2:], "checkpoint.resume=imported")
    for step in (1, STEPS):
        assert_same_state(resumed, alike, step)


def test_new_ids_are_scored_and_exported(train: Train, first: Path, log: Path) -> None:
    second = train("day2", 2, f"checkpoint.resume={first}")
    user = read_kept(second).vocabularies()[0]
    new = [one for one in user.keys if one not in {*read_kept(first).vocabularies()[0].keys}]
    row = {"age": 0.1, "price": 0.2, "hour": 0.3, "item": "item 1", "shop": "", "city": ""}
    rows = pd.DataFrame([{**row, "user": new[0]}, {**row, "user": "nobody"}])
    old, grown = (Predictor(one).predict(rows) for one in (first, second))
    assert old[0] == old[1]
    assert grown[0] != grown[1]
    out = ("export.format=safetensors", f"export.output={second}-exported")
    assert run(["dlrm_hybrid", "export", f"export.checkpoint={second}", *out]) == 0
    assert run(["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={second}"]) == 0


def test_a_model_is_scored_on_the_next_day_before_it_learns_it(
    train: Train, first: Path, log: Path
) -> None:
    scored = ["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={first}", "evaluate.output=scores"]
    assert run([*scored, *of_day(log, 2)]) == 0
    found = json.loads(Path("scores").read_text())
    frame = pd.read_parquet(log / "day3.parquet")  # what day 2 is tested on
    clicks = frame.pop("clicked").to_numpy(np.float64)
    p = Predictor(first, extra="ignore").predict(frame).astype(np.float64)
    assert found["log_loss"] == pytest.approx(
        -np.mean(np.log(np.where(clicks == 1, p, 1 - p))), abs=1e-6
    )


def test_what_cannot_go_on_is_told_in_one_message(
    train: Train, first: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def told(*options: str, code: int = 3) -> str:
        capsys.readouterr()
        folder = train("refused", 2, f"checkpoint.resume={first}", *options, code=code)
        assert not folder.exists()
        return capsys.readouterr().err

    wide = ("model.embedding_dim=8", "model.bottom=[3,8,8]")
    assert "model.embedding_dim = 8: the checkpoint was made with 4" in told(*wide)
    text = (log / "day2.yaml").read_text()
    Path("other.yaml").write_text(text.replace("name: shop", "name: shop, hash_size: 9"))
    fault = told("data.schema=other.yaml")
    assert "no base for these rows (data.base)\n" in fault
    assert "categorical[2].hash_size: prepared with 0, the schema says 9" in fault
    given = of_day(log, 2)
    assert run(["dlrm_hybrid", "prepare", *given, "data.prepared=own"]) == 0
    fault = told("data.prepared=own")
    assert "was prepared differently: its vocabularies are not on those of" in fault
    fault = told("data.prepared=own", "data.raw=null")
    assert "prepared without its vocabularies; data.raw=FILES, without data.prepared" in fault
    assert "data.base = nowhere: nowhere: no checkpoint" in told("data.base=nowhere")


def test_rows_may_be_prepared_before(train: Train, first: Path, log: Path) -> None:
    """With a schema of the base where none is named."""
    raw = f"data.raw=[{log}/day3.parquet,{log}/day2.parquet]"  # the base tests on the latter
    prepare = ("prepare", "data=table", raw, "data.prepared=rows", f"data.base={first}")
    assert run(["dlrm_hybrid", *prepare]) == 0
    given = ("data.schema=null", "model.bottom=[3,32,16,8,4]", f"checkpoint.resume={first}")
    named = train("named", 2, *given, "data.prepared=rows", "data.raw=null")
    straight = train("straight", 2, *given, raw)
    assert_same_state(named, straight, STEPS)


def test_rows_may_be_scored_and_then_learned_all_of_them(
    train: Train, first: Path, log: Path
) -> None:
    """With what the checkpoint knows of them, as `evaluate` does."""
    raw = f"data.raw={log}/day2.parquet"
    more = ("data.progressive=true", f"checkpoint.resume={first}")
    second = train("day2", 2, raw, *more)
    (scored,) = (
        event for event in events.read(second / "events.jsonl") if event.kind is Kind.EVALUATED
    )
    assert scored.step == 0
    assert summary(second)["test"]["loss"] == summary(first)["test"]["loss"]
    assert summary(second)["growth"]["user"]["appended"] > 0
    started = next(events.read(second / "events.jsonl"))
    assert [started.values[name] for name in ("train_rows", "test_rows")] == [2000, 2000]
    given = ("data=table", raw, "evaluate.output=again", "data.progressive=true")
    given += (f"data.schema={log}/day2.yaml",)
    assert run(["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={second}", *given]) == 0
    again = json.loads(Path("again").read_text())
    assert (again["rows"], again["log_loss"] < scored.values["log_loss"]) == (2000, True)
