"""A column of vectors is as many columns of numbers, from files to scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from table_rows import run_prepare

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.predict.sources import frame_block
from dlrm_hybrid.saved.inputs import ModelInputs
from dlrm_hybrid.types import DataError

ROWS, LENGTH = 300, 3
SPLIT = "split: {by: fraction, test: 0.2, seed: 1}\n"
VECTOR = "{{name: image, length: 3, transform: {transform}, missing: 0.5{more}}}"
SINGLE = "{{name: '{name}', transform: {transform}, missing: 0.5}}"


def schema(transform: str = "none", more: str = "", *, apart: bool = False) -> str:
    image = VECTOR.format(transform=transform, more=more)
    if apart:
        names = [f"image[{at}]" for at in range(LENGTH)]
        image = ", ".join(SINGLE.format(name=name, transform=transform) for name in names)
    dense = f"dense: [{{name: age}}, {image}, {{name: price}}]\n"
    return f"label: y\n{dense}categorical: [{{name: c}}]\n{SPLIT}"


def read(text: str) -> Schema:
    return reading.loads(text, "s.yaml")


@pytest.fixture(scope="module")
def columns() -> dict[str, list[Any]]:
    draw = np.random.default_rng(0)
    image = draw.normal(0, 5, (ROWS, LENGTH)).round(3).tolist()
    image[3][1] = None
    image[7] = None
    return {
        "y": draw.integers(0, 2, ROWS).tolist(),
        "age": draw.random(ROWS).tolist(),
        "price": draw.random(ROWS).tolist(),
        "c": [f"c{one}" for one in draw.integers(0, 9, ROWS)],
        "image": image,
    }


def single_columns(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Each number of the vectors in a column of its own."""
    rows = [[None] * LENGTH if one is None else one for one in columns["image"]]
    numbers = {f"image[{at}]": [row[at] for row in rows] for at in range(LENGTH)}
    return {name: one for name, one in columns.items() if name != "image"} | numbers


def text_of(vector: list[Any] | None, separator: str) -> str | None:
    if vector is None:
        return None
    return separator.join("" if one is None else str(one) for one in vector)


def written(folder: Path, columns: dict[str, list[Any]], form: str) -> tuple[Path, str]:
    """The rows as a file, and what more the schema says of the vectors."""
    frame = pd.DataFrame(columns)
    path, image = folder / f"rows.{form}", columns["image"]
    if form == "csv":
        frame["image"] = [text_of(one, " ") for one in image]
        frame.to_csv(path, index=False)
        return path, ', separator: " "'
    if form == "json.csv":
        frame["image"] = [None if one is None else json.dumps(one) for one in image]
        frame.to_csv(path, index=False)
        return path, ", separator: json"
    kind = pa.list_(pa.float64(), LENGTH) if form == "fixed.parquet" else pa.list_(pa.float64())
    table = pa.table({**columns, "image": pa.array(image, kind)})
    pq.write_table(table, path, row_group_size=41)
    return path, ""


@pytest.mark.parametrize("transform", ["none", "log1p", "standardise"])
@pytest.mark.parametrize("form", ["parquet", "fixed.parquet", "csv", "json.csv"])
def test_prepared_rows_are_those_of_single_columns(
    form: str, transform: str, columns: dict[str, list[Any]], tmp_path: Path
) -> None:
    path, more = written(tmp_path, columns, form)
    found = run_prepare([path], tmp_path / "found", read(schema(transform, more)))
    apart = tmp_path / "apart.parquet"
    pq.write_table(pa.table(single_columns(columns)), apart)
    expected = run_prepare([apart], tmp_path / "expected", read(schema(transform, apart=True)))
    assert [one.xxh3 for one in found.arrays] == [one.xxh3 for one in expected.arrays]
    assert (found.scales, found.meaning) == (expected.scales, expected.meaning)
    dense_RI = open_shards(tmp_path / "found", None).rows.dense_RI
    assert dense_RI.shape == (ROWS, LENGTH + 2)


def test_npy_files_hold_vectors_too(columns: dict[str, list[Any]], tmp_path: Path) -> None:
    rows = np.zeros(
        ROWS, [("y", "i1"), ("age", "f8"), ("price", "f8"), ("c", "U4"), ("image", "f8", 3)]
    )
    for name in ("y", "age", "price", "c"):
        rows[name] = columns[name]
    filled = [[np.nan] * LENGTH if one is None else one for one in columns["image"]]
    rows["image"] = np.array(filled, float)
    np.save(tmp_path / "rows.npy", rows)
    path, _ = written(tmp_path, columns, "parquet")
    found, expected = (
        run_prepare([one], tmp_path / one.suffix, read(schema()))
        for one in (tmp_path / "rows.npy", path)
    )
    assert [one.xxh3 for one in found.arrays] == [one.xxh3 for one in expected.arrays]


def test_a_vector_for_one_number_is_refused(columns: dict[str, list[Any]], tmp_path: Path) -> None:
    path, _ = written(tmp_path, columns, "parquet")
    one = read(schema().replace("length: 3, ", ""))
    told = "column 'image': list<element: double> where the schema has one number; length takes"
    with pytest.raises(DataError, match=told):
        run_prepare([path], tmp_path / "rows", one)
    path, _ = written(tmp_path, columns, "csv")
    told = "column 'image': binary is no list; the schema needs a sep"
    with pytest.raises(DataError, match=told):
        run_prepare([path], tmp_path / "rows", read(schema()))


def test_rows_that_lack_vectors_may_have_missing_ones() -> None:
    lacks = read(schema(more=", default: ''")).for_scoring
    found = frame_block(pd.DataFrame({"age": [1.0], "price": [2.0], "c": ["a"]}), lacks)
    assert found.values.dense_NI.tolist() == [[1.0, 0.5, 0.5, 0.5, 2.0]]


def test_other_lengths_are_other_rows() -> None:
    plain = read(schema(apart=True))
    assert plain.inputs == plain.dense
    assert read(schema()).beside_repr != read(schema().replace("h: 3", "h: 4")).beside_repr


@pytest.fixture(scope="module")
def runs(columns: dict[str, list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of vectors, and one of as many single columns."""
    folder = tmp_path_factory.mktemp("vectors")
    pq.write_table(pa.table(columns), folder / "vectors.parquet")
    pq.write_table(pa.table(single_columns(columns)), folder / "apart.parquet")
    for name in ("vectors", "apart"):
        text = schema("standardise", apart=name == "apart")
        (folder / f"{name}.yaml").write_text(text)
        rows = (f"data.schema={folder / name}.yaml", f"data.raw={folder / name}.parquet")
        more = (f"data.prepared={folder / name}-rows", "model=dlrm_small", "train.steps=5")
        output = ("telemetry.tensorboard=false", f"hydra.run.dir={folder / name}")
        given = ("data=table", *rows, *more, *output, "train.batch_size=32")
        assert run(["dlrm_hybrid", "train", *given]) == 0
    return folder


def test_models_of_vectors_score_as_those_of_single_columns(
    runs: Path, columns: dict[str, list[Any]]
) -> None:
    frames = pd.DataFrame(columns), pd.DataFrame(single_columns(columns))
    names = ("vectors", "apart")
    scores = [
        Predictor(runs / name).predict(frame) for name, frame in zip(names, frames, strict=True)
    ]
    assert scores[0].std() > 0
    np.testing.assert_array_equal(*scores)
    arrays = frames[0].assign(
        image=[None if x is None else np.array(x, float) for x in columns["image"]]
    )
    np.testing.assert_array_equal(Predictor(runs / "vectors").predict(arrays), scores[0])
    with pytest.raises(DataError, match="row 1: column 'image': 2 numbers instead of 3"):
        Predictor(runs / "vectors").predict(frames[0][:1].assign(image=[[1.0, 2.0]]))


def test_an_exported_model_takes_vectors(runs: Path, columns: dict[str, list[Any]]) -> None:
    output = runs / "exported"
    given = (f"export.checkpoint={runs / 'vectors'}", f"export.output={output}")
    assert run(["dlrm_hybrid", "export", *given, "export.format=safetensors"]) == 0
    about = json.loads((output / "model.json").read_text())
    names = [one["name"] for one in about["inputs"]["dense"]["columns"]]
    assert names == ["age", "image[0]", "image[1]", "image[2]", "price"]
    inputs, last = ModelInputs(output), range(20)
    rows = [{name: columns[name][at] for name in ("age", "price", "c", "image")} for at in last]
    dense_BI = inputs(rows)["dense"]
    assert dense_BI.shape == (20, LENGTH + 2)
    scale = about["inputs"]["dense"]["columns"][2]
    assert dense_BI[3, 2] == np.float32((0.5 - scale["mean"]) / scale["deviation"])
    assert (dense_BI[7, 1:4] < 1e9).all()
    for vector, told in (
        ([1.0], "1 numbers instead of 3"),
        ("1 2 3", "'1 2 3' is no list"),
        ([1, "x", 2], "'x' is not a number"),
    ):
        with pytest.raises(DataError, match=f"row 2: column 'image': {told}"):
            inputs([rows[0], {**rows[1], "image": vector}])
