"""Columns that share a table, from their rows to scores, written models and deltas."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from world_runs import summary, tensors

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.predict.sources import frame_block
from dlrm_hybrid.saved.inputs import ModelInputs

ROWS, STEPS = 1200, 12
SCHEMA = """
label: clicked
dense: [{name: price}]
categorical:
  - {name: viewed, table: item, embedding_dim: 6}
  - {name: shop, kind: integer, embedding_dim: 3}
  - {name: history, table: item, embedding_dim: 6, max_length: 4, separator: "|"}
split: {by: fraction, test: 0.2, seed: 1}
vocabulary: VOCABULARY
"""


def rows_of(day: int) -> pd.DataFrame:
    rng = np.random.default_rng(day)
    items = np.array([f"i{one}" for one in range(40 * day, 40 * day + 90)])
    history = ["|".join(rng.choice(items, rng.integers(0, 5))) for _ in range(ROWS)]
    return pd.DataFrame(
        {
            "clicked": rng.integers(0, 2, ROWS),
            "price": rng.random(ROWS),
            "viewed": rng.choice(items, ROWS),
            "shop": rng.integers(0, 9, ROWS),
            "history": history,
        }
    )


def train(folder: Path, day: int, *options: str, vocabulary: str = "train") -> Path:
    (folder / "mine.yaml").write_text(SCHEMA.replace("VOCABULARY", vocabulary))
    rows_of(day).to_parquet(folder / f"day{day}.parquet", index=False)
    given = ("data=table", f"data.schema={folder}/mine.yaml", f"data.raw={folder}/day{day}.parquet")
    given += (
        f"data.prepared={folder}/prepared{day}",
        "model=dlrm_small",
        f"train.steps={STEPS}",
        "train.batch_size=64",
    )
    given += ("embedding.optimizer=adagrad", "optimizer.lr=0.2", "telemetry.tensorboard=false")
    out = folder / f"run{day}"
    assert run(["dlrm_hybrid", "train", *given, f"hydra.run.dir={out}", *options]) == 0
    return out


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two days, of which the second goes on from the first."""
    folder = tmp_path_factory.mktemp("own")
    first = train(folder, 0)
    train(folder, 1, f"checkpoint.resume={first}")
    return folder


def test_new_rows_score_as_prepared_ones(own: Path) -> None:
    predictor, shards = Predictor(own / "run0"), open_shards(own / "prepared0", None)
    (batch,) = sequential_batches(shards, range(ROWS), ROWS)
    expected = predictor._serving.model.logits(batch)  # type: ignore[reportPrivateUsage]
    found = predictor.logits(frame_block(rows_of(0).drop(columns="clicked"), predictor.schema))
    assert expected.std() > 0.01
    np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=0, atol=1e-6)
    output = own / "scores.json"
    wish = (f"evaluate.checkpoint={own}/run0/checkpoints/latest", f"evaluate.output={output}")
    assert run(["dlrm_hybrid", "evaluate", *wish]) == 0
    assert json.loads(output.read_text())["log_loss"] == summary(own / "run0")["test"]["loss"]


def test_an_item_scores_alike_in_any_column(own: Path) -> None:
    """The row of a shared table is one; what is learned of one column is known in another."""
    predictor = Predictor(own / "run0")
    rows = pd.DataFrame({"price": [0.5], "viewed": ["i7"], "shop": [3], "history": ["i7"]})
    bags = predictor.batch(frame_block(rows, predictor.schema)).bags
    assert bags.values[0] == bags.values[2] > 0


@pytest.mark.parametrize(
    "format", ["onnx", pytest.param("pt2", marks=pytest.mark.slow), "safetensors"]
)
def test_written_models_score_alike(own: Path, format: str, tmp_path: Path) -> None:
    """`export` compares the scores of the file with those of the checkpoint."""
    out = tmp_path / "out"
    wish = (f"export.checkpoint={own}/run0", f"export.output={out}", f"export.format={format}")
    assert run(["dlrm_hybrid", "export", *wish]) == 0
    about = json.loads((out / "model.json").read_text())
    columns = [one for of in about["inputs"].values() for one in of["columns"]]
    files = {one["name"]: one["vocabulary"] for one in columns if "vocabulary" in one}
    assert files["viewed"] == files["history"] != files["shop"]
    assert len(list((out / "vocabulary").iterdir())) == 2
    rows = rows_of(0).drop(columns="clicked")[:50]
    inputs = ModelInputs(out)(rows.to_dict("records"))
    assert [*inputs] == ["dense", "ids", "ids_3"]
    if format == "safetensors":
        return
    expected = Predictor(own / "run0").predict(rows)
    if format == "pt2":
        module = torch.export.load(out / "model.pt2").module()
        named = {name: torch.from_numpy(one) for name, one in inputs.items()}
        lists = [named.pop("ids_3")]
        found = module(**named, lists=lists)
        np.testing.assert_allclose(found[1].numpy(), expected, rtol=0, atol=1e-5)
        return
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["score"], inputs)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("names", ["torchrec", "dlrm"])
def test_models_of_others_have_no_such_tables(
    own: Path, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = (f"export.checkpoint={own}/run0", f"export.output={tmp_path / 'out'}")
    more = ("export.format=safetensors", f"export.names={names}")
    assert run(["dlrm_hybrid", "export", *wish, *more]) == 2
    told = capsys.readouterr().err
    assert f"{names!r} (export.names, import.names): has no model whose columns share" in told


def test_weights_come_back(own: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    wish = (f"export.checkpoint={own}/run0/checkpoints/latest", f"export.output={out}")
    assert run(["dlrm_hybrid", "export", *wish, "export.format=safetensors"]) == 0
    rows = ("data=table", f"data.schema={own}/mine.yaml", f"data.prepared={own}/prepared0")
    given = (f"import.file={out}/model.safetensors", f"import.output={back}", "import.names=ours")
    assert run(["dlrm_hybrid", "import", *rows, "model=dlrm_small", *given]) == 0
    before, after = tensors(own / "run0", STEPS), tensors(back, 0)
    for name in ("embedding.1.weight", "embedding.2.weight", "top.1.weight"):
        np.testing.assert_array_equal(before[name], after[name], name)
    assert "embedding.3.weight" not in after


def test_a_day_grows_the_table_once_and_its_delta_is_the_later_model(own: Path) -> None:
    growth = summary(own / "run1")["growth"]
    assert [*growth] == ["item", "shop"]
    before, after = (tensors(own / f"run{day}", STEPS) for day in (0, 1))
    rows = len(after["embedding.1.weight"])
    assert rows == growth["item"]["rows"] == 131
    assert rows - len(before["embedding.1.weight"]) == growth["item"]["appended"] == 40
    out = own / "delta"
    wish = (f"export.since={own}/run0", f"export.checkpoint={own}/run1", f"export.output={out}")
    assert run(["dlrm_hybrid", "export", *wish]) == 0
    predictor, some = Predictor(own / "run0"), rows_of(1).drop(columns="clicked")
    earlier = predictor.predict(some)
    predictor.update(out)
    assert predictor.predict(some).tobytes() == Predictor(own / "run1").predict(some).tobytes()
    assert predictor.predict(some).tobytes() != earlier.tobytes()


def test_unknown_items_are_zeros_in_every_column(tmp_path: Path) -> None:
    folder = train(tmp_path, 0, vocabulary="all")
    predictor = Predictor(folder, unknown="zero")
    rows = pd.DataFrame({"price": [0.5], "viewed": ["new"], "shop": [3], "history": ["new|i7"]})
    found = predictor.logits(frame_block(rows, predictor.schema))
    rows["history"] = ["i7"]
    np.testing.assert_array_equal(found, predictor.logits(frame_block(rows, predictor.schema)))
