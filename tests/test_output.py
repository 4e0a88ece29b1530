"""What the program prints never waits, fails or ends a run; what is lost is said."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid import output
from dlrm_hybrid.output import Output


@pytest.fixture
def pipe() -> Generator[tuple[int, int], None, None]:
    """A pipe of one page, its reader first."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    for descriptor in (reader, writer):
        os.close(descriptor)


def fill(writer: int) -> None:
    """From now on every write waits."""
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)


def test_all_is_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        out = Output(file.fileno(), "stdout", report_to=None)
        for number in range(2000):
            out.write(f"{number}\n".encode())
        out.finish()
    assert path.read_text().split() == [str(number) for number in range(2000)]


def test_one_large_write_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_PENDING_BYTES", 10_000)
    path = tmp_path / "out"
    with path.open("wb") as file:
        out = Output(file.fileno(), "stdout", report_to=None)
        out.write(b"x" * 50_000)
        out.finish()
    assert path.read_bytes() == b"x" * 50_000


def test_who_does_not_read_holds_nobody_up(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_PENDING_BYTES", 10_000)
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.0)
    reader, writer = pipe
    log = tmp_path / "log" / "terminal.log"
    out = Output(writer, "stdout", report_to=None)
    out.log_losses(log)
    for _ in range(100):
        out.write(b"y" * 1000)
    assert log.read_text() == "stdout: nothing reads it; output is dropped, the program continues\n"
    seen = b""
    while b"last\n" not in seen:  # somebody reads again
        out.write(b"last\n")
        seen += os.read(reader, 4096)
    assert b"\n[some output was dropped here: nothing read it]\nlast\n" in seen
    os.close(os.dup(writer))
    out.finish()


def test_a_broken_output_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    with path.open("wb") as file, Path("/dev/full").open("wb") as full:
        errors = Output(file.fileno(), "stderr", report_to=None)
        out = Output(full.fileno(), "stdout", report_to=errors)
        for _ in range(3):
            out.write(b"line\n")
        out.finish()
        errors.finish()
    assert path.read_text() == (
        "stdout: No space left on device; output is dropped, the program continues\n"
    )


def program(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlrm_hybrid", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, timeout=HANG_SECONDS, check=False, **streams)


def test_signs_that_a_terminal_lacks_are_written_in_others() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = program("train", "--help", env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "5-13x" in done.stdout  # a dash that ASCII lacks


@pytest.mark.parametrize("name", ["closed", "left", "full", "unread"])
def test_an_output_that_is_gone_changes_no_exit_code(
    name: str, pipe: tuple[int, int], tmp_path: Path
) -> None:
    if name == "closed":
        done = program("--help", preexec_fn=lambda: os.close(1))
        assert (done.returncode, done.stderr) == (0, "")
        return
    if name == "unread":
        fill(pipe[1])
        done = program("--help", stdout=pipe[1])
    elif name == "full":
        with Path("/dev/full").open("wb") as full:
            done = program("--help", stdout=full)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = program("--help", stdout=writer)
        os.close(writer)
    why = {"full": "No space left on device", "left": "Broken pipe"}.get(name, "nothing reads it")
    assert (done.returncode, done.stderr) == (
        0,
        f"stdout: {why}; output is dropped, the program continues\n",
    )


@pytest.mark.slow
def test_a_run_ends_well_though_nobody_reads_what_it_prints(
    pipe: tuple[int, int], small_rows: list[str], tmp_path: Path
) -> None:
    _, writer = pipe
    fill(writer)
    folder = tmp_path / "run"
    options = ("train.steps=20", f"hydra.run.dir={folder}")
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = program("train", *small_rows, *options, stdout=writer, env=environ)
    lost = "stdout: nothing reads it; output is dropped, the program continues\n"
    assert (done.returncode, done.stderr) == (0, lost)
    assert (folder / "summary.json").exists()
    assert (folder / "log" / "terminal.log").read_text() == lost
