"""A table of one's own from a file to a model, by commands alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.schemas import reading

ROWS = 4000
SMALL = ("model=dlrm_small", "train.batch_size=64", "telemetry.tensorboard=false")


def program(*arguments: str) -> int:
    return run(["dlrm_hybrid", *arguments])


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows whose label one category decides, and columns of every kind."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 40, ROWS)
    table = pa.table(
        {
            "user_id": np.arange(ROWS) + 10**6,
            "clicked": (rng.random(ROWS) < np.where(kind % 2, 0.9, 0.1)).astype(np.int8),
            "kind": [f"kind {one}" for one in kind],
            "price": rng.pareto(1.0, ROWS),
            "age": pa.array(rng.normal(40, 9, ROWS).round(), mask=rng.random(ROWS) < 0.1),
            "tags": [[f"t{one}" for one in rng.integers(0, 9, one % 4)] for one in kind],
            "when": np.datetime64("2024-01-01", "s") + np.arange(ROWS) * 60,
            "title": [f"title number {one}" for one in range(ROWS)],
        }
    )
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    return path


def test_from_a_file_to_a_model_in_three_commands(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program("prepare", "data.guess=rows.parquet") == 0
    told = capsys.readouterr().out
    assert "prepare data=table data.schema=rows.yaml data.raw=rows.parquet\n" in told
    guessed = reading.read(Path("rows.yaml"))
    assert guessed.label == "clicked"
    assert [one.name for one in guessed.dense] == ["price", "age"]
    assert [one.transform for one in guessed.dense] == ["log1p", "standardise"]
    assert [(one.name, one.max_length) for one in guessed.categorical] == [("kind", 1), ("tags", 6)]
    assert set(guessed.ignore) == {"user_id", "when", "title"}

    table = ("data=table", "data.schema=rows.yaml")
    assert program("prepare", *table, "data.raw=row*.parquet") == 0
    assert f"{ROWS:,} rows (" in capsys.readouterr().out
    often = ("train.epochs=6", "train.evaluate_every=100")
    assert program("train", *table, *SMALL, *often, "hydra.run.dir=run") == 0
    told = capsys.readouterr().out
    assert "396 validation rows, 379 test rows" in told
    for line in ("step 100: validation", "step 300: validation", "step 300: test"):
        assert f"{line} log-loss" in told
    assert "step 100: test" not in told
    assert "validation part" in told and "test part" in told
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["test"]["auc"] > 0.85  # 0.90 is the best there is
    config = json.loads(Path("run/config.json").read_text())
    assert config["model"]["bottom"] == [2, 32, 16, 8, 4]
    Path("rows.yaml").unlink()  # the rows know their schema
    last = "evaluate.checkpoint=run/checkpoints/latest"
    for name, part in (("validation", "validation"), ("day", "test")):
        given = (f"data.test_part={name}", f"evaluate.output={name}.json")
        assert program("evaluate", last, *given) == 0
        scores = json.loads(Path(f"{name}.json").read_text())
        assert scores["auc"] == pytest.approx(summary[part]["auc"], abs=1e-9)
    assert abs(summary["validation"]["auc"] - summary["test"]["auc"]) > 1e-6
    capsys.readouterr()
    assert program("report", "report.runs=[run]") == 0
    assert "validation AUC" in capsys.readouterr().out


def test_a_run_may_leave_the_test_part_alone(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program("prepare", "data.guess=rows.parquet") == 0
    table = ("data=table", "data.schema=rows.yaml", "data.raw=rows.parquet")
    part = "data.test_part=validation"
    assert program("train", *table, *SMALL, part, "hydra.run.dir=run") == 0
    told = capsys.readouterr().out
    assert "step 50: validation log-loss" in told
    assert "test part" not in told
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["test"]["auc"] is None
    assert summary["validation"]["auc"] is not None
    assert program("train", *SMALL, "data.rows=1000", part) == 2
    assert "data.test_part = validation: the rows of " in capsys.readouterr().err


def test_a_file_of_pandas_with_its_index_and_another_delimiter(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_parquet(rows).drop(columns="tags")
    frame.to_csv("rows.csv", sep=";")
    assert program("prepare", "data.guess=rows.csv") == 0
    guessed = reading.read(Path("rows.yaml"))
    assert guessed.delimiter == ";"
    assert set(guessed.ignore) == {"", "user_id", "when", "title"}
    assert program("prepare", "data=table", "data.schema=rows.yaml", "data.raw=rows.csv") == 0
    assert f"{ROWS:,} rows (" in capsys.readouterr().out


def test_what_a_guess_does_not_know_is_said(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.tsv").write_text("".join(f"{i}\t0.{i}\t7\n" for i in range(40)))
    assert program("prepare", "data.guess=rows.tsv", "data.on_bad_row=skip") == 0
    told = capsys.readouterr().out
    assert "rows.tsv: the first line looks like values, so columns are called column_1, …\n" in told
    assert "rows.tsv: no column holds nothing but 0 and 1: write the name of the label\n" in told
    assert "data.raw=rows.tsv data.on_bad_row=skip\n" in told
    assert "names: [" in Path("rows.yaml").read_text()


def test_a_bottom_mlp_needs_a_dense_column(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        "label: clicked\ndense: []\ncategorical: [{name: kind}]\nsplit: {by: fraction, test: 0.1}"
    )
    assert program("train", *SMALL, "data=table", "data.schema=mine.yaml") == 2
    told = capsys.readouterr().err
    assert "model.bottom[0] = null: mine.yaml has no dense columns; needs model.bottom=[]" in told


def test_a_schema_that_is_there_is_never_overwritten(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("precious")
    assert program("prepare", "data=table", f"data.guess={rows}", "data.schema=mine.yaml") == 2
    assert "mine.yaml: is there already and stays as it is" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "precious"
    assert program("prepare", "data.guess=none.csv") == 3
    told = capsys.readouterr().err
    assert told.startswith("none.csv: cannot be read") and told.endswith("(data.guess)\n")


FAULTS = [
    (
        ("data=table",),
        "data.schema = null: name the schema of these columns, or let data.guess=FILE",
    ),
    (
        ("data=table", "data.schema=no.yaml"),
        "data.schema = 'no.yaml': no such file; the package has",
    ),
    (("data.schema=a.yaml",), "data.schema=a.yaml: only applies to data=table"),
    (("data=table", "data.schema=rows.yaml", "data.days=7"), "data.days=7: only applies to data="),
    (("data=criteo_kaggle", "data.days=null"), "data.days = null: must be a whole"),
]


def test_keys_that_do_not_go_together(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("prepare", "data.guess=rows.parquet") == 0
    for given, told in FAULTS:
        assert program("train", *SMALL, *given) == 2
        assert told in capsys.readouterr().err


def test_rows_of_another_width_are_refused_with_both_numbers(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program("prepare", "data.guess=rows.parquet") == 0
    table = ("data=table", "data.schema=rows.yaml", "data.raw=rows.parquet")
    assert program("train", *table, *SMALL, "model.bottom=[13,8,4]") == 2
    error = capsys.readouterr().err
    assert re.search(
        r"model.bottom\[0\] = 13: the rows of data/prepared/table-rows-[0-9a-f]{8} have 2", error
    )
    assert program("train", *table[:2], *SMALL, "data.raw=none*.csv") == 2
    assert "data.raw = none*.csv: no file fits this pattern" in capsys.readouterr().err
    assert program("prepare", *table, "data.prepared=named") == 0
    Path("rows.yaml").write_text(Path("rows.yaml").read_text().replace("seed: 0", "seed: 1"))
    assert program("train", *table, *SMALL, "data.prepared=named") == 3
    told = capsys.readouterr().err
    assert "data.schema.split.seed: prepared with 0, the schema says 1" in told
    assert "prepare.overwrite=true" in told


def test_prepared_rows_are_named_after_schema_and_files(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program("prepare", "data.guess=rows.parquet") == 0
    table, there = ("data=table", "data.schema=rows.yaml"), Path("data/prepared")
    assert program("train", *table, *SMALL) == 3
    told = capsys.readouterr().err
    assert "data.prepared = data/prepared/table: no prepared rows here" in told
    assert "data.raw=rows.parquet" in told
    assert program("prepare", *table, "data.raw=rows.parquet") == 0
    (first,) = there.iterdir()
    # The only one there is found without files, and without a schema.
    assert program("prepare", *table, "prepare.check=true") == 0
    assert program("prepare", "data=table", "prepare.check=true") == 0
    assert program("train", *table, *SMALL, "hydra.run.dir=one") == 0
    assert program("prepare", *table, "data.raw=./rows.parquet") == 0
    assert list(there.iterdir()) == [first]
    # Other files, and another schema, take another folder, and the first one stays.
    Path("more.parquet").write_bytes(rows.read_bytes())
    assert program("prepare", *table, "data.raw=more.parquet") == 0
    Path("rows.yaml").write_text(Path("rows.yaml").read_text().replace("seed: 0", "seed: 1"))
    assert program("prepare", *table, "data.raw=rows.parquet") == 0
    assert len(list(there.iterdir())) == 3 and first in there.iterdir()
    assert program("evaluate", "evaluate.checkpoint=one") == 0
    capsys.readouterr()
    assert program("prepare", "data=table", "prepare.check=true") == 2
    told = capsys.readouterr().err
    assert f"data.prepared = null: {there}/table-more-" in told and "fit; name one of them" in told


OUTCOMES = """
label: {column: action, positive: [click, buy]}
weight: importance
group: user
dense: [{name: price}]
categorical: [{name: kind, kind: integer}, {name: user}]
split: {by: fraction, validation: 0.2, test: 0.3, seed: 1, column: session}
"""
NEEDED = ["price", "kind", "user"]


def outcomes(seed: int) -> pd.DataFrame:
    """Users click on other kinds, so that each has an order of their own; some have no name."""
    rng = np.random.default_rng(seed)
    user, kind = rng.integers(0, 60, ROWS), rng.integers(0, 20, ROWS)
    clicks = rng.random(ROWS) < 1 / (1 + np.exp(1.5 * np.sin(kind + user % 3) + (user % 5) / 2))
    return pd.DataFrame(
        {
            "action": np.where(clicks, np.where(kind % 2, "click", "buy"), "view"),
            "importance": rng.exponential(size=ROWS).round(3) * (rng.random(ROWS) < 0.9),
            "user": np.where(user == 7, None, [f"user {one}" for one in user]),
            "session": rng.integers(0, 500, ROWS),
            "price": rng.permutation(ROWS) / ROWS,
            "kind": kind + 3 * seed,
        }
    )


def plain_scores(frame: pd.DataFrame) -> dict[str, float]:
    """Weighted scores by their definitions, pair by pair; `score` is the probability."""
    label, weight, chance = frame["label"].to_numpy(), frame["importance"], frame["score"]
    losses = -np.log(np.where(label, chance, 1 - chance).astype(float))

    def auc(rows: pd.DataFrame) -> float:
        one, other = rows[rows["label"]], rows[~rows["label"]]
        scores = one["score"].to_numpy()[:, None], other["score"].to_numpy()[None]
        right = (scores[0] > scores[1]) + 0.5 * (scores[0] == scores[1])
        return float(np.average(right, weights=np.outer(one["importance"], other["importance"])))

    def has_both(rows: pd.DataFrame) -> bool:
        return set(rows.loc[rows["importance"] > 0, "label"]) == {True, False}

    users = [rows for _, rows in frame.groupby("user") if has_both(rows)]
    sizes = [rows["importance"].sum() for rows in users]
    base_rate = float(np.average(label, weights=weight))
    return {
        "loss": float(np.average(losses, weights=weight)),
        "accuracy": float(np.average((chance > 0.5) == label, weights=weight)),
        "auc": auc(frame),
        "base_rate": base_rate,
        "calibration": float(np.average(chance, weights=weight)) / base_rate,
        "gauc": float(np.average([*map(auc, users)], weights=sizes)),
    }


def scored_parts(day: int, frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each part, in the order of the prepared ones, with their labels and scores."""
    scored = frame.assign(
        score=pd.read_csv(f"s{day}.csv")["score"], label=frame["action"] != "view"
    )
    price = np.load(f"rows{day}/dense.npy")[:, 0]  # no two rows have the same
    place = {np.float32(one): row for row, one in enumerate(frame["price"])}
    ordered = scored.iloc[[place[one] for one in price]]
    assert ordered["label"].tolist() == (np.load(f"rows{day}/label.npy") == 1).tolist()
    sizes = json.loads(Path(f"rows{day}/manifest.json").read_text())["parts"]
    ends = np.cumsum([one["rows"] for one in sizes.values()]).tolist()
    borders = zip(sizes, [0, *ends], ends, strict=False)
    return {part: ordered.iloc[first:end] for part, first, end in borders}


def test_weights_groups_and_labels_of_texts_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(OUTCOMES)
    sessions: list[set[int]] = []
    for day, more in enumerate([(), ("checkpoint.resume=run0",)]):
        frame = outcomes(day)
        frame.to_parquet(f"day{day}.parquet")
        frame[NEEDED].to_csv(f"features{day}.csv", index=False)
        given = ("data=table", "data.schema=mine.yaml", f"data.raw=day{day}.parquet", *more)
        places = (f"data.prepared=rows{day}", f"hydra.run.dir=run{day}")
        learning = ("train.epochs=2", "optimizer.lr=0.3")
        monitor = ("train.monitor=gauc", "train.evaluate_every=20")
        assert program("train", *given, *SMALL, *places, *learning, *monitor) == 0
        assert re.search(r"best: step \d+, validation GAUC 0\.\d{4}:", capsys.readouterr().out)
        scores = (f"predict.checkpoint=run{day}/checkpoints/latest", f"predict.output=s{day}.csv")
        new = "day1.parquet" if day else "features0.csv"  # with labels, and without
        assert program("predict", f"predict.rows={new}", *scores) == 0
        assert ("log-loss" in capsys.readouterr().out) == (day == 1)
        parts = scored_parts(day, frame)
        summary = json.loads(Path(f"run{day}/summary.json").read_text())
        for part in ("validation", "test"):
            found, expected = summary[part], plain_scores(parts[part])
            assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
        assert abs(summary["test"]["gauc"] - summary["test"]["auc"]) > 1e-3
        sessions += [set(parts["train"]["session"]), set(parts["test"]["session"])]
    assert not (sessions[0] | sessions[2]) & (sessions[1] | sessions[3])
    latest = "run1/checkpoints/latest"
    assert program("evaluate", f"evaluate.checkpoint={latest}", "evaluate.output=all.json") == 0
    evaluated = json.loads(Path("all.json").read_text())
    for name in ("gauc", "auc", "base_rate"):
        assert evaluated[name] == pytest.approx(summary["test"][name], abs=1e-12)
    capsys.readouterr()
    assert program("report", "report.runs=[run0,run1]") == 0
    assert re.search(r" AUC\W+GAUC\W+accuracy ", capsys.readouterr().out)
    outputs = (f"export.checkpoint={latest}", "export.output=out", "export.format=safetensors")
    assert program("export", *outputs) == 0
