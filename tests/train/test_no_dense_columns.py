"""Rows of categories alone: models without a bottom MLP, from the file to other programs."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from world_runs import summary

from dlrm_hybrid.cli.main import run

ROWS, CATEGORIES, COLUMNS = 6_000, 30, 5
SCHEMA = f"""
label: click
dense: []
categorical: [{", ".join(f"{{name: feat_{k}, kind: integer}}" for k in range(1, COLUMNS + 1))}]
split: {{by: fraction, test: 0.3, seed: 1}}
"""
MODELS = {
    "dot": ("model.interaction=dot",),
    "cross": ("model.interaction=cross", "model.cross.rank=8"),
    "machine": ("model.interaction=fm", "model.fm.deep=[16,8]"),
}
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides; a click follows from which categories meet."""
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    ids_RF = rng.integers(0, CATEGORIES, (ROWS, COLUMNS))
    effects_FV = rng.normal(0, 1.5, (COLUMNS, CATEGORIES))
    logit_R = effects_FV[np.arange(COLUMNS), ids_RF].sum(1)
    columns = {"click": (rng.random(ROWS) < 1 / (1 + np.exp(-logit_R))).astype(np.int8)}
    columns |= {f"feat_{k + 1}": ids_RF[:, k] for k in range(COLUMNS)}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    (folder / "mine.yaml").write_text(SCHEMA)
    rows = ("data=table", f"data.schema={folder / 'mine.yaml'}", f"data.raw={folder}/rows.parquet")
    model = ("model=dlrm_small", "model.bottom=[]")
    return (*rows, f"data.prepared={folder / 'rows'}", *model)


@pytest.fixture
def train(table: tuple[str, ...], tmp_path: Path) -> Train:
    def train_here(name: str, *options: str) -> Path:
        folder = tmp_path / name
        base = (*table, f"hydra.run.dir={folder}", "telemetry.tensorboard=false")
        assert run(["dlrm_hybrid", "train", *base, *options]) == 0
        return folder

    return train_here


@pytest.mark.slow
def test_what_is_planted_is_found_and_leaves_for_other_programs(
    table: tuple[str, ...], train: Train, tmp_path: Path
) -> None:
    options = ("train.epochs=6", "optimizer.lr=0.3", "train.batch_size=64")
    folder = train("run", *MODELS["machine"], *options)
    found = summary(folder)["test"]
    assert found["auc"] > 0.75
    for format in ("pt2", "onnx"):
        given = (f"export.checkpoint={folder}", f"export.format={format}")
        output = tmp_path / format
        assert run(["dlrm_hybrid", "export", *given, f"export.output={output}"]) == 0
        assert json.loads((output / "model.json").read_text())["inputs"].keys() == {"ids"}
    ids = np.zeros((3, COLUMNS), np.int64)
    session = import_module("onnxruntime").InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["ids"]
    (logit_B,) = session.run(["logit"], {"ids": ids})
    program = torch.export.load(tmp_path / "pt2" / "model.pt2").module()
    with torch.no_grad():
        np.testing.assert_allclose(program(ids=torch.from_numpy(ids))[0], logit_B, atol=1e-5)
    rows = next(one for one in table if one.startswith("data.raw=")).partition("=")[2]
    output = tmp_path / "scores.parquet"
    given = (f"predict.checkpoint={folder}", f"predict.rows={rows}", f"predict.output={output}")
    assert run(["dlrm_hybrid", "predict", *given]) == 0
    assert pq.read_table(output)["score"].to_numpy().std() > 0.1


def test_others_names_are_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("run", "train.steps=5")
    given = (f"export.checkpoint={folder}", f"export.output={tmp_path / 'out'}")
    names = ("export.format=safetensors", "export.names=dlrm")
    assert run(["dlrm_hybrid", "export", *given, *names]) == 2
    assert (
        "'dlrm' (export.names, import.names): has no model without dense" in capsys.readouterr().err
    )


def test_rows_are_prepared_without_a_model(
    table: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [one for one in table if not one.startswith(("model", "data.prepared"))]
    target = f"data.prepared={tmp_path / 'rows'}"
    assert run(["dlrm_hybrid", "prepare", *rows, target, "+experiment=dct_hybrid"]) == 0
    capsys.readouterr()
    (tmp_path / "bad.yaml").write_text(SCHEMA.replace("test: 0.3", "test: 0"))
    bad = [*rows, target, f"data.schema={tmp_path / 'bad.yaml'}"]
    assert run(["dlrm_hybrid", "prepare", *bad]) == 2
    told = capsys.readouterr().err
    assert "split.test = 0" in told and "model.bottom" not in told
    bare = [one for one in rows if not one.startswith("data.schema")]
    assert run(["dlrm_hybrid", "prepare", *bare, f"data.prepared={tmp_path / 'none'}"]) == 2
    assert "data.schema = null: name the schema of these columns" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_cut_only_where_layers_are(
    table: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    search = ("plan.machines=2", "plan.rates=[1gbit]", "train.batch_size=32", "train.steps=60")
    assert run(["dlrm_hybrid", "plan", *table, *search]) == 0
    shown = capsys.readouterr().out
    assert "dp_levels: 2 × 1 + 2" in shown and "dct_hybrid" not in shown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.bottom=[5,4]"], "model.bottom[0] = 5: the rows of"),
        (["model.bottom=[null,4]"], "has no dense columns; needs model.bottom=[]"),
        (["model.bottom=[4]"], "model.bottom = [4]: needs an input and a layer, or nothing at all"),
    ],
)
def test_widths_that_do_not_fit_are_named(
    overrides: list[str], message: str, table: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dlrm_hybrid", "train", *table, *overrides]) == 2
    assert message in capsys.readouterr().err
