"""One value written to CSV, Parquet, a frame and JSON is one number, one category or one refusal.

They are read by what `prepare`, `predict`, `Predictor` and the example of a server read them with.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.sources.columns import Values
from dlrm_hybrid.data.sources.files import open_source
from dlrm_hybrid.data.sources.values import read_values
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.predict.sources import frame_block, read_blocks
from dlrm_hybrid.saved.inputs import ListInputs, ModelInputs, inputs_of
from dlrm_hybrid.types import DataError

SCHEMA = """
label: y
dense: [{name: d, missing: 7}, {name: z, transform: standardise}]
categorical:
  - {name: s, default: a}
  - {name: k, kind: integer}
  - {name: t, max_length: 3, separator: "|", truncate: last}
missing_values: ["—", NA]
split: {by: fraction, test: 0.2, seed: 1}
"""
WORDS = ["a", "5", "True", "False", "5.0", "05", "nan", " 7 ", "", "1.50"]
WHOLE = [0, 1, 5, 7, 1000, -3, 10**16, 2**63 - 1, ""]
EXAMPLES = settings.default.max_examples // 3 if settings.default else 16
LISTS = ListInputs((2,))
BASE = {"d": 1.5, "z": 0.5, "s": "a", "k": 5, "t": "x|y"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meaning")
    rng = np.random.default_rng(0)
    rows = [
        {"y": i % 2, "d": i / 9, "z": rng.normal(), "s": WORDS[i % 10], "k": WHOLE[i % 9],
         "t": "|".join(["x", "y", "True", "5"][: i % 4])}
        for i in range(300)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "a.csv", index=False)
    (folder / "schema.yaml").write_text(SCHEMA, encoding="utf-8")
    table = ["data=table", f"data.schema={folder / 'schema.yaml'}", f"data.raw={folder / 'a.csv'}"]
    more = [f"data.prepared={folder / 'prepared'}", "model=dlrm_small", "train.steps=2"]
    to = f"hydra.run.dir={folder / 'run'}"
    assert run(["dlrm_hybrid", "train", *table, *more, "telemetry.tensorboard=false", to]) == 0
    given = (f"export.checkpoint={folder / 'run'}", f"export.output={folder / 'out'}")
    assert run(["dlrm_hybrid", "export", *given, "export.format=safetensors"]) == 0
    return folder


@pytest.fixture(scope="module")
def predictor(own: Path) -> Predictor:
    return Predictor(own / "run")


@pytest.fixture(scope="module")
def inputs(own: Path) -> ModelInputs:
    return ModelInputs(own / "out")


def as_text(value: Any) -> str:
    """A value as pandas writes it to CSV."""
    if value is None or value != value:
        return ""
    if isinstance(value, list):
        return "|".join(map(as_text, value))
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def typed(value: Any) -> Any:
    try:
        return pa.array([value], from_pandas=True)
    except (OverflowError, pa.ArrowInvalid):
        return pa.array([Decimal(value)], pa.decimal128(38, 0))


def for_json(value: Any) -> Any:
    if isinstance(value, list):
        return [for_json(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if value is None or value != value else value


Read = Callable[[dict[str, Any], str, Any], Any]


def encoded(predictor: Predictor, values: Values) -> dict[str, Any]:
    return inputs_of(predictor.encoder.dense(values), predictor.encoder.bags(values), LISTS)


def readers(folder: Path, predictor: Predictor, inputs: ModelInputs) -> dict[str, Read]:
    path = folder / "one"

    def write_csv(row: dict[str, Any]) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
            writer.writerows([list(row), [as_text(value) for value in row.values()]])

    def write_parquet(row: dict[str, Any]) -> None:
        pq.write_table(pa.table({name: typed(value) for name, value in row.items()}), path)

    def prepare() -> Any:
        schema = replace(predictor.schema, ignore=())
        source = open_source(path, predictor.schema.dialect, 1 << 16, lambda piece: None)
        (block,) = source.blocks(schema.read_columns)
        values, bad = read_values(block, schema, "one", labels=True)
        if bad:
            raise DataError(bad[0].reason)
        return encoded(predictor, values)

    def predict() -> Any:
        (block,) = read_blocks([path], predictor.schema, (), 1 << 16, lambda done: None)
        return encoded(predictor, block.values)

    def of_files(write: Callable[[dict[str, Any]], None], read: Callable[[], Any]) -> Read:
        def found(row: dict[str, Any], name: str, value: Any) -> Any:
            write({"y": 1, **row, name: value})
            return read()

        return found

    def frame(row: dict[str, Any], name: str, value: Any) -> Any:
        block = frame_block(pd.DataFrame({k: [v] for k, v in {**row, name: value}.items()}),
                            predictor.schema)  # fmt: skip
        return encoded(predictor, block.values)

    def mixed(row: dict[str, Any], name: str, value: Any) -> Any:
        """Beside a value of another type, as a column of objects."""
        both = {k: pd.Series([v, v], dtype=object) for k, v in row.items()}
        both[name] = pd.Series([value, "5" if not isinstance(value, str) else 5], dtype=object)
        block = frame_block(pd.DataFrame(both), predictor.schema)
        return {k: v[:1] for k, v in encoded(predictor, block.values).items()}

    return {
        "prepare csv": of_files(write_csv, prepare),
        "predict csv": of_files(write_csv, predict),
        "prepare parquet": of_files(write_parquet, prepare),
        "predict parquet": of_files(write_parquet, predict),
        "frame": frame,
        "mixed frame": mixed,
        "json": lambda row, name, value: inputs(
            json.loads(json.dumps([{**row, name: for_json(value)}], default=str))
        ),
    }


def outcome(read: Read, name: str, value: Any) -> Any:
    try:
        found = read(BASE, name, value)
    except DataError:
        return "refused"
    lists = [one for one in found["ids_3"][0].tolist() if one >= 0]
    return found["dense"].tolist(), found["ids"].tolist(), lists


texts = st.sampled_from(
    [*WORDS, "—", "NA", "true", "TRUE", "fAlse", "1e3", "1e16", "1e+16", "NaN", "inf", "-inf",
     "1e39", "-1e39", "1e-400", "1e400", "-nan", "1_000", "0x10", "１２", "1,5", "+5", "5.", "\t5",
     "9" * 20, "9" * 400, "1e999999999999", "2024-01-01", "é|x"]
)  # fmt: skip
texts |= st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)
scalars = (
    texts
    | st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 5, -3, 10**16])
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([5.0, 1e16, 1e22, 0.1, 1e39, 3e38, math.nan, math.inf])
    | st.decimals(-(10**9), 10**9, places=2)
    | st.sampled_from([np.int64(5), np.float64(5), np.bool_(True), np.uint64(2**63 + 5)])
)


@pytest.mark.parametrize("name", ["d", "z", "s", "k"])
@settings(max_examples=EXAMPLES)
@given(value=scalars)
@example(value=10**30)
@example(value=Decimal("1.50"))
@example(value=True)
@example(value="TRUE")
@example(value="—")
@example(value="1e+16")
def test_a_value_means_the_same_in_all_formats(
    own: Path, predictor: Predictor, inputs: ModelInputs, name: str, value: Any
) -> None:
    reads = readers(own, predictor, inputs)
    if name == "s" and isinstance(value, float):  # of which CSV has one of many texts
        reads = {key: read for key, read in reads.items() if "csv" not in key}
        if math.isfinite(value):
            assert outcome(reads["frame"], name, value) == "refused"
    found = {key: outcome(read, name, value) for key, read in reads.items()}
    assert len({repr(one) for one in found.values()}) == 1, found


@settings(max_examples=EXAMPLES)
@given(
    value=st.lists(
        st.sampled_from(["x", "y", "True", "TRUE", "5", "NA", "—", "", "new"]), max_size=6
    )
    | st.lists(st.booleans(), max_size=4)
    | st.lists(st.sampled_from([5, 6, None]), max_size=5)
    | st.none()
    | st.sampled_from(["", "NA", "x", "x|—|TRUE", "|", "new|x|y|5|x"])
)
@example(value=math.nan)
@example(value=[None])
def test_a_list_means_the_same_in_all_formats(
    own: Path, predictor: Predictor, inputs: ModelInputs, value: Any
) -> None:
    reads = readers(own, predictor, inputs)
    del reads["mixed frame"]
    if value == [""] or value == [None]:  # of which the text is an empty one
        reads = {key: read for key, read in reads.items() if "csv" not in key}
    found = {key: outcome(read, "t", value) for key, read in reads.items()}
    assert len({repr(one) for one in found.values()}) == 1, found
    assert "refused" not in found.values()


def test_values_are_what_they_say(own: Path, predictor: Predictor, inputs: ModelInputs) -> None:
    for read in readers(own, predictor, inputs).values():
        for name, one, other in [
            ("d", True, 1), ("d", "FALSE", 0), ("d", "—", 7), ("d", None, 7), ("k", "true", 1),
            ("k", "NA", None), ("k", 5.0, 5), ("k", "1e3", 1000), ("s", True, "true"),
            ("s", "FALSE", "False"), ("s", "NA", None), ("s", 5, "5"),
            ("s", Decimal("1.50"), "1.50"),
        ]:  # fmt: skip
            assert outcome(read, name, one) == outcome(read, name, other), (name, one)
            assert outcome(read, name, one) != "refused"
        assert outcome(read, "s", True) != outcome(read, "s", "a")
        for value in ("1e39", "-1e39", "1e400", "1_000", "0x10", "１２", "x"):
            assert outcome(read, "d", value) == "refused"
        assert outcome(read, "z", "3e38") != "refused"  # whose deviation is about 1


def test_rows_without_columns_or_with_others(
    own: Path, predictor: Predictor, inputs: ModelInputs, tmp_path: Path
) -> None:
    reads = readers(own, predictor, inputs)
    known = {key: outcome(read, "k", 5) for key, read in reads.items()}
    for row, told in [
        ({"d": 1.5, "z": 0.5, "k": 5, "t": "x|y"}, None),  # `s` has a default, the one of BASE
        ({"d": 1.5, "z": 0.5, "s": "a", "t": "x|y"}, "no column 'k'"),
        (
            {**BASE, "kk": 5},
            r"column 'kk' is not in the schema \((predict\.)?extra=ignore leaves it\)",
        ),
        ({"d": 1, "z": 1, "t": "x", "kk": 5}, r"no column 'k'; column 'kk' is not in the schema"),
    ]:
        pd.DataFrame([row]).to_csv(tmp_path / "one.csv", index=False)
        for score in (
            lambda: predictor.predict(pd.DataFrame([row])),  # noqa: B023
            lambda: list(
                read_blocks(
                    [tmp_path / "one.csv"], predictor.schema, (), 1 << 16, lambda done: None
                )
            ),
            lambda: inputs([row]),  # noqa: B023
        ):
            if told is None:
                score()
            else:
                with pytest.raises(DataError, match=told):
                    score()
    without = {name: value for name, value in BASE.items() if name != "s"}
    assert inputs([without])["ids"].tolist() == known["json"][1]
    batch = predictor.batch(frame_block(pd.DataFrame([without]), predictor.schema))
    assert inputs_of(batch.dense_BI, batch.bags, LISTS)["ids"].tolist() == known["frame"][1]
    more = {**BASE, "kk": 5}
    assert ModelInputs(own / "out", extra="ignore")([more])["ids"].tolist() == known["json"][1]
    wide = Predictor(own / "run", extra="ignore")
    assert wide.predict(pd.DataFrame([more])) == predictor.predict(pd.DataFrame([BASE]))


def test_frames_without_lists_or_rows_are_scored(predictor: Predictor) -> None:
    empty = predictor.predict(pd.DataFrame([{**BASE, "t": ""}]))
    for tags in ([None], [float("nan")], [[]], [["—"]], ["NA"]):
        assert predictor.predict(pd.DataFrame({**BASE, "t": tags})) == empty
    for tags in ([], pd.Series([], dtype=float), pd.Series([], dtype="string")):
        rows = pd.DataFrame({name: [] for name in BASE} | {"t": tags})
        assert predictor.predict(rows).shape == (0,)


def test_a_dense_value_that_becomes_infinite_is_refused(
    own: Path, predictor: Predictor, inputs: ModelInputs
) -> None:
    frame = pd.DataFrame([BASE, {**BASE, "z": 3.4e38}])
    encoders = predictor.encoder, inputs._encoder  # type: ignore[reportPrivateUsage]
    before = [encoder.columns for encoder in encoders]
    for encoder, columns in zip(encoders, before, strict=True):
        small = (None, replace(columns.scales[1], deviation=1e-3))
        encoder.columns = replace(columns, scales=small)
    try:
        with pytest.raises(
            DataError, match=r"DataFrame: row 2: column 'z': 3.4e\+38 is outside 32"
        ):
            predictor.predict(frame)
        with pytest.raises(DataError, match=r"row 2: column 'z': 3.4e\+38 is outside 32 bits"):
            inputs(frame.to_dict("records"))
    finally:
        for encoder, columns in zip(encoders, before, strict=True):
            encoder.columns = columns
