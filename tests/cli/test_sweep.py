import csv
import signal
from pathlib import Path

import pytest
from made_runs import make_run

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.cli.verbs import train as train_verb
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import StoppedLateError


def table(sweep: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((sweep / "sweep_summary.csv").open()))


def test_a_sweep_is_one_folder_whatever_its_jobs_are_named(
    small_rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, "name=one,two", "train.steps=2"]
    assert run(argv) == 0
    (sweep,) = (tmp_path / "runs" / "sweep").iterdir()
    rows = [(row["name"], row["status"]) for row in table(sweep)]
    assert rows == [("one", "complete"), ("two", "complete")]
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_after_the_result_of_a_job_ends_the_sweep(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Request] = []

    def complete(request: Request) -> int:
        begun.append(request)
        raise StoppedLateError(number)

    monkeypatch.setattr(train_verb, "run", complete)
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert run(["dlrm_hybrid", "train", "-m", "train.seed=1,2", folder]) == code
    assert [request.config.train.seed for request in begun] == [1]
