"""Several labels, one logit each: what a run learns, scores, predicts, exports and reports.

That worlds of processes are one process is a row of `test_world_matrix.py`.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from outside_model import DeepFm, Narrow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional
from world_runs import summary, tensors

from dlrm_hybrid import OwnModel, Predictor, World
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import START, Loader
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.export.formats import ModelFile
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.types import ConfigError, DataError

ROWS, STEPS = 2000, 54
LR = 0.5
SCHEMA = """
label: [clicked, {column: stars, above: 3, name: liked, loss_weight: 0.5}, bought]
dense: [{name: age}, {name: price, transform: log1p}]
categorical: [{name: shop, kind: integer}, {name: city, min_count: 2}]
weight: much
group: user
split: {by: fraction, validation: 0.2, test: 0.2, seed: 1}
vocabulary: all
"""
FACTORS = {"clicked": 1.0, "liked": 0.5, "bought": 1.0}
SPEC: dict[str, Any] = {
    "embedding_dim": 4, "bottom": (2, 8, 4), "top": (8, 3), "loss_weights": (1.0, 0.5, 1.0),
}  # fmt: skip


def drawn() -> pd.DataFrame:
    """Rows whose labels follow from one number, each in its own way."""
    draw = np.random.default_rng(0)
    shop, age = draw.integers(0, 20, ROWS), draw.normal(size=ROWS)
    return pd.DataFrame(
        {
            "clicked": (draw.random(ROWS) < 0.2 + 0.6 * (age < 0.2)).astype(int),
            "stars": np.clip(draw.normal(2 + 2 * (age > 0.5), 1).round(), 1, 5).astype(int),
            "bought": (draw.random(ROWS) < 0.1 + 0.3 * (age > 0)).astype(int),
            "age": age,
            "price": draw.gamma(2.0, 10.0, ROWS),
            "shop": shop,
            "city": [f"c{one}" for one in draw.integers(0, 9, ROWS)],
            "much": 0.5 + draw.random(ROWS),
            "user": draw.integers(0, 60, ROWS),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    drawn().to_parquet(folder / "rows.parquet", index=False)
    (folder / "mine.yaml").write_text(SCHEMA)
    return folder


def given(folder: Path) -> list[str]:
    rows = [f"data.schema={folder}/mine.yaml", f"data.raw={folder}/rows.parquet"]
    model = ["model=dlrm_small", "model.bottom=[null,8,4]", "model.top=[8,1]"]
    more = [
        f"data.prepared={folder}/rows",
        "train.batch_size=64",
        f"train.steps={STEPS}",
        "train.epochs=3",
    ]
    return ["data=table", *rows, *model, *more, f"optimizer.lr={LR}", "train.seed=3"]


@pytest.fixture(scope="module")
def learned(folder: Path) -> Path:
    """A run in one process that evaluates in between."""
    every = ["train.evaluate_every=20", "train.monitor=auc", f"hydra.run.dir={folder}/run"]
    assert run(["dlrm_hybrid", "train", *given(folder), *every]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def shards(learned: Path, folder: Path) -> Shards:
    return open_shards(folder / "rows", None)


class Plain(nn.Module):
    """A DLRM with three logits in plain torch, with the run's names of weights."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        super().__init__()
        held = {name: torch.from_numpy(one.copy()) for name, one in values.items()}
        self.values = {name: one.requires_grad_() for name, one in held.items()}

    def forward(self, dense_BI: torch.Tensor, ids_FB: torch.Tensor) -> torch.Tensor:
        w = self.values
        x_BN = dense_BI
        for layer in (1, 2):
            x_BN = functional.linear(x_BN, w[f"bottom.{layer}.weight"], w[f"bottom.{layer}.bias"])
            x_BN = x_BN.relu()
        rows = [w[f"embedding.{n}.weight"][ids] for n, ids in enumerate(ids_FB, 1)]
        z_BVD = torch.stack([x_BN, *rows], 1)
        dots_BVV = z_BVD @ z_BVD.transpose(1, 2)
        first, second = torch.tril_indices(3, 3, offset=-1)
        x_BN = torch.cat([x_BN, dots_BVV[:, first, second]], 1)
        x_BN = functional.linear(x_BN, w["top.1.weight"], w["top.1.bias"]).relu()
        return functional.linear(x_BN, w["top.2.weight"], w["top.2.bias"])


def loader(shards: Shards) -> Loader:
    blocks = {"shuffle_block_rows": 65_536, "shuffle_read_rows": 1024}
    return Loader(shards, batch_size=64, seed=3, shuffle=True, **blocks)


def test_a_run_learns_as_a_loop_of_plain_torch(learned: Path, folder: Path, shards: Shards) -> None:
    first = ["train.steps=1", "optimizer.lr=1e-30", f"hydra.run.dir={folder}/first"]
    assert run(["dlrm_hybrid", "train", *given(folder), *first]) == 0
    begun = tensors(folder / "first", 1)
    model = Plain(begun)
    assert begun["top.2.weight"].shape == (3, 8)
    read, at = loader(shards), START
    optimizer = torch.optim.SGD(model.values.values(), lr=LR)
    factors = torch.tensor([*FACTORS.values()])
    for _ in range(STEPS):
        batch, at = read.read(at)
        dense_BI, ids_FB = torch.from_numpy(batch.dense_BI), torch.from_numpy(batch.bags.values)
        assert batch.weight_B is not None
        weight_B1 = torch.from_numpy(batch.weight_B)[:, None]
        losses_BL = functional.binary_cross_entropy_with_logits(
            model(dense_BI, ids_FB), torch.from_numpy(batch.label_B), reduction="none"
        )
        (factors * weight_B1 * losses_BL).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = tensors(learned, STEPS)
    assert found.keys() == begun.keys()
    for name, one in model.values.items():
        wanted = one.detach().numpy()
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(wanted - begun[name]).max() > 1e-3, name


def test_each_label_is_scored_by_its_name(learned: Path, folder: Path, tmp_path: Path) -> None:
    sklearn: Any = import_module("sklearn.metrics")
    output, scores = tmp_path / "scores.json", tmp_path / "scores.csv"
    last = learned / "checkpoints" / f"step_{STEPS:08d}"
    wish = [f"evaluate.checkpoint={last}", f"evaluate.output={output}"]
    assert run(["dlrm_hybrid", "evaluate", *wish]) == 0
    evaluated, test = json.loads(output.read_text()), summary(learned)["test"]
    assert [*evaluated["labels"]] == [*test["labels"]] == [*FACTORS]
    shards = open_shards(folder / "rows", None)
    kept = shards.read(shards.test_rows("day"))
    rows = drawn()
    rows = rows[rows["age"].astype(np.float32).isin(kept.dense_RI[:, 0])]
    assert len(rows) == len(kept.dense_RI)
    predictor = Predictor(last)
    chance_RL = predictor.predict(rows)
    assert predictor.labels == (*FACTORS,) and chance_RL.shape == (len(rows), 3)
    total = 0.0
    for place, (name, factor) in enumerate(FACTORS.items()):
        label = rows["stars"] > 3 if name == "liked" else rows[name]
        chance, weight = chance_RL[:, place].astype(np.float64), rows["much"]
        one = evaluated["labels"][name]
        log_loss = sklearn.log_loss(label, chance, sample_weight=weight)
        assert one["log_loss"] == pytest.approx(log_loss, rel=1e-6)
        auc = sklearn.roc_auc_score(label, chance, sample_weight=weight)
        assert one["auc"] == pytest.approx(auc, abs=1e-6)
        assert one["auc"] > 0.55 and 0.3 < one["gauc"] < 1
        assert test["labels"][name]["loss"] == one["log_loss"]
        assert test["labels"][name]["gauc"] == one["gauc"]
        total += factor * log_loss
    assert evaluated["log_loss"] == test["loss"] == pytest.approx(total, rel=1e-6)
    assert evaluated["auc"] == evaluated["labels"]["clicked"]["auc"]
    best = summary(learned)["best"]
    assert best["monitor"] == "auc"  # of the first label
    of_clicks = [
        one.values["labels"]["clicked"]["auc"]
        for one in events.read(learned / "events.jsonl")
        if one.kind is events.Kind.EVALUATED and one.values["part"] == "validation"
    ]
    assert best["value"] == max(of_clicks)
    columns = [f"predict.output={scores}", "predict.keep=[user]", f"predict.checkpoint={last}"]
    wish = [*columns, f"predict.rows={folder}/rows.parquet"]
    assert run(["dlrm_hybrid", "predict", *wish]) == 0
    written = pd.read_csv(scores)
    assert [*written] == ["row", "score_clicked", "score_liked", "score_bought", "user"]
    found = written[[f"score_{name}" for name in FACTORS]].to_numpy(np.float32)
    np.testing.assert_allclose(found, predictor.predict(drawn()), rtol=1e-6)


def test_rows_to_score_need_no_labels(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = drawn()
    rows.loc[3, "stars"] = None
    rows["score_liked"] = 1
    for name, frame, told in (
        ("some", rows, "row 3"),
        ("none", rows.drop(columns=["clicked", "stars", "bought"]), ""),
        ("all", drawn(), "weighted sum"),
    ):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        wish = [f"predict.rows={tmp_path}/{name}.csv", f"predict.output={tmp_path}/scores.csv"]
        wish += [f"predict.checkpoint={learned}", "predict.extra=ignore"]
        assert run(["dlrm_hybrid", "predict", *wish]) == 0
        shown = capsys.readouterr().out
        assert ("log-loss" in shown) == (name == "all") == (told in shown and name == "all")
    wish[0] = f"predict.rows={tmp_path}/some.csv"
    assert run(["dlrm_hybrid", "predict", *wish, "predict.keep=[score_liked]"]) == 2
    assert "score_liked is a column of this file of scores" in capsys.readouterr().err
    rows["score"] = 1
    rows.to_csv(tmp_path / "some.csv", index=False)
    assert run(["dlrm_hybrid", "predict", *wish, "predict.keep=[score]"]) == 0
    assert [*pd.read_csv(tmp_path / "scores.csv")][-1] == "score"


@pytest.mark.parametrize(
    "format",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("pt2", "onnx")), "safetensors"],
)
def test_an_exported_model_gives_a_score_for_each_label(
    format: Any, learned: Path, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "exported"
    wish = [f"export.checkpoint={learned}", f"export.output={output}", f"export.format={format}"]
    assert run(["dlrm_hybrid", "export", *wish]) == 0
    described = json.loads((output / "model.json").read_text())
    assert described["outputs"]["score"] == {"dtype": "float32", "labels": [*FACTORS]}
    assert described["model"]["top"] == [8, 3]
    assert [*described["check"]["after"]["labels"]] == [*FACTORS]
    predictor = Predictor(learned)
    shards = open_shards(folder / "rows", None)
    batch, _ = loader(shards).read(START)
    spec = build.shape_of(predictor.config, shards.manifest)
    file = ModelFile(format=format, naming="ours", spec=spec, int8=False)
    expected = predictor._serving.model.score(batch)
    for got, wanted in zip(file.scorer(output)(batch), expected, strict=True):
        assert got.shape == (64, 3)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_reports_and_trackers_know_the_labels(learned: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    wish = [f"report.runs={learned}", f"report.output={page}"]
    assert run(["dlrm_hybrid", "report", *wish]) == 0
    text = page.with_suffix(".md").read_text()
    section = text[text.index("## Labels") : text.index("## Steps")]
    for name, one in summary(learned)["test"]["labels"].items():
        assert f"| {name} " in section and f"{one['auc']:.4f}" in section
    assert "Loss of each label" in page.read_text()
    tags = EventAccumulator(str(learned / "tensorboard")).Reload().Tags()["scalars"]
    assert {"val/loss", "val/liked/loss", "test/bought/auc", "val/clicked/gauc"} <= {*tags}


def test_another_day_goes_on_with_the_same_labels(
    learned: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn()[::-1].to_parquet(tmp_path / "next.parquet", index=False)
    own = [one for one in given(folder) if not one.startswith(("data.raw", "data.prepared"))]
    wish = [*own, f"data.raw={tmp_path}/next.parquet", f"checkpoint.resume={learned}"]
    later = [*wish, f"data.prepared={tmp_path}/rows", f"hydra.run.dir={tmp_path}/run"]
    assert run(["dlrm_hybrid", "train", *later]) == 0
    assert [*summary(tmp_path / "run")["test"]["labels"]] == [*FACTORS]
    other = tmp_path / "other.yaml"
    other.write_text(SCHEMA.replace(", bought]", "]\nignore: [bought]"))
    wish = [*wish, f"data.schema={other}", f"data.prepared={tmp_path}/other"]
    assert run(["dlrm_hybrid", "train", *wish, f"hydra.run.dir={tmp_path}/not"]) == 3
    told = "label: prepared with clicked, liked, bought, the schema says clicked, liked"
    assert told in capsys.readouterr().err


def test_a_model_of_ones_own_is_as_wide_as_there_are_labels(
    folder: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [one for one in given(folder) if not one.startswith("model")]
    wish = [*own, "model.embedding_dim=4", f"hydra.run.dir={tmp_path}/run"]
    narrow = "model=outside_model:Narrow"
    assert run(["dlrm_hybrid", "train", *wish, narrow]) == 2
    told = r"part `logit`, the last, gives float32 (4, 1), must be (B, 3): as wide as `Features.la"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run(["dlrm_hybrid", "train", *wish, "model=outside_model:DeepFm"]) == 0
    predictor = Predictor(tmp_path / "run", model=DeepFm)
    assert predictor.predict(drawn()[:5]).shape == (5, 3)
    shape: Any = {"table_rows": shards.table_rows, "num_dense": 2, "embedding_dim": 4}
    with pytest.raises(ConfigError, match=r"must be \(B, 2\): as wide as `Features.labels` says"):
        World.in_process(OwnModel(module=Narrow, loss_weights=(1.0, 1.0), **shape), cuts=[])
    with pytest.raises(ConfigError, match=r"loss_weights: \[2.0\]: of two labels or more"):
        World.in_process(OwnModel(module=DeepFm, loss_weights=(2.0,), **shape), cuts=[])
    for wrong, message in (
        ({"frozen": (True,) * 9}, "model.frozen: 9 values for "),
        ({"table_of_column": (1, 0)}, r"model.table_of_column: \[1, 0\] must number "),
    ):
        with pytest.raises(ConfigError, match=message):
            World.in_process(OwnModel(module=DeepFm, **shape, **wrong), cuts=[])


def test_a_world_learns_what_a_run_does(learned: Path, shards: Shards, tmp_path: Path) -> None:
    spec = ModelSpec(table_rows=shards.table_rows, **SPEC)
    keys = {"optimizer.lr": LR, "train.seed": 3}
    options: dict[str, Any] = {"trainers": 1, "cuts": [], "servers": 0, "batch_size": 64}
    read, at, batches = loader(shards), START, list[Any]()
    for _ in range(STEPS):
        batch, at = read.read(at)
        batches.append(batch)
    with World.in_process(spec, config=keys, **options) as world:
        for batch in batches:
            world.step(batch)
        found, expected = world.state_dict(), tensors(learned, STEPS)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.tobytes() == found[name].numpy().tobytes(), name
        scores = world.evaluate(batches)
        assert [*scores.labels] == ["label.1", "label.2", "label.3"]
        weights = zip(spec.loss_weights, scores.labels.values(), strict=True)
        assert scores.log_loss == pytest.approx(sum(w * one.log_loss for w, one in weights))
        columns = {"dense": batch.dense_BI, "ids": batch.bags.values.T}
        assert world.predict([columns]).shape == (64, 3)
        for label, told in (
            (np.zeros(64), r"label has shape \(64,\), must be \(rows, 3\)"),
            (np.zeros((64, 2)), r"label has shape \(64, 2\), must be \(rows, 3\)"),
            (np.full((64, 3), [0, 2, 0]), "label 2 of row 0 is 2, must be 0 or 1"),
        ):
            with pytest.raises(DataError, match=told):
                world.step({**columns, "label": label})
        lists = (columns["dense"].tolist(), columns["ids"].tolist(), batch.label_B.tolist())
        assert world.step(lists).rows == 64
        saved = world.save(tmp_path)
    one = {**SPEC, "top": (8, 1), "loss_weights": ()}
    spec = ModelSpec(table_rows=shards.table_rows, **one)
    other = World.in_process(spec, config=keys, **options)
    told = r"top.2.weight has the shape \[3, 8\], the model's \[1, 8\]"
    with other, pytest.raises(DataError, match=told):
        other.load(saved)
