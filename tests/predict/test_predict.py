"""Scores of files and frames are those of `evaluate`; what cannot be scored is named."""

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from forked import exit_code_of
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas.reading import builtin, loads
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.predict import Predictor, scoring
from dlrm_hybrid.predict.sources import frame_block, read_blocks
from dlrm_hybrid.telemetry.metrics import BinaryMetrics
from dlrm_hybrid.types import DataError

ROWS, TEST_ROWS = 7000, 1000
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
NAMES = ("label", *DENSE, *CATEGORICAL)
SCHEMA = builtin("criteo_kaggle")


@pytest.fixture(scope="module")
def shards(small_rows: list[str]) -> Shards:
    return open_shards(Path(small_rows[1].partition("=")[2]), None)


@pytest.fixture(scope="module")
def frame(raw: Path) -> pd.DataFrame:
    """The rows as pandas has them."""
    return pd.read_csv(raw, sep="\t", header=None, names=list(NAMES))


@pytest.fixture(scope="module")
def predictor(trained: Path) -> Predictor:
    return Predictor(trained)


def predict(run_folder: Path, rows: Path | str, output: Path, *overrides: str) -> int:
    given = (f"predict.checkpoint={run_folder}", f"predict.rows={rows}")
    return run(["dlrm_hybrid", "predict", *given, f"predict.output={output}", *overrides])


def test_scores_are_those_of_the_prepared_rows_and_of_evaluate(
    trained: Path,
    raw: Path,
    predictor: Predictor,
    shards: Shards,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert predict(trained, raw, tmp_path / "s.parquet") == 0
    told = capsys.readouterr().out
    assert f"wrote {tmp_path / 's.parquet'}: 7,000 rows, " in told and " rows/s" in told
    found = pd.read_parquet(tmp_path / "s.parquet")
    assert list(found) == ["row", "score"]
    assert found["row"].tolist() == list(range(ROWS))

    (batch,) = sequential_batches(shards, range(ROWS), ROWS)
    expected = predictor._serving.model.logits(batch)  # type: ignore[reportPrivateUsage]
    assert expected.std() > 0.01
    scores = torch.from_numpy(expected).sigmoid().numpy()
    np.testing.assert_allclose(found["score"], scores, rtol=0, atol=1e-6)

    output = tmp_path / "evaluated.json"
    argv = ["evaluate", f"evaluate.checkpoint={trained}", f"evaluate.output={output}"]
    assert run(["dlrm_hybrid", *argv]) == 0
    metrics = BinaryMetrics()
    score = found["score"].to_numpy(np.float64)[-TEST_ROWS:]
    metrics.add(np.log(score / (1 - score)).astype(np.float32), batch.label_B[-TEST_ROWS:])
    evaluated = json.loads(output.read_text())
    assert metrics.scores().log_loss == pytest.approx(evaluated["log_loss"], abs=1e-6)
    assert metrics.scores().auc == pytest.approx(evaluated["auc"], abs=1e-4)


def test_logits_have_the_bits_of_an_evaluation(
    predictor: Predictor, frame: pd.DataFrame, shards: Shards
) -> None:
    some = frame.iloc[:4096]
    (batch,) = sequential_batches(shards, range(4096), 4096)
    expected = predictor._serving.model.logits(batch)  # type: ignore[reportPrivateUsage]
    np.testing.assert_array_equal(predictor.logits(frame_block(some, SCHEMA)), expected)


def without_label(raw: Path, path: Path) -> None:
    lines = raw.read_text().splitlines(keepends=True)
    path.write_text("".join(line.partition("\t")[2] for line in lines))


def compressed(raw: Path, path: Path) -> None:
    path.write_bytes(gzip.compress(raw.read_bytes()))


def comma_separated(raw: Path, path: Path) -> None:
    pd.read_csv(raw, sep="\t", header=None, names=list(NAMES)).to_csv(path, index=False)


def parquet(raw: Path, path: Path) -> None:
    table = pd.read_csv(raw, sep="\t", header=None, names=list(NAMES))
    table[[*CATEGORICAL, *DENSE]].to_parquet(path, index=False)  # in another order, no label


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("rows.txt", without_label),
        ("rows.txt.gz", compressed),
        ("rows.csv", comma_separated),
        ("rows.parquet", parquet),
    ],
)
def test_rows_of_any_source_score_the_same(
    file: str,
    write: Callable[[Path, Path], None],
    trained: Path,
    raw: Path,
    predictor: Predictor,
    frame: pd.DataFrame,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(raw, tmp_path / file)
    assert predict(trained, tmp_path / file, tmp_path / "s.csv", "evaluate.batch_size=100") == 0
    found = pd.read_csv(tmp_path / "s.csv")
    np.testing.assert_allclose(found["score"], predictor.predict(frame), rtol=0, atol=1e-6)
    has_labels = "log-loss" in capsys.readouterr().out
    assert has_labels == (file in ("rows.txt.gz", "rows.csv"))


def test_small_blocks_and_several_files_are_numbered_through(
    trained: Path, raw: Path, predictor: Predictor, frame: pd.DataFrame, tmp_path: Path
) -> None:
    copy = shutil.copyfile(raw, tmp_path / "copy.txt")
    rows = f"[{raw},{copy}]"
    told = ("data.block_bytes=65536", "predict.keep=[C3,I2,label]")
    assert predict(trained, rows, tmp_path / "s.parquet", *told) == 0
    found = pd.read_parquet(tmp_path / "s.parquet")
    assert list(found) == ["row", "score", "C3", "I2", "label"]
    assert found["row"].tolist() == list(range(2 * ROWS))
    twice = np.tile(predictor.predict(frame), 2)
    np.testing.assert_allclose(found["score"], twice, rtol=0, atol=1e-6)
    fields = [line.split("\t") for line in raw.read_text().splitlines()] * 2
    assert found["C3"].tolist() == [one[NAMES.index("C3")] for one in fields]
    assert found["I2"].tolist() == [one[NAMES.index("I2")] for one in fields]
    assert found["label"].tolist() == [one[0] for one in fields]


NEW = "ffffffff"


def with_unknown(frame: pd.DataFrame) -> pd.DataFrame:
    changed = frame.iloc[:50].copy()
    changed.loc[[7, 9], "C4"] = NEW
    changed.loc[7, "C11"] = NEW
    return changed


def test_an_unknown_category_is_an_error_that_names_it(
    trained: Path,
    raw: Path,
    frame: pd.DataFrame,
    predictor: Predictor,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(DataError, match=r"DataFrame: row 8: column 'C4': category ffffffff was"):
        predictor.predict(with_unknown(frame))
    lines = raw.read_text().splitlines()[:20]
    fields = lines[11].split("\t")
    fields[NAMES.index("C4")] = NEW
    lines[11] = "\t".join(fields)
    (tmp_path / "new.txt").write_text("\n".join(lines) + "\n")
    assert predict(trained, tmp_path / "new.txt", tmp_path / "s.csv") == 3
    told = capsys.readouterr().err
    assert (
        f"{tmp_path / 'new.txt'}:12: column 'C4': category ffffffff was not seen in training"
        in told
    )
    assert "predict.unknown=zero" in told
    assert [path.name for path in tmp_path.iterdir()] == ["new.txt"]


def test_an_unknown_category_may_be_a_row_of_zeros(
    trained: Path, frame: pd.DataFrame, predictor: Predictor, shards: Shards
) -> None:
    zero = Predictor(trained, unknown="zero")
    changed = with_unknown(frame)
    found = zero.logits(frame_block(changed, SCHEMA))
    (batch,) = sequential_batches(shards, range(50), 50)
    model = predictor._serving.model  # type: ignore[reportPrivateUsage]
    with torch.no_grad():
        pooled_BFD = model.embeddings(Bags(torch.from_numpy(batch.bags.values)))
        pooled_BFD[[7, 9], 3] = 0
        pooled_BFD[7, 10] = 0
        (stage,) = model.stages
        expected = stage(torch.from_numpy(batch.dense_BI), pooled_BFD).squeeze(1).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(zero.encoder.unknown_F.nonzero()[0], [3, 10])
    assert zero.encoder.unknown_F[3] == 2
    known = frame.iloc[:50]
    np.testing.assert_allclose(zero.predict(known), predictor.predict(known), rtol=0, atol=1e-6)


def test_an_unknown_category_takes_the_row_for_all_of_them_where_there_is_one(
    trained_in_time: Path, raw: Path, frame: pd.DataFrame, tmp_path: Path, capsys: Any
) -> None:
    predictor = Predictor(trained_in_time)
    block = frame_block(with_unknown(frame), SCHEMA)
    ids_FR = predictor.batch(block).bags.values
    assert ids_FR[3, [7, 9]].tolist() == [0, 0] and ids_FR[10, 7] == 0
    # The test day has categories that the vocabulary lacks: as they were prepared.
    rows = open_shards(trained_in_time.parent / "rows", None)
    (batch,) = sequential_batches(rows, range(ROWS), ROWS)
    ids_FR = predictor.batch(frame_block(frame, SCHEMA)).bags.values
    np.testing.assert_array_equal(ids_FR, batch.bags.values)
    assert predict(trained_in_time, raw, tmp_path / "s.csv") == 0
    assert "values that the run has not seen: " in capsys.readouterr().out


def test_a_killed_call_leaves_the_file_that_was_there_and_the_next_one_replaces_it(
    trained: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "s.csv"
    output.write_text("before")

    def is_killed() -> None:
        written = scoring._CsvScores.write  # type: ignore[reportPrivateUsage]

        def write(file: Any, columns: Any) -> None:
            written(file, columns)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(scoring._CsvScores, "write", write)  # type: ignore[reportPrivateUsage]
        predict(trained, raw, output, "data.block_bytes=65536")

    assert exit_code_of(is_killed) == -signal.SIGKILL
    assert output.read_text() == "before"
    assert (tmp_path / ".s.csv.partial").stat().st_size > 0  # it was under way
    assert predict(trained, raw, output) == 0
    assert len(pd.read_csv(output)) == ROWS
    assert [path.name for path in tmp_path.iterdir()] == ["s.csv"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["predict.checkpoint=null"], "predict.checkpoint = null: name a run folder or one of its"),
        (["predict.rows=null"], "predict.rows = null: name the files of rows to score"),
        (["predict.output=null"], "predict.output = null: name a file, .parquet or .csv"),
        (
            ["predict.output=scores.txt"],
            "predict.output = scores.txt: must end in .parquet or .csv",
        ),
        (["predict.keep=[score]"], "predict.keep = ['score']: score is a column of this file of"),
        (["predict.keep=[row]"], "predict.keep = ['row']: row is a column of every file of"),
        (["predict.unknown=skip"], "predict.unknown = 'skip': must be 'error' or 'zero'"),
        (["train.steps=5"], "train.steps: `predict` does not read it"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(
    overrides: list[str],
    said: str,
    trained: Path,
    raw: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {
        "predict.checkpoint": str(trained),
        "predict.rows": str(raw),
        "predict.output": str(tmp_path / "s.csv"),
    }
    kept = [f"{key}={value}" for key, value in given.items() if not overrides[0].startswith(key)]
    assert run(["dlrm_hybrid", "predict", *kept, *overrides]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


GOOD = "\t".join(["1", *["5"] * 13, *[""] * 26])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("none.txt", None, "none.txt: no such file (predict.rows)"),
        ("empty.txt", "", "no rows (predict.rows)"),
        ("bad.txt", f"{GOOD}\n2{GOOD[1:]}\n", "bad.txt:2:1: label: label '2' is neither 0 nor 1"),
        ("bad.txt", GOOD[2:] + "\n" + GOOD[2:-3] + "\n", "bad.txt:2:36: C23: "),
        ("bad.txt", "x" + GOOD[3:] + "\n", "bad.txt:1:1: I1: 'x' is not an integer"),
        ("rows.csv", "I1,C1\n1,0000002a\n", "rows.csv: no column 'I2', 'I3', "),
        ("rows.csv", "", "rows.csv: empty: no header"),
        ("rows.parquet", "PAR1", "rows.parquet: cannot be read: "),
    ],
)
def test_rows_that_cannot_be_read_are_named(
    file: str,
    content: str | None,
    said: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / file).write_text(content)
    assert predict(trained, tmp_path / file, tmp_path / "s.csv", "predict.unknown=zero") == 3
    assert said in capsys.readouterr().err
    assert not (tmp_path / "s.csv").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if content is None else [file])


def test_a_column_to_keep_that_is_not_there_is_named(
    trained: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(trained, raw, tmp_path / "s.csv", "predict.keep=[user]") == 3
    said = f"{raw}: has no column user (predict.keep); Criteo text has label … C26"
    assert said in capsys.readouterr().err


def test_a_vocabulary_of_other_rows_is_refused(
    trained: Path, trained_in_time: Path, raw: Path, tmp_path: Path, capsys: Any
) -> None:
    rows = f"data.prepared={trained_in_time.parent / 'rows'}"
    assert predict(trained, raw, tmp_path / "s.csv", rows) == 3
    assert "and their vocabulary differs: " in capsys.readouterr().err


values = st.one_of(
    st.none(),
    st.just(float("nan")),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from(["0000002a", "0", "", "1e3", "ffffffff", b"x", True]),
)


@given(data=st.data())
def test_any_values_of_a_frame_score_or_are_named(
    predictor: Predictor, frame: pd.DataFrame, data: st.DataObject
) -> None:
    some = frame.iloc[:3].astype(object).reset_index(drop=True)
    for _ in range(data.draw(st.integers(1, 4))):
        row, name = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(NAMES))
        some.at[row, name] = data.draw(values)
    try:
        found = predictor.predict(some)
    except DataError as error:
        assert str(error).startswith("DataFrame: ")
    else:
        assert found.shape == (3,) and bool(np.isfinite(found).all())


def test_a_batch_is_no_part_of_the_result(predictor: Predictor, frame: pd.DataFrame) -> None:
    whole = predictor.predict(frame)
    rows = [predictor.predict(frame.iloc[at : at + 1])[0] for at in (0, 1, 6999)]
    np.testing.assert_allclose(rows, whole[[0, 1, 6999]], rtol=0, atol=1e-6)


OF_A_TABLE = loads(
    "label: y\ndense: [{name: x}]\ncategorical: [{name: c}]\nsplit: {by: fraction, test: 0.5}",
    "mine.yaml",
)


@pytest.mark.parametrize(
    ("schema", "text"),
    [(SCHEMA, f"{GOOD}\n" * 9000), (OF_A_TABLE, "y,x,c\n" + "1,0.5,a\n" * 99_000)],
)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-9], "truncated after"),
        (lambda data: data[:90] + b"\xff" * 90 + data[180:], "damaged compressed data near byte"),
        (lambda data: b"plain" + data, "not a .gz file"),
    ],
)
def test_faults_of_compressed_rows_name_the_key_of_new_rows(
    schema: Schema, text: str, damage: Callable[[bytes], bytes], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.gz"
    path.write_bytes(damage(gzip.compress(text.encode())))
    with pytest.raises(DataError, match=rf"rows.gz: .*{told}.*predict\.rows\)$"):
        list(read_blocks([path], schema, (), 1 << 20, lambda done: None))
