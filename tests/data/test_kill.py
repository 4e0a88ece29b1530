from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import prepare_child
import pytest
import worker_tasks
from criteo_rows import everything, make_lines, run_prepare

from dlrm_hybrid.types import ExitCode

DEADLINE_SECONDS = 30


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"".join(make_lines(900, seed=1)))
    return path


@pytest.fixture(scope="module")
def made(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run with the options of `prepare_child` makes."""
    output = tmp_path_factory.mktemp("made") / "out"
    run_prepare(raw, output, min_count=2)
    return output


class Child(NamedTuple):
    process: subprocess.Popen[str]
    workers: list[int]


def start_child(raw: Path, output: Path, processes: int, stage: str) -> Child:
    """A prepare that has halted in `stage`."""
    process = subprocess.Popen(
        [sys.executable, prepare_child.__file__, str(raw), str(output), str(processes), stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return Child(process, [int(pid) for pid in process.stdout.readline().split()])


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        os.sched_yield()


def test_busy_workers_die_with_their_parent() -> None:
    process = subprocess.Popen(
        [sys.executable, worker_tasks.__file__], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    wait_until_gone(workers)


STOPPED_WHILE_STARTING = """
import os, signal, psutil
from dlrm_hybrid.data.workers import Workers
with Workers(2):
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.suspend()
    print(*(child.pid for child in children), flush=True)
    signal.pause()
"""


def test_workers_stopped_while_they_start_do_not_outlive_their_parent() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_WHILE_STARTING],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) >= 2
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    try:
        wait_until_gone(workers)
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("stage", ["parse", "assemble"])
def test_killed_and_started_again_gives_the_same_bytes(
    tmp_path: Path, raw: Path, made: Path, stage: str
) -> None:
    output = tmp_path / "out"
    child = start_child(raw, output, 2, stage)
    assert len(child.workers) == 2
    child.process.kill()
    child.process.communicate(timeout=DEADLINE_SECONDS)
    wait_until_gone(child.workers)
    assert not output.exists()
    leftover = [path.name for path in (tmp_path / "out.partial").rglob("C01.bin")]
    assert leftover, "the kill came before anything was written"
    assert not run_prepare(raw, output, min_count=2).up_to_date
    assert everything(output) == everything(made)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("stage", ["parse", "vocabulary"])
def test_a_killed_worker_ends_the_run_and_the_next_one_is_right(
    tmp_path: Path, raw: Path, made: Path, stage: str
) -> None:
    output = tmp_path / "out"
    child = start_child(raw, output, 2, stage)
    os.kill(child.workers[0], signal.SIGKILL)
    _, errors = child.process.communicate("\n", timeout=DEADLINE_SECONDS)
    assert child.process.returncode == ExitCode.RESOURCES, errors
    assert f"worker process {child.workers[0]} was killed by signal 9" in errors
    wait_until_gone(child.workers)
    assert list(tmp_path.iterdir()) == []
    run_prepare(raw, output, min_count=2)
    assert everything(output) == everything(made)


def test_ctrl_c_reaches_the_whole_group_and_leaves_nothing(tmp_path: Path, raw: Path) -> None:
    child = start_child(raw, tmp_path / "out", 2, "parse")
    os.killpg(child.process.pid, signal.SIGINT)
    _, errors = child.process.communicate(timeout=DEADLINE_SECONDS)
    assert child.process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors  # its own; the workers end in silence
    wait_until_gone(child.workers)
    assert list(tmp_path.iterdir()) == []
