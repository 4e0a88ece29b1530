"""Sweeps whose jobs SLURM runs: `sbatch` and `squeue` note what they are asked."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched_runs import environment
from patience import HANG_SECONDS

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.jobs import slurm
from dlrm_hybrid.run.jobs.slurm import script
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ExitCode

SBATCH = """#!{python}
import json, pathlib, sys
here = pathlib.Path({here!r})
if (here / "refusal").exists():
    sys.exit((here / "refusal").read_text())
number = 4711 + len(list(here.glob("*.job")))
asked = {{"options": sys.argv[1:], "script": sys.stdin.read()}}
(here / f"{{number}}.job").write_text(json.dumps(asked))
print(f"{{number}};cluster")
"""
SQUEUE = """#!{python}
import pathlib, sys
here = pathlib.Path({here!r})
if (here / "silence").exists():
    sys.exit((here / "silence").read_text())
(number,) = [text.partition("=")[2] for text in sys.argv if text.startswith("--jobs=")]
if not (here / f"{{number}}.job").exists() or "--clusters=cluster" not in sys.argv:
    sys.exit("slurm_load_jobs error: Invalid job id specified")
state = here / f"{{number}}.state"
print("CLUSTER: cluster")
print(state.read_text() if state.exists() else "")
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each job that was submitted."""
    here, programs = tmp_path / "cluster", tmp_path / "bin"
    here.mkdir()
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (programs / name).write_text(text.format(python=sys.executable, here=str(here)))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return here


def asked(cluster: Path, number: int) -> dict[str, Any]:
    return json.loads((cluster / f"{number}.job").read_text())


def numbers(cluster: Path) -> list[int]:
    return sorted(int(path.stem) for path in cluster.glob("*.job"))


def run_script(cluster: Path, number: int) -> subprocess.CompletedProcess[str]:
    """Be the node that SLURM has chosen."""
    changes = {"SLURM_JOB_ID": str(number), "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    return subprocess.run(
        ["/bin/sh"],
        input=asked(cluster, number)["script"],
        env=environment({**changes, "ENVIRONMENT": "BATCH"}),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_a_job_that_cannot_begin_does_not_keep_the_others(
    cluster: Path, small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = ["checkpoint.resume=nope,never", "sweep.submit=slurm"]
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert run(["dlrm_hybrid", "train", "-m", *small_rows, *points, folder]) == ExitCode.DATA
    told = capsys.readouterr()
    assert "nope: no checkpoint found" in told.err
    assert "submitted 1 of 2 jobs" in told.out
    assert numbers(cluster) == [4711]


@pytest.mark.slow
def test_a_sweep_is_submitted_run_and_summed_up(
    cluster: Path, small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "a sweep, of 100%"
    points = ["train.seed=1,2", "train.steps=5", "threads=3", "sweep.submit=slurm"]
    options = "sweep.sbatch=['--partition=long','--mem=8G']"
    folder = f"hydra.sweep.dir='{sweep}'"
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, *points, options, folder]
    assert run(argv) == 0
    told = capsys.readouterr().out
    assert "job 0: 4711\n" in told
    assert "job 1: 4712\n" in told
    assert "submitted 2 of 2 jobs" in told
    assert asked(cluster, 4712)["options"] == [
        *("--parsable", "--job-name=default-1"),
        f"--output={tmp_path}/a sweep, of 100%%/1/output.log",
        *("--open-mode=append", "--nodes=1", "--ntasks=1", "--cpus-per-task=3"),
        *("--signal=B:TERM@60", "--partition=long", "--mem=8G"),
    ]
    assert not (sweep / "sweep_summary.csv").exists()

    # Repeated while one waits and one is gone without a trace.
    (cluster / "4711.state").write_text("PENDING")
    again = [*argv, "skip_completed=true"]
    assert run(again) == 0
    told = capsys.readouterr().out
    assert "job 0: job 4711 of SLURM is PENDING; left as it is\n" in told
    assert "job 1: 4713\n" in told
    (cluster / "4711.state").unlink()

    for number in (4711, 4713):
        ended = run_script(cluster, number)
        assert ended.returncode == 0, ended.stderr
        assert "5 steps of 64 samples" in ended.stdout
    assert run_script(cluster, 4713).returncode == 2  # started again by mistake: nothing happens
    assert run(again) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 2
    assert numbers(cluster) == [4711, 4712, 4713]
    rows = list(csv.DictReader((sweep / "sweep_summary.csv").open()))
    assert [(row["train.seed"], row["status"]) for row in rows] == [
        ("1", "complete"),
        ("2", "complete"),
    ]


def test_what_slurm_refuses_ends_the_sweep_and_is_told(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster / "refusal").write_text("sbatch: error: invalid partition specified: lnog")
    sweep = tmp_path / "sweep"
    argv = ["train.seed=1,2", "sweep.submit=slurm", f"hydra.sweep.dir={sweep}"]
    assert run(["dlrm_hybrid", "train", "-m", *argv]) == 5
    message = "sweep.submit=slurm: sbatch: sbatch: error: invalid partition specified: lnog\n"
    assert capsys.readouterr().err == message
    assert numbers(cluster) == []
    assert not list(sweep.glob("*.slurm.json"))


def test_a_controller_that_does_not_answer_gets_no_job_twice(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    argv = ["train.seed=1,2", "sweep.submit=slurm", f"hydra.sweep.dir={sweep}"]
    argv = ["dlrm_hybrid", "train", "-m", *argv]
    assert run(argv) == 0
    kept = [path.read_text() for path in sorted(sweep.glob("*.slurm.json"))]
    assert len(kept) == 2
    capsys.readouterr()

    silence = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    (cluster / "silence").write_text(silence)
    assert run([*argv, "skip_completed=true"]) == 5
    assert capsys.readouterr().err == f"sweep.submit=slurm: squeue: {silence}\n"
    assert len(numbers(cluster)) == 2
    assert [path.read_text() for path in sorted(sweep.glob("*.slurm.json"))] == kept


def test_a_submission_without_an_answer_may_have_been_one(
    cluster: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(slurm, "SECONDS", 0.01)
    argv = ["train.seed=1,2", "sweep.submit=slurm", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert run(["dlrm_hybrid", "train", "-m", *argv]) == 5
    assert capsys.readouterr().err == (
        "sweep.submit=slurm: sbatch gives no answer in 0.01 s; the job may have been submitted all "
        "the same: ask squeue\n"
    )


def test_a_machine_without_slurm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["train.seed=1,2", "sweep.submit=slurm", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert run(["dlrm_hybrid", "train", "-m", *argv]) == 5
    assert capsys.readouterr().err == (
        "sweep.submit=slurm: sbatch is not in the PATH of this machine\n"
    )


def test_a_folder_with_another_run_is_refused_before_it_is_submitted(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "0").mkdir(parents=True)
    (sweep / "0" / "mine.txt").touch()
    argv = ["train.seed=1,2", "sweep.submit=slurm", f"hydra.sweep.dir={sweep}"]
    assert run(["dlrm_hybrid", "train", "-m", *argv]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("job 0: configuration: 1 fault\n")
    assert "is not empty" in told.err
    assert "submitted 1 of 2 jobs" in told.out
    assert len(numbers(cluster)) == 1


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["sweep.jobs=2"], "sweep.jobs = 2: only applies to jobs on this machine"),
        (["sweep.sbatch=[-p]"], "must be an option in its long form, such as --time=1:00:00"),
        (["sweep.sbatch=['--wrap=x']"], "sweep.sbatch = [--wrap=x]: the sweep sets this itself"),
        (["sweep.submit=null", "sweep.sbatch=['--mem=8G']"], "only applies to sweep.submit=slurm"),
        (["sweep.submit=pbs"], "sweep.submit = 'pbs': must be 'slurm'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    given: list[str], fault: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["dlrm_hybrid", "train", "-m", "train.seed=1,2", "sweep.submit=slurm", *given]
    assert run(argv) == 2
    assert fault in capsys.readouterr().err
    assert numbers(cluster) == []


def test_no_value_becomes_a_line_of_a_jobs_script(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, ends = tmp_path / "sweep", ("\n", "\r", "\x0b", "\x85", "\u2028")
    places = ",".join(f"'/x{end}#SBATCH --wrap=y'" for end in ends)
    argv = ["train", "-m", "sweep.submit=slurm", f"hydra.sweep.dir={sweep}"]
    assert run(["dlrm_hybrid", *argv, f"data.prepared={places},'/z'"]) == 2
    message = "has a control character, which sweep.submit=slurm cannot"
    assert capsys.readouterr().err.count(message) == len(ends)
    assert len(numbers(cluster)) == 1  # of the other job
    assert not any((sweep / str(number)).exists() for number in range(len(ends)))


@cache
def _defaults() -> tuple[Config, Mapping[str, Any]]:
    values = compose.job_of([]).values
    return validate(values), values


def test_a_job_finds_the_package_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch --chdir` starts it elsewhere; "" is the working folder of an interactive Python."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    text = script(Request(*_defaults(), Path("/runs/0"), ()))
    places = text.split("PYTHONPATH=")[1].split()[0].split(os.pathsep)
    assert places[0] == str(Path.cwd())


@given(name=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20))
def test_the_shell_of_a_node_reads_what_was_typed(name: str) -> None:
    """Overrides go through a shell: blanks, quotes, dollars and all."""
    text = f"data.prepared={name} '\"$(echo no)`\\"
    request = Request(*_defaults(), Path("/runs") / name, (text,))
    command = script(request).replace("exec env", "exec printf '%s\\n'", 1)
    said = subprocess.run(["/bin/sh"], input=command, capture_output=True, text=True, check=True)
    lines = said.stdout.splitlines()
    assert lines[-3] == text
    assert lines[-1] == "skip_completed=true"
