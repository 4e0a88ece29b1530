"""A run that follows a folder: files are scored, then learned, each once, whatever happens."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from drifting import Log, write
from world_runs import assert_same_state, summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.run import following
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

ROWS, BATCH, DAYS = 1000, 64, 3
STEPS = ROWS // BATCH
GIVEN = (
    *("data=table", "model=dlrm_small", f"train.batch_size={BATCH}", "checkpoint.keep=9"),
    *("telemetry.tensorboard=false", "optimizer.lr=0.01", "embedding.lr=0.1"),
)
DCT = (
    *("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[]", "parallel.servers=1"),
    *("gradient=dct", "optimizer=adam", "checkpoint.every=3"),
)
Follow = Callable[..., Path]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    write(Log(rows=ROWS, days=DAYS, new=0.2), folder)
    for day in range(1, DAYS + 1):
        with (folder / f"day{day}.yaml").open("a") as schema:
            schema.write("group: shop\n")
    return folder


def filled(folder: Path, log: Path) -> Path:
    """A folder with all days."""
    folder.mkdir()
    for day in range(1, DAYS + 1):
        shutil.copy(log / f"day{day}.parquet", folder)
    return folder


@pytest.fixture
def inbox(log: Path, tmp_path: Path) -> Path:
    return filled(tmp_path / "inbox", log)


def command(log: Path, inbox: Path, folder: Path, *options: str) -> list[str]:
    given = (*GIVEN, f"data.schema={log}/day1.yaml", f"data.follow={inbox}", *options)
    return ["dlrm_hybrid", "train", *given, f"hydra.run.dir={folder}"]


@pytest.fixture
def follow(log: Path, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follow:
    monkeypatch.chdir(tmp_path)

    def follow_here(name: str, *options: str, code: int = 0) -> Path:
        folder = tmp_path / name
        ends = () if any("follow_" in one for one in options) else ("data.follow_idle_seconds=0",)
        assert run(command(log, inbox, folder, *options, *ends)) == code
        return folder

    return follow_here


@pytest.fixture(scope="module")
def whole(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has found all days when it began."""
    folder = tmp_path_factory.mktemp("whole")
    ends = "data.follow_idle_seconds=0"
    assert run(command(log, filled(folder / "inbox", log), folder / "run", ends)) == 0
    return folder / "run"


def of_day(folder: Path, day: int) -> Path:
    return folder / f"files/{day:06d}-day{day}"


def files(folder: Path) -> list[dict]:
    return summary(folder)["files"]


def test_files_are_scored_by_the_model_before_them_and_then_learned(
    follow: Follow, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = follow("followed")
    told = capsys.readouterr().out
    assert "000002-day2: log-loss" in told
    assert "3 files are learned" in told
    found = files(folder)
    assert [one["file"] for one in found] == [f"day{day}.parquet" for day in (1, 2, 3)]
    assert [(one["rows"], one["samples"]) for one in found] == [(ROWS, STEPS * BATCH)] * 3
    assert found[0]["appended"] == 0 < found[1]["appended"]
    for day in (2, 3):
        frame = pd.read_parquet(log / f"day{day}.parquet")
        clicks = frame.pop("clicked").to_numpy(np.float64)
        p = Predictor(of_day(folder, day - 1)).predict(frame).astype(np.float64)
        loss = -np.mean(np.log(np.where(clicks == 1, p, 1 - p)))
        assert found[day - 1]["loss"] == pytest.approx(loss, abs=1e-6)
        record = list(events.read(of_day(folder, day) / "events.jsonl"))
        scored = [event.step for event in record if event.kind is Kind.EVALUATED]
        assert scored == [0]
        gauc = summary(of_day(folder, day))["test"]["gauc"]
        assert found[day - 1]["gauc"] == gauc
        assert f", GAUC {gauc:.4f} before" in told
    assert "data.progressive=true" in (of_day(folder, 2) / "overrides.yaml").read_text()
    assert not list(folder.glob("files/*/rows"))
    assert len(summary(of_day(folder, 3))["descends_from"]) == 2


def test_a_file_is_learned_as_a_run_of_its_own_learns_it(
    whole: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over all rows, from where the one before ended."""
    monkeypatch.chdir(tmp_path)
    before = None
    for day in (1, 2):
        given = (*GIVEN, f"data.schema={log}/day3.yaml", f"data.raw={log}/day{day}.parquet")
        given += () if before is None else (f"checkpoint.resume={before}",)
        alone = tmp_path / f"alone{day}"
        given += ("data.progressive=true", f"hydra.run.dir={alone}")
        assert run(["dlrm_hybrid", "train", *given]) == 0
        assert_same_state(alone, of_day(whole, day), STEPS)
        assert summary(alone)["test"] == summary(of_day(whole, day))["test"]
        before = alone


def test_files_come_later_and_the_same_command_goes_on(
    follow: Follow, whole: Path, inbox: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inbox / "day3.parquet").unlink()
    parts = follow("parts")
    assert len(files(parts)) == 2
    shutil.copy(log / "day3.parquet", inbox / ".day3.parquet")
    shutil.copy(log / "day3.parquet", inbox / "day3.parquet.tmp")
    follow("parts")
    assert len(files(parts)) == 2
    looks: list[float] = []

    def come(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (inbox / "day3.parquet.tmp").rename(inbox / "day3.parquet")

    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=come)
        patch.setattr(following, "time", clock)
        follow("parts", "data.follow_files=3")
    assert len(looks) == 3
    assert files(parts)[-1]["loss"] == files(whole)[-1]["loss"]
    assert_same_state(of_day(whole, 3), of_day(parts, 3), STEPS)
    follow("parts", "data.follow_files=3")  # there is nothing to be done
    assert len(files(parts)) == 3


@pytest.mark.slow
def test_worlds_of_processes_follow_as_one_process_does(follow: Follow) -> None:
    inside = follow("inside", *DCT, "parallel.world=in_process")
    processes = follow("processes", *DCT)
    for day in (1, 3):
        assert_same_state(of_day(inside, day), of_day(processes, day), STEPS // 2)
    scores = [[one["loss"] for one in files(folder)] for folder in (inside, processes)]
    assert scores[0] == scores[1]


def test_what_another_configuration_drops_is_told_of_the_file_that_drops_it(
    follow: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    world = (*DCT, "parallel.world=in_process")
    first = of_day(follow("followed", *world, "data.follow_files=1"), 1)
    assert "anew" not in capsys.readouterr().out
    follow("followed", *world, "parallel.trainers=1")
    told = capsys.readouterr().out
    assert told.count("anew") == told.count("; residuals and thresholds begin anew\n") == 1
    assert f"weights and optimizers of {first}/checkpoints/" in told.partition("file 3:")[0]


@pytest.mark.slow
def test_a_run_that_is_stopped_or_killed_learns_no_file_twice(
    whole: Path, log: Path, inbox: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    argv = command(log, inbox, broken, "checkpoint.every=2")[1:]

    def started(most_files: int) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "dlrm_hybrid", *argv, f"data.follow_files={most_files}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    for day, number in ((2, signal.SIGKILL), (3, signal.SIGTERM)):
        process = started(4)  # the fourth never comes: it is struck at the latest while it waits
        latest = of_day(broken, day) / "checkpoints/latest"
        while process.poll() is None and not latest.exists():
            time.sleep(0.01)
        process.send_signal(number)
        _, text = process.communicate()
        assert process.returncode == (75 if number == signal.SIGTERM else -number), text
    last = started(3)
    _, text = last.communicate()
    assert last.returncode == 0, text
    assert [one["file"] for one in files(broken)] == [f"day{day}.parquet" for day in (1, 2, 3)]
    for one, other in zip(files(broken), files(whole), strict=True):
        assert one["loss"] == other["loss"]
    for day in (1, 2, 3):
        assert_same_state(of_day(broken, day), of_day(whole, day), STEPS)


def test_a_run_that_waits_is_stopped_and_says_how_it_goes_on(
    follow: Follow, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=stop)
    monkeypatch.setattr(following, "time", clock)
    folder = follow("waiting", "data.follow_files=9", code=75)
    told = capsys.readouterr()
    assert "waiting for files in " in told.out
    assert "stopped by SIGTERM; 3 files are learned; resume with\n" in told.err
    assert f"hydra.run.dir={folder}\n" in told.err
    assert len(files(folder)) == 3


def test_what_was_noted_last_is_noted_again(follow: Follow) -> None:
    """A run killed after its last file's was complete, before anybody said so."""
    folder = follow("followed", "data.follow_files=2")
    noted = summary(folder)
    (folder / "summary.json").write_text(json.dumps({"files": noted["files"][:1]}))
    follow("followed", "data.follow_files=2")
    assert summary(folder) == noted


def test_a_file_that_cannot_be_learned_ends_the_run_and_the_next_start_goes_on(
    follow: Follow, whole: Path, log: Path, inbox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_parquet(log / "day2.parquet")
    faults = {
        "no rows": frame[:0],
        "column 'shop'": frame.drop(columns="shop"),
        "train.batch_size = 64: a step": frame[:50],
        "row 1: column 'clicked': 2 is neither": frame.assign(clicked=2),
    }
    folder = None
    for fault, bad in faults.items():
        bad.to_parquet(inbox / "day2.parquet")
        capsys.readouterr()
        folder = follow("followed", code=2 if "batch_size" in fault else 3)
        text = capsys.readouterr().err
        assert fault in text
        assert "day2" in text
        assert len(files(folder)) == 1
        assert [path.name for path in (folder / "files").iterdir()] == ["000001-day1"]
    assert folder is not None
    (inbox / "day2.parquet").write_bytes(b"PAR1 and no more")
    follow("followed", code=3)
    shutil.copy(log / "day2.parquet", inbox)
    follow("followed")
    assert_same_state(of_day(folder, 3), of_day(whole, 3), STEPS)


def test_late_and_changed_files_are_named_and_not_learned(
    follow: Follow, log: Path, inbox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = follow("followed", "data.follow_files=2")
    shutil.copy(log / "day3.parquet", inbox / "day15.parquet")
    pd.read_parquet(log / "day3.parquet")[:500].to_parquet(inbox / "day1.parquet")
    os.utime(inbox / "day2.parquet")
    capsys.readouterr()
    follow("followed")
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("day15.parquet: is passed over: files whose names sort behind it") == 1
    assert "day1.parquet: has changed since it was learned, and is not learned again" in told
    assert "day2.parquet: has changed" not in told
    assert [one["file"] for one in files(folder)] == [f"day{day}.parquet" for day in (1, 2, 3)]


def test_a_file_that_changes_while_it_is_learned_is_refused(
    follow: Follow, log: Path, inbox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = follow("followed", "data.follow_files=2")
    begun = of_day(folder, 2)
    before = summary(begun)
    prepared = ("data.prepared=" + str(begun / "rows"), "data.base=" + str(of_day(folder, 1)))
    given = ("data=table", f"data.raw={inbox}/day2.parquet", "data.progressive=true", *prepared)
    assert run(["dlrm_hybrid", "prepare", *given]) == 0  # as a run has them that was killed
    (begun / "summary.json").write_text(json.dumps({**before, "status": "interrupted"}))
    pd.read_parquet(log / "day3.parquet").to_parquet(inbox / "day2.parquet")
    capsys.readouterr()
    follow("followed", "data.follow_files=2", code=3)
    text = " ".join(capsys.readouterr().err.split())
    assert "day2.parquet: has changed since the run that learns it began" in text
    shutil.copy(log / "day2.parquet", inbox)
    follow("followed", "data.follow_files=2")
    assert summary(begun)["samples"] == before["samples"]


def test_old_checkpoints_go_and_models_are_exported(
    follow: Follow, log: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    out = (f"export.output={served}", "export.format=safetensors")
    folder = follow("followed", "checkpoint.keep=1", *out)
    names = [of_day(folder, day).name for day in (1, 2, 3)]
    assert sorted(path.name for path in served.iterdir() if path.name[0] != ".") == names
    assert all((served / name / "model.safetensors").is_file() for name in names)
    kept = sorted(path.parent.name for path in folder.glob("files/*/checkpoints"))
    assert kept == names[-1:]
    rows = pd.read_parquet(log / "day3.parquet").drop(columns="clicked")
    one, other = (Predictor(path).predict(rows) for path in (folder, of_day(folder, 3)))
    assert (one == other).all()
    shutil.rmtree(served / names[-1])
    follow("followed", "checkpoint.keep=1", *out)
    assert (served / names[-1] / "model.json").is_file()


def test_it_begins_from_a_run_and_is_reported_by_file(
    follow: Follow, log: Path, inbox: Path, tmp_path: Path
) -> None:
    given = (
        *GIVEN,
        f"data.schema={log}/day1.yaml",
        f"data.raw=[{log}/day1.parquet,{log}/day2.parquet]",
    )
    assert run(["dlrm_hybrid", "train", *given, "hydra.run.dir=first"]) == 0
    (inbox / "day1.parquet").unlink()
    options = ("checkpoint.resume=first", "data.schema=null", "model.bottom=[3,32,16,8,4]")
    folder = follow("followed", *options)
    assert [one["file"] for one in files(folder)] == ["day2.parquet", "day3.parquet"]
    assert files(folder)[0]["loss"] == summary(Path("first"))["test"]["loss"]  # of the same rows
    assert run(["dlrm_hybrid", "report", f"report.runs={folder}", "report.output=r.html"]) == 0
    text = Path("r.md").read_text()
    last = files(folder)[1]
    for figure in (last["loss"], last["gauc"]):
        assert f"{figure:.4f}" in text.partition("Before learning")[2]
    assert "day3.parquet" in text


def test_what_does_not_go_together_is_refused(
    follow: Follow, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*options: str, code: int = 2) -> str:
        capsys.readouterr()
        follow("refused", *options, code=code)
        assert not (tmp_path / "refused").exists()
        return capsys.readouterr().err

    fault = told(f"data.raw={log}/day1.parquet", "data.prepared=rows", "train.evaluate_every=5")
    assert "names the files, so data.raw must be null" in fault
    assert "so data.prepared must be null" in fault
    assert "train.evaluate_every = 5: rows are scored once" in fault
    assert "data.schema = null" in told("data.schema=null", "model.bottom=[3,32,16,8,4]")
    assert "No such file" in told("data.follow=nowhere")
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine").touch()
    capsys.readouterr()
    follow("used", code=2)
    assert "holds no run that follows a folder" in capsys.readouterr().err
    plain = ["dlrm_hybrid", "train", *GIVEN, f"data.schema={log}/day1.yaml"]
    assert run([*plain, f"data.raw={log}/day1.parquet", "export.output=out"]) == 2
    assert "exports only what it learns of data.follow" in capsys.readouterr().err
    assert run([*plain, f"data.raw={log}/day1.parquet", "data.follow_files=2"]) == 2
    assert "data.follow_files = 2: needs data.follow" in capsys.readouterr().err
