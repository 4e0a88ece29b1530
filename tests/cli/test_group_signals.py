"""Signals to the whole process group, as Ctrl-C, `timeout`, systemd and SLURM send them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from patience import HANG_SECONDS

POLL_SECONDS = 0.005
WORLD = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]")
OPTIONS = ("train.epochs=200", "train.batch_size=16", "telemetry.every=1")


def starts_ranks(folder: Path) -> bool:
    return (folder / "log").exists()


def trains(folder: Path) -> bool:
    record = folder / "events.jsonl"
    return record.exists() and '"kind": "progress"' in record.read_text()


@pytest.mark.parametrize(
    ("name", "phase", "world", "code"),
    [
        pytest.param("SIGTERM", starts_ranks, (), 75, marks=pytest.mark.slow),
        ("SIGTERM", trains, WORLD, 75),
        pytest.param("SIGINT", trains, (), 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_group_is_one_to_the_program(
    name: str,
    phase: Callable[[Path], bool],
    world: tuple[str, ...],
    code: int,
    small_rows: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "dlrm_hybrid", "train", *small_rows, *OPTIONS, *world]
    process = subprocess.Popen(
        [*command, f"hydra.run.dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    request.addfinalizer(process.kill)  # where an assertion fails; its ranks end with it
    program, until = psutil.Process(process.pid), time.monotonic() + HANG_SECONDS
    while not phase(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(POLL_SECONDS)
    everybody = program.children(recursive=True)
    os.killpg(process.pid, signal.Signals[name])
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, "Traceback" in errors) == (code, False), errors
    _, left = psutil.wait_procs(everybody, timeout=HANG_SECONDS)
    assert left == []
    if name == "SIGTERM":
        assert (folder / "checkpoints" / "latest").exists()


LEAVING = """
import contextlib, os, signal, sys
from dlrm_hybrid import output
from dlrm_hybrid.cli import main
def run(argv):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 77
@contextlib.contextmanager
def harmless_output():
    yield
    os.kill(os.getpid(), signal.SIGINT)
main.run, output.harmless_output = run, harmless_output
from dlrm_hybrid.__main__ import main
sys.exit(main())
"""


def test_a_second_ctrl_c_while_the_program_leaves_changes_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (77, "")
