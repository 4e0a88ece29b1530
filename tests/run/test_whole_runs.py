"""A run is complete in itself: wherever it lies, and whatever has become of its rows."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.keys import keys_of
from dlrm_hybrid.config.paths import absolute
from dlrm_hybrid.data.preprocessing import PREPROCESSING_FOLDER
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.record import Effect
from dlrm_hybrid.types import DataError

SCHEMA = """
label: y
dense: [{name: x, transform: standardise}]
categorical:
  - {name: item}
  - {name: shop, kind: integer}
  - {name: tags, max_length: 3, separator: "|"}
split: {by: fraction, test: 0.2, seed: 0}
vocabulary: all
"""
BY_FILE = "split: {by: file, test: [test.csv]}"
ROWS = 400
STEPS = ("model=dlrm_small", "train.steps=2", "telemetry.tensorboard=false", "optimizer.lr=0.5")


def write_rows(path: Path, seed: int) -> Path:
    """Rows of the same categories in any order; other seeds give them other numbers."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(ROWS)
    lines = [f"{i % 2},{i * 0.7 + seed:.2f},item{i % 30},{i % 7},t{i % 5}|t{i % 3}" for i in order]
    path.write_text("\n".join(["y,x,item,shop,tags", *lines]) + "\n")
    return path


def command(verb: str, *overrides: str) -> int:
    return run(["dlrm_hybrid", verb, *overrides])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with raw and prepared rows and a run, all named relative to it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "schema.yaml").write_text(SCHEMA)
    write_rows(folder / "one.csv", 1)
    before = Path.cwd()
    os.chdir(folder)
    try:
        rows = ("data=table", "data.schema=schema.yaml", "data.raw=one.csv", "data.prepared=rows")
        assert command("train", *rows, *STEPS, "hydra.run.dir=run") == 0
    finally:
        os.chdir(before)
    return folder


def scores(run: Path, rows: Path, output: Path) -> bytes:
    given = (f"predict.checkpoint={run}", f"predict.rows={rows}", f"predict.output={output}")
    assert command("predict", *given) == 0
    return output.read_bytes()


def test_a_moved_run_is_used_from_any_directory(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = scores(made / "run", made / "one.csv", tmp_path / "here.csv")
    shutil.copytree(made / "run", "moved")
    assert scores(Path("moved"), made / "one.csv", tmp_path / "moved.csv") == expected
    assert command("evaluate", "evaluate.checkpoint=moved", "evaluate.output=e.json") == 0
    assert json.loads(Path("e.json").read_text())["trained_on"]
    told = ("export.output=out", "export.format=safetensors")
    assert command("export", "export.checkpoint=moved", *told) == 0
    # and a checkpoint is complete in itself
    shutil.copytree(made / "run" / "checkpoints" / "step_00000002", "alone")
    assert scores(Path("alone"), made / "one.csv", tmp_path / "alone.csv") == expected
    config = json.loads(Path("moved/config.json").read_text())["data"]
    assert config["prepared"] == str(made / "rows") and config["raw"] == str(made / "one.csv")


def test_a_run_outlives_its_rows(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = scores(made / "run", made / "one.csv", tmp_path / "before.csv")
    shutil.copytree(made, tmp_path / "made", symlinks=True)
    monkeypatch.chdir(tmp_path / "made")
    rows = ("data=table", "data.schema=schema.yaml", "data.raw=one.csv", "data.prepared=rows")
    assert command("train", *rows, *STEPS, "hydra.run.dir=other") == 0
    config = tmp_path / "made" / "other" / "config.json"
    assert json.loads(config.read_text())["data"]["prepared"] == str(tmp_path / "made" / "rows")
    write_rows(Path("one.csv"), 2)
    capsys.readouterr()
    lost = f"{tmp_path / 'made' / 'other'} learned from these rows: without them a run predicts and"
    assert command("prepare", *rows) == 3
    assert lost in capsys.readouterr().err
    assert command("prepare", *rows, "prepare.overwrite=true") == 0
    assert lost in capsys.readouterr().out
    write_rows(Path("one.csv"), 1)
    assert scores(Path("other"), Path("one.csv"), tmp_path / "after.csv") == expected
    capsys.readouterr()
    assert command("evaluate", "evaluate.checkpoint=other") == 3
    assert "not the rows that other/checkpoints/step_00000002 was trained on" in (
        capsys.readouterr().err
    )
    told = ("export.output=out", "export.format=safetensors")
    assert command("export", "export.checkpoint=other", *told) == 0
    assert "checked on drawn rows: those that the run was trained on are not there" in (
        capsys.readouterr().out
    )
    shutil.rmtree("rows")
    assert command("export", "export.checkpoint=other", told[1], "export.output=gone") == 0
    check = json.loads(Path("gone/model.json").read_text())["check"]
    assert check["before"] is None and check["rows"] == 10_000 and check["rows_apart"] == 0
    weights = safetensors.numpy.load_file("out/model.safetensors")
    assert weights["embedding.1.weight"].shape[0] == 30


def test_equal_ids_of_other_categories_are_other_rows(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (made / "one.csv").read_text()
    Path("one.csv").write_text(text.replace("item", "thing").replace("y,x,thing", "y,x,item"))
    rows = ("data=table", f"data.schema={made / 'schema.yaml'}", "data.raw=one.csv")
    there = "data.prepared=there"
    assert command("prepare", *rows, there) == 0
    assert command("evaluate", f"evaluate.checkpoint={made / 'run'}", there) == 3
    assert "their vocabulary differs: vocabulary_xxh3" in capsys.readouterr().err
    more = (there, *STEPS, f"checkpoint.resume={made / 'run'}", "hydra.run.dir=on")
    assert command("train", *rows, *more) == 3
    told = capsys.readouterr().err
    assert "there was prepared differently: its vocabularies are not on those of" in told
    assert told.endswith("prepare.overwrite=true\n")
    assert command("train", *rows[:2], *more) == 3
    told = "data.prepared = there: its ids are of other categories or columns"
    assert told in capsys.readouterr().err


def flip(folder: Path) -> None:
    path = folder / "vocabulary" / "2.npy"
    content = bytearray(path.read_bytes())
    path.unlink()  # the run has the same file
    content[-1] ^= 1
    path.write_bytes(content)


def other_schema(folder: Path) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace('"standardise"', '"none"'))


def link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, "does not match manifest.json"),
        (other_schema, r"not the rows that .* dense\[0\] is \['x', 'none'"),
        (link, "is a link"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (shutil.rmtree, "has no preprocessing folder with schema, vocabularies and scales"),
    ],
)
def test_a_damaged_preprocessing_is_refused(
    damage: object, told: str, made: Path, tmp_path: Path
) -> None:
    assert callable(damage)
    shutil.copytree(made / "run" / "checkpoints" / "step_00000002", tmp_path / "alone")
    damage(tmp_path / "alone" / PREPROCESSING_FOLDER)
    with pytest.raises(DataError, match=told):
        Predictor(tmp_path / "alone")


def test_an_export_is_imported_category_by_category(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that number the same categories otherwise get the row of each category."""
    monkeypatch.chdir(tmp_path)
    told = ("export.output=out", "export.format=safetensors")
    assert command("export", f"export.checkpoint={made / 'run'}", *told) == 0
    text = (made / "one.csv").read_text().splitlines()
    # Without scales, which follow the order of the rows in their last digits.
    schema = SCHEMA.replace("split: {by: fraction, test: 0.2, seed: 0}", BY_FILE)
    Path("schema.yaml").write_text(schema.replace("standardise", "log1p"))
    Path("test.csv").write_text("\n".join(text[:2]) + "\n")
    Path("one.csv").write_text("\n".join(text) + "\n")
    Path("other.csv").write_text("\n".join([text[0], *text[:0:-1]]) + "\n")
    schemas, small = ("data=table", "data.schema=schema.yaml"), ("model=dlrm_small",)
    first = ("data.raw=[one.csv,test.csv]", "data.prepared=first")
    assert command("train", *schemas, *first, *STEPS, "hydra.run.dir=first_run") == 0
    assert command("export", "export.checkpoint=first_run", "export.output=e", told[1]) == 0
    rows = ("data.raw=[other.csv,test.csv]", "data.prepared=other")
    given = ("import.names=ours", "import.output=in", *schemas, *rows, *small)
    assert command("import", "import.file=e/model.safetensors", *given) == 0
    names = [np.load(f"{folder}/vocabulary/2.npy").tolist() for folder in ("first", "other")]
    assert names[0] != names[1] and sorted(names[0]) == sorted(names[1])
    expected = scores(Path("first_run"), Path("one.csv"), tmp_path / "1.csv")
    assert scores(Path("in"), Path("one.csv"), tmp_path / "2.csv") == expected
    # a file under another name may be of other categories
    Path("e/model.safetensors").rename("e/weights.safetensors")
    given = ("import.names=ours", "import.output=no", *schemas, *rows, *small)
    assert command("import", "import.file=e/weights.safetensors", *given) == 3
    told_error = "is of model.safetensors, not of weights.safetensors, so the categories"
    assert told_error in capsys.readouterr().err
    Path("e/weights.safetensors").rename("e/model.safetensors")
    # other columns, and categories without a row, are named
    given = ("import.names=ours", "import.output=no", *schemas, *rows, *small)
    assert command("import", "import.file=out/model.safetensors", *given) == 3
    told_error = "dense[0].transform: prepared with 'standardise', the schema says 'log1p'"
    assert told_error in capsys.readouterr().err
    Path("other.csv").write_text("\n".join([*text, "1,1,new,99,t1"]) + "\n")
    rows = ("data.raw=[other.csv,test.csv]", "data.prepared=more")
    given = ("import.names=ours", "import.output=no", *schemas, *rows, *small)
    assert command("import", "import.file=e/model.safetensors", *given) == 3
    error = capsys.readouterr().err
    assert "item: 1 of 31 categories are not in the file's vocabulary, first 'new'" in error
    assert "shop: 1 of 8 categories are not in the file's vocabulary, first 99" in error
    Path("e/model.json").write_text('{"file": "model.safetensors", "inputs": []}')
    assert command("import", "import.file=e/model.safetensors", *given) == 3
    assert "model.json: it, or a vocabulary" in capsys.readouterr().err


PATHS = st.sampled_from(keys_of(Effect.PATH))


@given(st.dictionaries(PATHS, st.text("ab/._", min_size=1), max_size=3))
def test_recorded_paths_are_absolute_and_stay(paths: dict[str, str]) -> None:
    values: dict[str, dict[str, object]] = {}
    for key, path in paths.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = [path, path] if key == "data.raw" else path
    values = {key: one.get("", one) for key, one in values.items()}  # type: ignore[misc]
    found = absolute(values)
    assert absolute(found) == found
    for key, path in paths.items():
        section, _, name = key.partition(".")
        kept = found[section][name] if name else found[section]
        full = os.path.normpath(Path(path).absolute())
        assert kept == ([full, full] if key == "data.raw" else full)
