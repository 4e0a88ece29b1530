"""Runs that cannot begin: told before a run folder is written, without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import HANG_SECONDS
from world_runs import Train

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run import training
from dlrm_hybrid.run.readiness import no_empty_folder, thread_remark


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (
            ("train.batch_size=6001",),
            2,
            "a step of 1 trainer(s) takes 6,001 rows, but the training",
        ),
        (("checkpoint.resume=nope",), 3, "nope: no checkpoint found"),
        (("data=criteo_kaggle", "data.prepared=nope"), 3, "nope: no prepared rows here"),
        (("data.prepared=/proc/none/rows",), 5, "/proc/none/rows"),
    ],
    ids=["rows", "checkpoint", "missing", "disk"],
)
def test_what_is_missing_is_told_and_no_folder_is_left(
    small_rows: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(training, "run_attempts", start)
    folder = tmp_path / "run"
    given = [one for one in small_rows if not one.startswith("data.rows=")]
    rows = [] if overrides[0].startswith("data=criteo") else ["data.rows=7000"]
    argv = ["dlrm_hybrid", "train", *given, *rows, f"hydra.run.dir={folder}", *overrides]
    assert run(argv) == code
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("there", [".", "new", "new/deep", "new/deep/er"])
def test_only_folders_that_were_made_are_removed_with_an_empty_run_folder(
    there: str, tmp_path: Path
) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match="refused"), no_empty_folder(tmp_path / "new/deep/er"):
        assert (tmp_path / "new/deep/er").is_dir()
        raise ValueError("refused")
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert sorted(left) == [one for one in ("new", "new/deep", "new/deep/er") if there >= one]


def test_folders_that_hold_something_by_then_are_kept(tmp_path: Path) -> None:
    with no_empty_folder(tmp_path / "new/deep/er"):
        (tmp_path / "new/other").mkdir()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_a_refused_resume_leaves_the_summary_as_it_was(
    train: Train, small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values_of(small_rows)))
    (folder / "summary.json").write_text('{"status": "interrupted"}')
    assert train("run", "checkpoint.resume=auto", "data.prepared=/proc/none/rows")[0] == 5
    assert (folder / "summary.json").read_text() == '{"status": "interrupted"}'


def test_tables_larger_than_the_memory_are_refused(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=10**5))
    swap = psutil.swap_memory()
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(total=0))
    code, folder = train("run")
    assert code == 5
    error = capsys.readouterr().err
    assert "embedding tables of 35,491 rows need 0.0 GB, this machine has 0.0 GB" in error
    assert not folder.exists()


def test_nothing_slow_is_imported_to_say_so(small_rows: list[str], tmp_path: Path) -> None:
    """Torch and numba take seconds; what tells of a late error must not wait for them."""
    program = """
import sys
from dlrm_hybrid.cli import main
main._Jobs._run.__globals__["RANKED"] = ()  # no forkserver, which imports torch, in the background
code = main.run(sys.argv)
print(code, [name for name in ("torch", "numba", "pandas") if name in sys.modules])
"""
    arguments = ["train", *small_rows, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "train.batch_size=7000"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "2 []\n", done.stderr


@pytest.mark.parametrize(
    ("overrides", "cores", "load", "part"),
    [
        (["threads=1"], 1, 9.0, None),
        (["threads=4"], 8, 0.5, None),
        (["threads=4"], 8, 6.0, "4 threads while others use 6.0 of them"),
        (["threads=4"], 2, 0.0, "4 threads on 2 cores"),
        (["threads=2", "parallel=hybrid"], 8, 0.0, "7 ranks of 2 threads on 8 cores"),
    ],
)
def test_threads_that_have_no_core_are_told(
    overrides: list[str], cores: int, load: float, part: str | None
) -> None:
    remark = thread_remark(validate(values_of(overrides)), cores, load)
    if part is None:
        assert remark is None
    else:
        assert remark is not None and part in remark
