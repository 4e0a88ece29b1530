"""Rows of other schemas than Criteo's: the same rows, prepared or scored as new ones."""

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.predict.sources import frame_block
from dlrm_hybrid.saved.inputs import ListInputs, ModelInputs, inputs_of
from dlrm_hybrid.types import DataError

ROWS = 1500
COLUMNS = ("age", "price", "depth", "city", "brand", "user", "device", "code", "tags")
COLUMNS += ("words", "much")
KNOWN: dict[str, Any] = {**dict.fromkeys(COLUMNS), "user": 0, "code": "00000000"}
SCHEMA = """
label: clicked
dense:
  - {name: age, transform: log1p, missing: 3.0}
  - {name: price, transform: standardise}
  - {name: depth}
categorical:
  - {name: city}
  - {name: brand, min_count: 5}
  - {name: user, kind: integer}
  - {name: device, hash_size: 30, missing: shared}
  - {name: code, kind: hash8}
  - {name: tags, max_length: 4, separator: "|", pooling: mean}
  - {name: words, kind: integer, max_length: 3, truncate: first, separator: "|", weights: much}
ignore: [note]
split: {by: fraction, test: 0.2, seed: 1}
vocabulary: all
"""


def drawn() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"clicked": rng.integers(0, 2, ROWS)})
    for name in ("age", "price", "depth"):
        values = rng.gamma(2.0, 10.0, ROWS)
        values[rng.random(ROWS) < 0.1] = np.nan
        frame[name] = values
    for name, sizes in (("city", 15), ("brand", 200), ("device", 90)):
        values = np.array([f"{name}-ü{number}" for number in range(sizes)], object)
        drawn = values[rng.integers(0, sizes, ROWS)]
        drawn[rng.random(ROWS) < 0.1] = None
        frame[name] = drawn
    frame["user"] = rng.integers(-5, 40, ROWS) * 10**12
    frame["code"] = [f"{number:08x}" for number in rng.integers(0, 50, ROWS) * 7919]
    tags = rng.integers(0, 9, (ROWS, 4))
    lengths = rng.integers(0, 5, ROWS)
    texts = ["|".join(f"t{tag}" for tag in row[:n]) for row, n in zip(tags, lengths, strict=True)]
    frame["tags"] = pd.Series(texts).replace("", None)
    words = [rng.integers(0, 9, count) for count in rng.integers(0, 5, ROWS)]
    much = [rng.normal(size=len(one)) for one in words]
    frame["words"] = ["|".join(map(str, one)) for one in words]
    frame["much"] = ["|".join(f"{weight:.3f}" for weight in one) for one in much]
    frame["note"] = [f"note {number}" for number in range(ROWS)]
    return frame


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return drawn()


@pytest.fixture(scope="module")
def own(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows, prepared rows and a run."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "schema.yaml").write_text(SCHEMA)
    frame.to_parquet(folder / "rows.parquet", index=False)
    rows = [f"data.schema={folder / 'schema.yaml'}", f"data.raw={folder / 'rows.parquet'}"]
    more = [f"data.prepared={folder / 'prepared'}", "model=dlrm_small", "train.steps=10"]
    argv = ["train", "data=table", *rows, *more, "telemetry.tensorboard=false", "optimizer.lr=0.5"]
    assert run(["dlrm_hybrid", *argv, f"hydra.run.dir={folder / 'run'}"]) == 0
    return folder


@pytest.fixture(scope="module")
def predictor(own: Path) -> Predictor:
    return Predictor(own / "run")


def test_new_rows_get_the_logits_of_the_prepared_ones(
    own: Path, predictor: Predictor, frame: pd.DataFrame
) -> None:
    shards = open_shards(own / "prepared", None)
    (batch,) = sequential_batches(shards, range(ROWS), ROWS)
    expected = predictor._serving.model.logits(batch)  # type: ignore[reportPrivateUsage]
    found = predictor.logits(frame_block(frame, predictor.schema))
    assert expected.std() > 0.001
    # Prepared rows are in the order of their parts.
    np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=0, atol=1e-6)


def test_lists_may_be_lists(predictor: Predictor, frame: pd.DataFrame) -> None:
    lists = frame.copy()
    lists["tags"] = [text.split("|") if isinstance(text, str) else [] for text in frame["tags"]]
    for name, kind in (("words", int), ("much", float)):
        lists[name] = [[*map(kind, text.split("|"))] if text else [] for text in frame[name]]
    np.testing.assert_array_equal(predictor.predict(lists), predictor.predict(frame))


def test_frames_may_be_put_together(predictor: Predictor, frame: pd.DataFrame) -> None:
    texts = frame.select_dtypes(["object", "str"]).columns
    parts = [frame[:50].astype(dict.fromkeys(texts, "str")), frame[50:]]
    parts[1] = parts[1].astype(dict.fromkeys(texts, "str"))
    np.testing.assert_array_equal(predictor.predict(pd.concat(parts)), predictor.predict(frame))


@pytest.mark.parametrize("file", ["rows.csv", "rows.parquet"])
def test_files_score_as_the_frame(
    file: str, own: Path, predictor: Predictor, frame: pd.DataFrame, tmp_path: Path
) -> None:
    if file.endswith(".csv"):
        frame.to_csv(tmp_path / file, index=False)
    else:
        frame[frame.columns[::-1]].to_parquet(tmp_path / file, index=False)
    given = (f"predict.checkpoint={own / 'run'}", f"predict.rows={tmp_path / file}")
    told = (f"predict.output={tmp_path / 's.parquet'}", "predict.keep=[note,user]")
    assert run(["dlrm_hybrid", "predict", *given, *told]) == 0
    found = pd.read_parquet(tmp_path / "s.parquet")
    assert list(found) == ["row", "score", "note", "user"]
    assert found["note"].tolist() == frame["note"].tolist()
    assert found["user"].astype(int).tolist() == frame["user"].tolist()
    np.testing.assert_allclose(found["score"], predictor.predict(frame), rtol=0, atol=1e-6)


def test_unknown_categories_take_the_shared_row_are_named_or_are_zero(
    own: Path, predictor: Predictor, frame: pd.DataFrame
) -> None:
    some = frame.iloc[:9].copy()
    some.loc[4, "brand"] = "never seen"  # min_count gives the column a row for such
    bags = predictor.batch(frame_block(some, predictor.schema)).bags
    assert bags.offsets is not None and bags.values[bags.offsets[9 + 4]] == 0
    some.loc[[5, 7], "city"] = "nowhere"
    some.loc[5, "tags"] = "t1|t77"
    with pytest.raises(
        DataError, match=r"^DataFrame: row 6: column 'city': category 'nowhere' was"
    ):
        predictor.predict(some)
    early = frame.iloc[:9].copy()
    early.loc[7, "city"], early.loc[3, "tags"] = "nowhere", "t1|t77"
    with pytest.raises(DataError, match=r"^DataFrame: row 4: column 'tags'"):
        predictor.predict(early)
    zero = Predictor(own / "run", unknown="zero")
    found = zero.predict(some)
    assert bool(np.isfinite(found).all())
    assert zero.encoder.unknown_F.tolist() == [2, 1, 0, 0, 0, 1, 0]
    empty = some.copy()
    empty["device"] = [None] * 4 + ["nothing like it"] * 5  # `missing: shared` is no new category
    ids = zero.batch(frame_block(empty, zero.schema)).bags
    assert (
        ids.offsets is not None
        and ids.values[ids.offsets[3 * 9] : ids.offsets[3 * 9 + 4]].max() == 0
    )
    # and a new one is in a bucket, as all are
    assert zero.encoder.unknown_F[3] == 0 and ids.values[ids.offsets[3 * 9 + 4]] > 0
    np.testing.assert_allclose(
        np.delete(found, [4, 5, 7]),
        np.delete(predictor.predict(frame.iloc[:9]), [4, 5, 7]),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"age": "old"}, r"^DataFrame: row 3: column 'age': 'old' is no"),
        ({"code": "xyz"}, r"^DataFrame: row 3: column 'code': 'xyz' is not eight hexadecimal"),
        ({"depth": float("inf")}, r"^DataFrame: row 3: column 'depth': inf is infinite"),
    ],
)
def test_a_value_that_is_none_of_its_column_is_named(
    change: dict[str, object], said: str, predictor: Predictor, frame: pd.DataFrame
) -> None:
    some = frame.iloc[:5].astype({name: object for name in change})
    for name, value in change.items():
        some.loc[2, name] = value
    with pytest.raises(DataError, match=said):
        predictor.predict(some)


def test_a_missing_column_is_named(predictor: Predictor, frame: pd.DataFrame) -> None:
    with pytest.raises(DataError, match=r"^DataFrame: no column 'city', 'code' \(predict\.rows\)"):
        predictor.predict(frame.drop(columns=["city", "code", "clicked"]))


def test_an_export_says_what_its_ids_mean(served: Path) -> None:
    inputs = json.loads((served / "model.json").read_text())["inputs"]
    city, brand, user, device, code = inputs["ids"]["columns"]
    (tags,) = inputs["ids_6"]["columns"]
    assert (tags["name"], tags["rows"], tags["pooling"]) == ("tags", 9, "mean")
    assert inputs["weights_7"] == {"dtype": "float32", "columns": [{"name": "much"}]}
    texts = json.loads((served / city["vocabulary"]).read_text())
    assert "" in texts and len(texts) == city["rows"] == 16  # 15 and the missing one
    assert (brand["first_id"], city["first_id"]) == (1, 0)
    assert device["hash_size"] == 30
    kinds = [np.load(served / one["vocabulary"]).dtype for one in (user, device, code)]
    assert kinds == [np.int64, np.int64, np.uint32]
    price = inputs["dense"]["columns"][1]
    assert price["transform"] == "standardise" and price["deviation"] > 1


def scored(own: Path, rows: list[Path], output: Path, *keep: str) -> int:
    given = [f"predict.checkpoint={own / 'run'}", f"predict.output={output}"]
    given += [f"predict.rows=[{','.join(map(str, rows))}]", f"predict.keep=[{','.join(keep)}]"]
    return run(["dlrm_hybrid", "predict", *given])


def test_kept_whole_numbers_beside_missing_ones_stay_as_they_are(
    own: Path, frame: pd.DataFrame, tmp_path: Path
) -> None:
    numbers = pd.array([None, 2**60 + 1, 3, 4], "Int64")
    frame.iloc[:4].assign(number=numbers).to_parquet(tmp_path / "new.parquet")
    assert scored(own, [tmp_path / "new.parquet"], tmp_path / "scores.csv", "number") == 0
    found = pd.read_csv(tmp_path / "scores.csv", dtype=str, keep_default_na=False)
    assert found["number"].tolist() == ["", str(2**60 + 1), "3", "4"]


def test_a_label_that_is_still_to_come_is_no_fault(
    own: Path, frame: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = frame.iloc[:9]
    late = some.assign(clicked=some["clicked"].where(some.index > 3))
    late.to_csv(tmp_path / "new.csv", index=False)
    assert scored(own, [tmp_path / "new.csv"], tmp_path / "scores.csv") == 0
    assert "log-loss" not in capsys.readouterr().out
    some.assign(clicked=2).to_csv(tmp_path / "new.csv", index=False)
    capsys.readouterr()
    assert scored(own, [tmp_path / "new.csv"], tmp_path / "scores.csv") == 3
    assert "new.csv: row 1: column 'clicked': '2' is neither 0 nor 1 (predict.rows)\n" in (
        capsys.readouterr().err
    )
    (tmp_path / "cut.parquet").write_bytes((own / "rows.parquet").read_bytes()[:999])
    assert scored(own, [tmp_path / "cut.parquet"], tmp_path / "scores.csv") == 3
    assert "(predict.rows)\n" in capsys.readouterr().err


def test_what_cannot_be_kept_is_named(
    own: Path, frame: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = frame.iloc[:9]
    text = some.to_csv(index=False).encode()
    (tmp_path / "a.csv").write_bytes(text.replace(b"note 4\n", b"note \xe9\n"))
    assert scored(own, [tmp_path / "a.csv"], tmp_path / "s.csv", "note") == 3
    assert "a.csv: row 5: column 'note': 'note \\xe9' is not UTF-8" in capsys.readouterr().err
    some.assign(note=None).to_parquet(tmp_path / "b.parquet")
    some.assign(note=7).to_parquet(tmp_path / "c.parquet")
    files = [tmp_path / "b.parquet", tmp_path / "c.parquet"]
    assert scored(own, files, tmp_path / "s.parquet", "note") == 3
    assert "column 'note': null in the first rows, int64 in later" in capsys.readouterr().err
    assert not list(tmp_path.glob("*s.parquet*"))
    assert scored(own, files, tmp_path / "s.csv", "note") == 0


def test_two_columns_of_one_name_are_refused(
    own: Path, predictor: Predictor, frame: pd.DataFrame, tmp_path: Path
) -> None:
    twice = pd.concat([frame, frame[["age"]] * 2], axis=1)
    with pytest.raises(DataError, match=r"DataFrame: column 'age' is there twice"):
        predictor.predict(twice)
    twice.to_csv(tmp_path / "new.csv")
    assert scored(own, [tmp_path / "new.csv"], tmp_path / "s.csv") == 3


def test_a_column_that_the_schema_does_not_name_is_refused_or_left_alone(
    own: Path, frame: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame.iloc[:9].assign(user_idd=1).to_csv(tmp_path / "new.csv", index=False)
    given = [f"predict.checkpoint={own / 'run'}", f"predict.rows={tmp_path / 'new.csv'}"]
    argv = ["dlrm_hybrid", "predict", *given, f"predict.output={tmp_path / 's.csv'}"]
    assert run(argv) == 3
    told = "new.csv: column 'user_idd' is not in the schema (predict.extra=ignore leaves it)"
    assert told in capsys.readouterr().err
    assert run([*argv, "predict.extra=ignore"]) == 0
    assert run([*argv, "predict.keep=[user_idd]"]) == 0


def test_rows_whose_columns_are_read_in_another_way_are_refused(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.yaml").write_text(SCHEMA.replace("transform: log1p", "transform: none"))
    rows = [f"data.schema={tmp_path / 'other.yaml'}", f"data.raw={own / 'rows.parquet'}"]
    other = f"data.prepared={tmp_path / 'other'}"
    assert run(["dlrm_hybrid", "prepare", "data=table", *rows, other]) == 0
    given = (f"predict.checkpoint={own / 'run'}", f"predict.rows={own / 'rows.parquet'}", other)
    output = f"predict.output={tmp_path / 's.csv'}"
    capsys.readouterr()
    assert run(["dlrm_hybrid", "predict", *given, output]) == 3
    told = "dense[0] is ['age', 'none', 3.0], the checkpoint's ['age', 'log1p', 3.0]"
    assert told in capsys.readouterr().err
    with pytest.raises(DataError, match=r"dense\[0\] is"):
        Predictor(own / "run", prepared=tmp_path / "other")


def test_scores_never_replace_the_rows(own: Path, frame: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    frame.to_csv(path)
    before = path.read_bytes()
    assert scored(own, [path], tmp_path / "." / "new.csv") == 2
    assert path.read_bytes() == before


def as_json(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as a client sends them."""
    return json.loads(frame.drop(columns=["clicked", "note"]).to_json(orient="records"))


@pytest.fixture(scope="module")
def served(own: Path) -> Path:
    given = (f"export.checkpoint={own / 'run'}", f"export.output={own / 'served'}")
    assert run(["dlrm_hybrid", "export", *given, "export.format=safetensors"]) == 0
    return own / "served"


@pytest.mark.slow
def test_the_example_of_a_server_scores_rows_of_any_schema(
    own: Path, predictor: Predictor, frame: pd.DataFrame, tmp_path: Path
) -> None:
    given = (f"export.checkpoint={own / 'run'}", f"export.output={tmp_path / 'out'}")
    assert run(["dlrm_hybrid", "export", *given, "export.format=onnx"]) == 0
    server = Path(__file__).parents[2] / "scripts" / "examples" / "serve.py"
    argv = [sys.executable, str(server), str(tmp_path / "out"), "0"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        address = running.stdout.readline().strip()
        rows = json.dumps(as_json(frame)).encode()
        found = json.load(urllib.request.urlopen(address, rows))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address, json.dumps([{**KNOWN, "city": "nowhere"}]).encode())
        assert caught.value.code == 400
        assert json.load(caught.value) == (
            "row 1: column 'city': category 'nowhere' was not seen in training"
        )
        misspelt = {name.replace("user", "user_idd"): value for name, value in KNOWN.items()}
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address, json.dumps([misspelt]).encode())
        assert caught.value.code == 400
        assert json.load(caught.value) == (
            "row 1: no column 'user'; column 'user_idd' is not in the schema "
            "(extra=ignore leaves it)"
        )
        for body in (b"no JSON", b"5", b'{"city": "nowhere"}', b"[5]"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(address, body)
            assert caught.value.code == 400
    finally:
        running.terminate()
        running.wait()
    np.testing.assert_allclose(found, predictor.predict(frame), rtol=0, atol=1e-5)


def test_inputs_of_a_served_model_are_those_of_the_encoder(
    served: Path, predictor: Predictor, frame: pd.DataFrame
) -> None:
    inputs = ModelInputs(served)
    found = inputs(as_json(frame))
    batch = predictor.batch(frame_block(frame, predictor.schema))
    wanted = inputs_of(batch.dense_BI, batch.bags, ListInputs((5, 6), weighted=(6,)))
    assert found.keys() == wanted.keys()
    np.testing.assert_array_equal(found["ids"], wanted["ids"])
    for name in ("ids_6", "ids_7", "weights_7"):
        np.testing.assert_array_equal(found[name], wanted[name])
    assert np.abs(found["weights_7"]).max() > 2
    np.testing.assert_allclose(found["dense"], wanted["dense"], rtol=1e-6)
    # lists as lists, categories nobody has seen where a row stands for them, a missing list
    lists = [{"tags": ["t1", None, "t3"]}, {"tags": "t1|t3"}, {}]
    two = inputs([{**KNOWN, "brand": "never seen", **one} for one in lists])
    assert two["ids_6"][0].tolist() == two["ids_6"][1].tolist()
    assert two["ids_6"][2].tolist() == [-1, -1]
    assert two["ids"][0, 1] == 0
    assert inputs([])["ids"].shape == (0, 5)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"age": "old"}, "column 'age': 'old' is not a number"),
        ({"age": float("inf")}, "column 'age': inf is infinite"),
        ({"user": "x"}, "column 'user': 'x' is not an integer"),
        ({"city": 5.0}, "column 'city': 5.0 is a float, not text; kind: integer takes whole ones"),
        ({"code": "12"}, "column 'code': '12' is not eight hexadecimal digits"),
        ({"tags": ["t1", "t99"]}, "column 'tags': category 't99' was not seen in training"),
        ({"user": None}, "column 'user': a missing value was not seen in training"),
        ({"age": 10**400}, "column 'age': a whole number of 1329 bits is infinite"),
        ({"depth": 1e39}, "column 'depth': 1e[+]39 is outside 32 bits"),
        ({"tags": 5}, "column 'tags': 5 is no list"),
        ({"tags": ["t1"] * 5}, "column 'tags': 5 values, max_length = 4"),
        ({"words": [1, 2], "much": [0.5]}, "column 'much': 1 weights for 2 values of 'words'"),
        ({"words": [1], "much": ["x"]}, "column 'much': 'x' is not a number"),
        ({"words": [1], "much": [None]}, "column 'much': a weight is empty"),
    ],
)
def test_a_value_that_a_served_model_cannot_take_is_named(
    row: dict[str, Any], told: str, served: Path
) -> None:
    with pytest.raises(DataError, match=f"^row 2: {told}"):
        ModelInputs(served)([KNOWN, {**KNOWN, **row}])


def test_what_is_no_row_is_named(served: Path) -> None:
    with pytest.raises(DataError, match="row 2: 'age' is not an object of values by column"):
        ModelInputs(served)([KNOWN, "age"])  # type: ignore[list-item]


def test_weights_of_bags_are_not_fed_with_single_ids(served: Path, tmp_path: Path) -> None:
    about = json.loads((served / "model.json").read_text())
    about["data"]["schema"]["categorical"][5] |= {"expand_to": 3}
    shutil.copytree(served / "vocabulary", tmp_path / "vocabulary")
    (tmp_path / "model.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="the ids of tags stand for bags"):
        ModelInputs(tmp_path)
