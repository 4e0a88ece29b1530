"""The recipe of MLPerf's DLRM v2 on a few rows and narrow layers, up to a served model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from patience import PATIENT
from world_runs import checkpoint, summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.profile import builtin
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.synthetic import generate

DAYS, ROWS, STEPS = 3, 700, 12
TABLE_WISE = "embedding.sharding=table_wise"
SMALL = (
    *("model.embedding_dim=4", "model.bottom=[13,8,4]", "model.top=[16,1]", "model.cross.rank=4"),
    *("train.batch_size=32", f"train.steps={STEPS}", "train.evaluate_every=6", "data.processes=1"),
    *("telemetry.tensorboard=false", PATIENT, "data.max_ind_range=1000"),
    *("checkpoint.every=6", "checkpoint.keep=9", TABLE_WISE),
)
ALONE = ("parallel=single",)
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("days")
    for day in range(DAYS):
        generate(folder / f"day_{day}", ROWS, day, builtin("criteo_kaggle"), lambda done: None)
    days = ",".join(f"{folder}/day_{day}" for day in range(DAYS))
    rows = (f"data.raw=[{days}]", f"data.days={DAYS}", f"data.prepared={folder / 'prepared'}")
    return ("+experiment=mlperf_v2", *rows, *SMALL)


@pytest.fixture(scope="module")
def train(recipe: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Train:
    runs = tmp_path_factory.mktemp("runs")

    def train_here(name: str, *options: str) -> Path:
        assert run(["dlrm_hybrid", "train", *recipe, *options, f"hydra.run.dir={runs / name}"]) == 0
        return runs / name

    return train_here


@pytest.fixture(scope="module")
def single(train: Train) -> Path:
    return train("single", *ALONE)


def prepared(recipe: tuple[str, ...]) -> Path:
    return next(Path(one.partition("=")[2]) for one in recipe if one.startswith("data.prepared"))


def test_new_rows_are_scored_as_evaluations_score_them(
    recipe: tuple[str, ...], single: Path, tmp_path: Path
) -> None:
    last_day = prepared(recipe).parent / f"day_{DAYS - 1}"
    given = (f"predict.checkpoint={single}", f"predict.rows={last_day}")
    assert run(["dlrm_hybrid", "predict", *given, f"predict.output={tmp_path / 'a.parquet'}"]) == 0
    score = pd.read_parquet(tmp_path / "a.parquet")["score"].to_numpy(np.float64)
    assert len(score) == ROWS
    label = open_shards(prepared(recipe), None).rows.label_R[-ROWS:]
    half = slice(0, ROWS // 2)  # that the benchmark validates with
    losses = -np.log(np.where(label == 1, score, 1 - score))[half]
    assert losses.mean() == pytest.approx(summary(single)["test"]["loss"], abs=1e-6)


def slow(*options: str) -> Any:
    return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options", [slow("pt2"), slow("onnx"), ("safetensors",), slow("pt2", "int8")]
)
def test_files_score_as_the_checkpoint_with_one_id_or_with_bags(
    options: tuple[str, ...], recipe: tuple[str, ...], single: Path, tmp_path: Path
) -> None:
    format, int8 = options[0], "int8" in options
    given = [f"export.checkpoint={single}", f"export.output={tmp_path / 'out'}"]
    more = [f"export.format={format}", f"export.int8={int8}"]
    assert run(["dlrm_hybrid", "export", *given, *more]) == 0
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    columns = {one["name"] for one in about["inputs"]["ids"]["columns"]}
    if format == "safetensors":  # weights as they are, for whoever makes bags
        assert not {"C1", "C21"} & columns
        assert about["inputs"]["ids_21"]["columns"][0]["expand_to"] == 100
    else:
        assert {"C1", "C21"} < columns
        assert "ids_21" not in about["inputs"]
    assert about["check"]["rows_apart"] == 0 or int8
    assert abs(about["check"]["after"]["auc"] - summary(single)["test"]["auc"]) < 0.002


def test_rows_that_are_read_in_another_way_are_others(
    recipe: tuple[str, ...], single: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = (*recipe, "data=criteo_1tb", f"data.prepared={tmp_path / 'plain'}")
    assert run(["dlrm_hybrid", "prepare", *plain]) == 0
    both = [open_shards(one, None) for one in (prepared(recipe), tmp_path / "plain")]
    assert [one.xxh3 for one in both[0].manifest.arrays] == [
        one.xxh3 for one in both[1].manifest.arrays
    ]
    capsys.readouterr()
    given = [f"evaluate.checkpoint={single}", f"data.prepared={tmp_path / 'plain'}"]
    assert run(["dlrm_hybrid", "evaluate", *given]) == 3
    assert "data.schema.categorical[0].expand_to: prepared with 1" in capsys.readouterr().err
    resume = f"checkpoint.resume={checkpoint(single, 6)}"
    assert run(["dlrm_hybrid", "train", *plain, *ALONE, resume]) in (2, 3)
    given = [f"predict.checkpoint={single}", f"data.prepared={tmp_path / 'plain'}"]
    days = f"predict.rows={prepared(recipe).parent / 'day_0'}"
    output = f"predict.output={tmp_path / 'a.csv'}"
    capsys.readouterr()
    assert run(["dlrm_hybrid", "predict", *given, days, output]) == 3
    assert "categorical[0] is ['C1', 'hash8', 0]" in capsys.readouterr().err
