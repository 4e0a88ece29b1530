"""Limits of the system are named, with their value, and leave nobody behind."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid import limits
from dlrm_hybrid.disk import refusals
from dlrm_hybrid.types import ResourceError


def test_as_many_open_files_as_may_be_are_taken() -> None:
    program = (
        "import resource\nfrom dlrm_hybrid.limits import raise_open_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "raise_open_files()\n"
        "soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "assert soft == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)), soft\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(24, "Too many open files"), r"RLIMIT_NOFILE = [\d,]+ \(ulimit -n\)"),
        (MemoryError(), "out of memory: "),
        (RuntimeError("can't start new thread"), "no room for another process or thread: "),
        (ImportError("libtorch.so: failed to map segment from shared object"), "out of memory"),
    ],
)
def test_a_limit_that_is_reached_is_named(error: Exception, named: str) -> None:
    with pytest.raises(ResourceError, match=named), refusals():
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shape"), refusals():
        raise RuntimeError("a tensor has another shape")


def test_a_temporary_folder_whose_name_is_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    length = len(os.fsencode(folder))
    with pytest.raises(ResourceError, match=f"has {length} bytes; a socket below it needs at most"):
        limits.check_temporary_folder()


@pytest.mark.parametrize(
    ("which", "limit", "named"),
    [
        (resource.RLIMIT_NOFILE, 12, "RLIMIT_NOFILE = 12 (ulimit -n)"),
        pytest.param(
            *(resource.RLIMIT_AS, 600 << 20, "RLIMIT_AS = 614,400 KiB (ulimit -v)"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_a_limit_stops_says_so_in_one_line(
    which: int, limit: int, named: str, small_rows: list[str], tmp_path: Path
) -> None:
    arguments = [*small_rows, "train.steps=5", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_hybrid", "train", *arguments],
        preexec_fn=lambda: resource.setrlimit(which, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
