"""Sweeps whose jobs run beside each other, from the command line."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.cli.sweep import Sweep, _Lines
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config import compose
from dlrm_hybrid.types import ExitCode

POLL_SECONDS = 0.01
# Measured, so not the same twice.
MEASURED = ("samples_per_second",)


def table(sweep: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((sweep / "sweep_summary.csv").open()))
    return [{key: row[key] for key in row if key not in MEASURED} for row in rows]


@pytest.mark.slow
def test_jobs_alone_or_beside_each_other_outlive_those_that_fail_which_alone_are_done_again(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = ["train.seed=1,2", "optimizer.lr=0.05,1e18", "train.steps=10"]
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, *points]
    alone, beside = (tmp_path / name for name in ("alone", "beside"))
    for sweep, jobs in ((alone, 1), (beside, 3)):
        given = [*argv, f"hydra.sweep.dir={sweep}", f"sweep.jobs={jobs}"]
        assert run(given) == 4
        told = capsys.readouterr()
        failed = sorted(line.partition(": step")[0] for line in told.err.splitlines())
        assert failed == ["job 1", "job 3"]
        assert "job 2: train.seed=2 optimizer.lr=0.05\n" in told.out
        assert "2 of 4 jobs did not complete" in told.out
        assert jobs == 1 or told.out.count(": complete after ") == 2
        rows = table(sweep)
        assert run([*given, "skip_completed=true"]) == 4
        assert capsys.readouterr().out.count("already complete, skipped") == 2
        assert [len(begins(sweep / number)) for number in "0123"] == [1, 2, 1, 2]
        assert table(sweep) == rows
    assert table(beside) == table(alone)
    assert [(row["train.seed"], row["optimizer.lr"], row["status"]) for row in rows] == [
        *(("1", "0.05", "complete"), ("1", "1e+18", "diverged")),
        *(("2", "0.05", "complete"), ("2", "1e+18", "diverged")),
    ]
    assert (beside / "2/overrides.yaml").read_text() == (alone / "2/overrides.yaml").read_text()
    assert "10 steps of 64 samples" in (beside / "2" / "output.log").read_text()
    assert "learning rate" in (beside / "3" / "output.log").read_text()
    assert (beside / "3" / "output.log").read_text().count("run folder") == 2
    page = tmp_path / "report.html"
    assert run(["dlrm_hybrid", "report", f"report.runs={beside}", f"report.output={page}"]) == 0
    assert page.read_text().count('<td class="bad">diverged</td>') == 2


def test_how_many_jobs_run_is_of_the_whole_sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert run(["dlrm_hybrid", "train", "-m", "sweep.jobs=1,2", "train.steps=1", folder]) == 2
    assert capsys.readouterr().err == (
        "configuration: 1 fault\n  sweep.jobs = 2: is of the whole sweep; another job has 1\n"
    )
    for key in ("sweep.jobs=2", "hydra.sweep.dir=mine"):
        assert run(["dlrm_hybrid", "train", key, "train.steps=1"]) == 2
        assert capsys.readouterr().err == (
            f"configuration: 1 fault\n  {key}: only applies to a sweep; add -m\n"
        )
    assert run(["dlrm_hybrid", "train", "-m", "sweep.jobs=0", "train.seed=1,2"]) == 2
    assert "sweep.jobs = 0: must be a whole number at least 1" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_that_was_stopped_counts_the_jobs_that_never_began(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stopped = Sweep(tmp_path, (), 3)
    for number in range(2):
        stopped.add(compose.Job({}, tmp_path / str(number), ()), ExitCode.INTERRUPTED)
    stopped.close()
    assert "2 of 3 jobs did not complete, 1 did not begin; to resume" in capsys.readouterr().out
    assert [row["status"] for row in table(tmp_path)] == ["interrupted"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_no_line_is_of_before_it(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 9000, 1000))
    lines = _Lines(Terminal(), 2, None, lambda: next(now))
    lines.begun(1)
    lines.runs(1, "step 5")
    lines.stopping(number)
    lines.runs(1, "step 7")
    told = capsys.readouterr().out
    assert "job 1: step 5\n" in told
    assert "step 7" not in told
    assert ("Ctrl-C again" in told) == (number == signal.SIGINT)


def begins(folder: Path) -> list[int]:
    """The steps at which the attempts of a run began."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "started"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_a_signal_to_the_sweep_ends_all_its_jobs_and_they_can_be_resumed(
    name: str, small_rows: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C goes to the group of a terminal, which the jobs are not in; SIGKILL to one process."""
    sweep = tmp_path / "sweep"
    options = [*small_rows, "train.seed=1,2,3", "sweep.jobs=2", f"hydra.sweep.dir={sweep}"]
    options += ["train.epochs=30", "checkpoint.every=100"]
    command = [sys.executable, "-m", "dlrm_hybrid", "train", "-m", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    request.addfinalizer(process.kill)
    until = time.monotonic() + HANG_SECONDS
    stopped: dict[str, int] = {}  # that none ends, and lets the third begin, before both have saved
    while len(stopped) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        for number in "01":
            if number not in stopped and (sweep / number / "checkpoints/latest").exists():
                stopped[number] = int((sweep / number / "log/worker-0.pid").read_text())
                os.kill(stopped[number], signal.SIGSTOP)
        time.sleep(POLL_SECONDS)
    everybody = psutil.Process(process.pid).children(recursive=True)
    assert len(everybody) >= 6  # two supervisors, each with a forkserver and a rank
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
        for pid in stopped.values():
            os.kill(pid, signal.SIGCONT)
    else:
        process.kill()
    _, errors = process.communicate(timeout=HANG_SECONDS)
    _, left = psutil.wait_procs(everybody, timeout=HANG_SECONDS)
    assert left == []
    assert not (sweep / "2").exists()
    if name == "SIGINT":
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert errors.count("checkpoint saved at step") == 2
        statuses = [json.loads((sweep / n / "summary.json").read_text())["status"] for n in "01"]
        assert statuses == ["interrupted"] * 2

    again = subprocess.run(
        [*command, "skip_completed=true"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert [row["status"] for row in table(sweep)] == ["complete"] * 3
    assert [bool(begins(sweep / number)[-1]) for number in "012"] == [True, True, False]
