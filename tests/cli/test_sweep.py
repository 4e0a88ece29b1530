import csv
import json
import os
import signal
from pathlib import Path
from threading import Event, Thread

import pytest
from made_runs import make_run

from dlrm_hybrid.cli.main import run


def started(folder: Path) -> float:
    """When the last attempt of a job began."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return max(line["time_seconds"] for line in lines if line["kind"] == "started")


def kill_rank(folder: Path, gone: Event) -> None:
    """Kill -9 the one rank of a job as soon as there is one; `gone` ends the waiting."""
    pid_file = folder / "log" / "worker-0.pid"
    while not gone.wait(0.01):
        if pid_file.exists() and (text := pid_file.read_text()).endswith("\n"):
            os.kill(int(text), signal.SIGKILL)
            return


def table(sweep: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((sweep / "sweep_summary.csv").open()))


@pytest.mark.slow
def test_a_sweep_outlives_jobs_that_fail_and_goes_on_with_them_alone(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, page = tmp_path / "sweep", tmp_path / "report.html"
    points = ["train.seed=1,2", "optimizer.lr=0.05,1e18", "train.steps=10"]
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, *points, f"hydra.sweep.dir={sweep}"]

    assert run(argv) == 4
    told = capsys.readouterr()
    rows = table(sweep)
    assert [(row["train.seed"], row["optimizer.lr"], row["status"]) for row in rows] == [
        ("1", "0.05", "complete"),
        ("1", "1e+18", "diverged"),
        ("2", "0.05", "complete"),
        ("2", "1e+18", "diverged"),
    ]
    assert [line.partition(": step")[0] for line in told.err.splitlines()] == ["job 1", "job 3"]
    assert "job 2: train.seed=2 optimizer.lr=0.05" in told.out
    assert "2 of 4 jobs did not complete" in told.out
    before = {number: started(sweep / number) for number in "0123"}

    assert run([*argv, "skip_completed=true"]) == 4
    told = capsys.readouterr()
    after = {number: started(sweep / number) for number in "0123"}
    assert {number for number in "0123" if after[number] != before[number]} == {"1", "3"}
    assert told.out.count("already complete, skipped") == 2
    assert table(sweep) == rows

    assert run(["dlrm_hybrid", "report", f"report.runs={sweep}", f"report.output={page}"]) == 0
    assert page.read_text().count('<td class="bad">diverged</td>') == 2


def test_a_sweep_is_one_folder_whatever_its_jobs_are_named(
    small_rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, "name=one,two", "train.steps=2"]
    assert run(argv) == 0
    (sweep,) = (tmp_path / "runs" / "sweep").iterdir()
    assert [row["status"] for row in table(sweep)] == ["complete", "complete"]
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}
    assert "| job | name | status   |" in (sweep / "sweep_summary.md").read_text()


def test_the_folder_of_a_run_is_no_sweeps(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    for jobs in (1, 2):
        options = [f"hydra.sweep.dir={tmp_path / 'run'}", f"sweep.jobs={jobs}", "train.seed=1,2"]
        assert run(["dlrm_hybrid", "train", "-m", *small_rows, *options]) == 2
        told = f"hydra.sweep.dir = {tmp_path / 'run'}: is the folder of a run; name another"
        assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_job_of_another_sweep_is_never_taken_for_this_ones(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*small_rows, f"hydra.sweep.dir={tmp_path / 'sweep'}", "train.steps=2"]
    argv = ["dlrm_hybrid", "train", "-m", *options, "skip_completed=true"]
    assert run([*argv, "train.seed=1"]) == 0
    capsys.readouterr()
    assert run([*argv, "train.seed=2"]) == 2
    told = capsys.readouterr()
    assert "job 0: configuration: 1 fault\n  train.seed = 2" in told.err
    assert [row["status"] for row in table(tmp_path / "sweep")] == ["refused"]
    assert run([*argv, "train.seed=1"]) == 0
    assert "job 0: already complete, skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_one_job_of_ten_is_killed_and_only_that_one_is_done_again(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five densities with two ways of finding thresholds end in one table and one page."""
    sweep, page = tmp_path / "sweep", tmp_path / "report.html"
    densities, rules = ("0.25", "0.1", "0.05", "0.02", "0.005"), ("exact", "histogram")
    points = [f"gradient.density={','.join(densities)}", f"gradient.threshold={','.join(rules)}"]
    world = ["+experiment=dct_dp", "parallel.world=in_process", "train.steps=12"]
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, *world, *points]
    argv = [*argv, "checkpoint.max_restarts=0", f"hydra.sweep.dir={sweep}", "skip_completed=true"]
    gone = Event()
    killer = Thread(target=kill_rank, args=(sweep / "7", gone))
    killer.start()
    assert run(argv) == 1
    gone.set()
    killer.join()
    told = capsys.readouterr()
    assert [line.partition(":")[0] for line in told.err.splitlines()] == ["job 7"]
    assert "1 of 10 jobs did not complete" in told.out
    rows = table(sweep)
    assert [(row["gradient.density"], row["gradient.threshold"]) for row in rows] == [
        (density, rule) for density in densities for rule in rules
    ]
    assert [row["status"] for row in rows].count("complete") == 9
    assert rows[7]["status"] == "failed"
    before = {number: started(sweep / str(number)) for number in range(10) if number != 7}

    assert run(argv) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 9
    assert {number: started(sweep / str(number)) for number in before} == before
    assert [row["status"] for row in table(sweep)] == ["complete"] * 10

    assert run(["dlrm_hybrid", "report", f"report.runs={sweep}", f"report.output={page}"]) == 0
    assert "<h1>10 runs compared</h1>" in page.read_text()
    assert "sparsity=0.98 threshold=histogram" in page.read_text()
