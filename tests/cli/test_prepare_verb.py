"""Rows on the command line: prepared, found, refused with the command that helps, checked."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.synthetic import generate
from dlrm_hybrid.run.assembly import build

SMALL = ("model=dlrm_small", "train.batch_size=64", "train.steps=2", "telemetry.tensorboard=false")
REAL = ("data=criteo_kaggle", "data.processes=1")


@pytest.fixture(scope="module")
def raw_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    generate(path, 2000, 5, build.profile(), lambda rows: None)
    return path


@pytest.fixture
def raw(raw_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`train.txt` in the working folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copyfile(raw_rows, "train.txt"))


def program(verb: str, *arguments: str) -> int:
    return run(["dlrm_hybrid", verb, *arguments])


def advised(error: str) -> list[str]:
    """The arguments of the command that a message ends with."""
    command = shlex.split(error.splitlines()[-1])
    assert command[:3] == ["python", "-m", "dlrm_hybrid"]
    return command[3:]


def test_train_prepares_what_data_raw_names(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = (*REAL, *SMALL, "data.raw=train.txt")
    assert program("train", *train) == 0
    output = capsys.readouterr().out
    assert re.search(
        "preparing train.txt into data/prepared/criteo_kaggle-train-[0-9a-f]{8}\n", output
    )
    assert "2,000 rows (1,715 to train, 285 to test)" in output
    raw.unlink()
    assert program("train", *train, "train.seed=1") == 0
    output = capsys.readouterr().out
    assert "preparing" not in output
    assert "train.txt: no longer exists; using the rows prepared from it" in output


def test_a_changed_option_ends_with_the_one_command_that_helps(
    raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = (*REAL, "data.prepared=rows")
    assert program("prepare", *real, "data.raw=train.txt") == 0
    changed = (*real, "data.min_count=3")
    for verb, given in (("train", ()), ("train", ("data.raw=train.txt",))):
        assert program(verb, *changed, *given, *SMALL) == 3
        error = capsys.readouterr().err
        assert (
            "prepared differently: data.min_count: prepared with 0, the configuration says 3; "
            in error
        )
        assert set(advised(error)) == {
            *(verb, *changed, *SMALL, "data.raw=train.txt", "prepare.overwrite=true")
        }
    assert program("prepare", *changed, "data.raw=train.txt") == 3
    again = advised(capsys.readouterr().err)
    assert again == ["prepare", *changed, "data.raw=train.txt", "prepare.overwrite=true"]
    assert run(["dlrm_hybrid", *again]) == 0
    assert "replacing it\n" in capsys.readouterr().out
    assert program("prepare", *changed, "data.raw=train.txt") == 0
    assert "rows is up to date: 2,000 rows" in capsys.readouterr().out


def test_rows_that_nobody_has_prepared(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("train", *REAL, *SMALL) == 3
    error = capsys.readouterr().err
    assert "data.prepared = data/prepared/criteo_kaggle: no prepared rows here" in error
    assert advised(error) == ["train", *REAL, *SMALL, "data.raw=train.txt"]
    assert program("prepare", *REAL) == 2
    assert "data.raw = null" in capsys.readouterr().err


def test_check_reads_everything(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = (*REAL, "data.prepared=rows")
    assert program("prepare", *real, "data.raw=train.txt") == 0
    check = (*real, "prepare.check=true")
    assert program("prepare", *check) == 0
    assert "2,000 rows, all checksums and values are valid\n" in capsys.readouterr().out
    assert program("prepare", *check, "data.raw=train.txt") == 0
    assert "are valid; the raw files match\n" in capsys.readouterr().out
    shutil.copy("train.txt", "again.txt")
    assert program("prepare", *check, "data.raw=[train.txt,again.txt]") == 3
    assert "data.raw: 2 files" in capsys.readouterr().err
    raw.write_bytes(raw.read_bytes()[:-1])
    assert program("prepare", *check, "data.raw=train.txt") == 3
    assert re.search("train.txt: differs from the file that .* from", capsys.readouterr().err)
    shard = Path("rows/ids.npy")
    records = np.fromfile(shard, np.uint8)
    records[-1] ^= 1
    shard.write_bytes(records.tobytes())
    assert program("prepare", *check) == 3
    error = capsys.readouterr().err
    assert "ids.npy: rows 0 to 1,999 (counted from 0): checksum differs" in error


def test_synthetic_rows_with_another_manifest_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ("data.rows=1000", "data.processes=1")
    assert program("prepare", *rows) == 0
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.write_text('{"format": 1}')
    assert program("prepare", *rows) == 0
    output = capsys.readouterr().out
    assert "not a manifest of prepared rows: format: " in output
    assert "replacing it" in output
    assert program("prepare", *rows, "prepare.check=true") == 0


@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_a_raw_file_that_is_not_there_is_told_before_anything_is_made(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program(verb, *REAL, "data.raw=nope.txt") == 3
    told = capsys.readouterr()
    assert told.err == "nope.txt: no such file (data.raw)\n"
    assert "preparing" not in told.out
    assert not (tmp_path / "data").exists()
