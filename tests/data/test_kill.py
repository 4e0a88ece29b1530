from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import prepare_child
import pytest
from criteo_rows import everything, make_lines, run_prepare
from patience import HANG_SECONDS


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(make_lines(9_000, seed=1)))
    return path


@pytest.fixture(scope="module")
def made(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run with the options of `prepare_child` makes."""
    output = tmp_path_factory.mktemp("made") / "out"
    run_prepare(raw, output, min_count=2)
    return output


def start_child(raw: Path, output: Path, stage: str) -> subprocess.Popen[str]:
    """A prepare that has halted in `stage`."""
    process = subprocess.Popen(
        [sys.executable, prepare_child.__file__, str(raw), str(output), "2", stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halted\n"
    return process


@pytest.mark.parametrize("stage", ["parse", "vocabulary", "assemble"])
def test_killed_and_started_again_gives_the_same_bytes(
    tmp_path: Path, raw: Path, made: Path, stage: str
) -> None:
    output = tmp_path / "out"
    child = start_child(raw, output, stage)
    child.kill()
    child.communicate(timeout=HANG_SECONDS)
    assert not output.exists()
    left = [path.stat().st_size for path in (tmp_path / "out.partial").rglob("spill-*/1.bin")]
    assert left[0] > 0, "the kill came before anything was written"
    assert not run_prepare(raw, output, min_count=2).up_to_date
    assert everything(output) == everything(made)
    assert not (tmp_path / "out.partial").exists()


def test_ctrl_c_ends_all_threads_and_leaves_nothing(tmp_path: Path, raw: Path) -> None:
    child = start_child(raw, tmp_path / "out", "parse")
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=HANG_SECONDS)
    assert child.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors
    assert list(tmp_path.iterdir()) == []
