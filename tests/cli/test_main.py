"""The command line as a person uses it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from patience import HANG_SECONDS
from world_runs import Train

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config import compose

ROOT = Path(__file__).parent.parent.parent


def test_usage_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", "--help"]) == 0
    usage = capsys.readouterr().out
    for verb in ("prepare", "train", "evaluate", "report", "doctor"):
        assert f"  {verb}" in usage
    assert run(["dlrm_hybrid"]) == 2


def test_an_unknown_verb_is_met_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", "trian"]) == 2
    assert (
        "trian: unknown command; did you mean train? Commands: prepare, train,"
        in capsys.readouterr().err
    )


def test_all_faults_are_told_and_nothing_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["dlrm_hybrid", "train", "optimizer.lrr=1", "model=huge", "train.epochs=0"]) == 2
    assert capsys.readouterr().err == (
        "configuration: 3 faults\n"
        "  optimizer.lrr: unknown key; did you mean optimizer.lr=1?\n"
        "  model=huge: no such choice; choose from dcnv2, deepfm, dlrm_paper, dlrm_small\n"
        "  train.epochs = 0: must be a whole number at least 1 and below 2^63\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_only_train_can_be_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", "doctor", "-m", "train.seed=1,2"]) == 2
    assert "-m: only `train` can be swept" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_hydra_composes_is_no_fault_of_the_configuration(
    number: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck() -> None:
        """Let the signal come inside of OmegaConf, which wraps what is raised there."""
        OmegaConf.register_new_resolver(
            "run_id", lambda: os.kill(os.getpid(), number), replace=True
        )

    monkeypatch.setattr(compose, "_register_resolvers", struck)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run(["dlrm_hybrid", "train"]) == code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.startswith("stopped by ")


def test_sigterm_while_the_program_is_imported_is_a_stop_like_any_other() -> None:
    program = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "dlrm_hybrid.cli.main":
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException as error:  # as extensions do while they are imported
                raise ImportError("made of a signal") from error
sys.meta_path.insert(0, Finder())
sys.argv = ["dlrm_hybrid", "train"]
runpy.run_module("dlrm_hybrid", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, "stopped by SIGTERM before training\n")


def test_a_run_folder_holds_what_the_design_names(train: Train) -> None:
    code, folder = train("run", "train.steps=20", "telemetry.tensorboard=true", "train.seed=5")
    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.json",
        "environment.json",
        "events.jsonl",
        "log",
        "overrides.yaml",
        "preprocessing",
        "summary.json",
        "tensorboard",
    ]
    assert json.loads((folder / "config.json").read_text())["train"]["seed"] == 5
    assert '- "train.seed=5"\n' in (folder / "overrides.yaml").read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.13.0")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("complete", 20, 1280)
    assert 0.3 < summary["test"]["best_reachable"]["loss"] < summary["test"]["loss"] < 1.0
    assert list((folder / "tensorboard").iterdir())


def test_a_bad_row_is_named_and_ends_with_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    raw = tmp_path / "train.txt"
    raw.write_text("0" + "\t1" * 13 + "\t0123abcd" * 26 + "\n" + "0" + "\t1" * 12 + "\tx\n")
    options = [f"data.raw={raw}", f"data.prepared={tmp_path / 'prepared'}", "data.processes=1"]
    assert run(["dlrm_hybrid", "prepare", "data=criteo_kaggle", *options]) == 3
    assert f"{raw}:2" in capsys.readouterr().err
    assert not (tmp_path / "prepared").exists()


def test_the_module_returns_the_exit_code() -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_hybrid", "train", "optimizer.lr=fast"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 2
    fault = "optimizer.lr = 'fast': must be a number above 0 and at most 1e+18"
    assert done.stderr == f"configuration: 1 fault\n  {fault}\n"
    assert done.stdout == ""


def test_doctor_says_this_machine_is_able(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # what rows somebody has prepared in a checkout is not asked here
    assert run(["dlrm_hybrid", "doctor"]) == 0
    report = capsys.readouterr().out
    assert "FAIL" not in report
    for name in ("torch", "fbgemm", "cores", "memory", "vector instructions", "disk"):
        assert name in report
