"""A run that is struck and resumed ends with the weights of one that was not."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rank_faults import fault_file
from safetensors.numpy import load_file

import dlrm_hybrid.cli.train as cli_train
from dlrm_hybrid.telemetry import events

STEPS = 93
KILLS = 20
Train = Callable[..., tuple[int, Path]]


def tensors(folder: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    return {
        name: tensor
        for group in ("dense", "embeddings")
        for name, tensor in load_file(checkpoint / f"{group}.safetensors").items()
    }


def assert_equal_runs(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.tobytes() == second[name].tobytes(), name
    assert curve(one) == curve(other)


def curve(folder: Path) -> list[tuple[object, ...]]:
    return [
        (event.step, event.values["loss"], event.values["accuracy"])
        for event in events.read(folder / "events.jsonl")
        if event.kind is events.Kind.PROGRESS
    ]


def strike(folder: Path, step: int, signal: str) -> Path:
    path = fault_file(folder)
    path.write_text(json.dumps({"step": step, "signal": signal}))
    return path


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_train, "TRAIN_RANK", "rank_faults:struck_rank")


EVERY = ("telemetry.every=1", "checkpoint.every=7")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "momentum"])
def test_killed_runs_end_like_the_unbroken_one(
    optimizer: str, train: Train, struck: None, tmp_path: Path
) -> None:
    tables = {"sgd": "sgd", "adagrad": "adagrad", "momentum": "rowwise_adagrad"}[optimizer]
    choice = (f"optimizer={optimizer}", f"embedding.optimizer={tables}", "optimizer.lr=0.02")
    code, unbroken = train("unbroken", *EVERY, *choice)
    assert code == 0
    moved = tensors(unbroken)
    for name, before in tensors(unbroken, step=91).items():
        assert np.abs(moved[name] - before).max() > 0, name
    steps = random.Random(optimizer).sample(range(1, STEPS), KILLS if optimizer == "sgd" else 2)
    for step in steps:
        folder = tmp_path / f"killed-{step}"
        fault = strike(folder, step, "SIGKILL")
        code, _ = train(folder.name, *EVERY, *choice)
        assert code == 1
        assert not fault.exists(), "the fault did not strike"
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
        code, _ = train(folder.name, *EVERY, *choice, "checkpoint.resume=auto")
        assert code == 0
        assert_equal_runs(unbroken, folder)


def test_sigterm_saves_the_step_it_interrupts(train: Train, struck: None, tmp_path: Path) -> None:
    options = ("telemetry.every=1", "train.evaluate_every=20", "optimizer.schedule=linear")
    assert train("unbroken", *options)[0] == 0
    folder = tmp_path / "preempted"
    strike(folder, 40, "SIGTERM")
    code, _ = train("preempted", *options)
    assert code == 75
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000040\n"
    assert train("preempted", *options, "checkpoint.resume=auto")[0] == 0
    assert_equal_runs(tmp_path / "unbroken", folder)
    evaluated = [
        event.step
        for event in events.read(folder / "events.jsonl")
        if event.kind is events.Kind.EVALUATED
    ]
    assert evaluated == [20, 40, 60, 80, 93]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["restarts"], summary["samples"]) == ("complete", 1, 5952)


def test_ctrl_c_saves_nothing_and_leaves_nobody(train: Train, struck: None, tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    strike(folder, 40, "SIGINT")
    assert train("interrupted", "telemetry.every=1")[0] == 130
    assert not (folder / "checkpoints").exists()
    pid = int((folder / "log" / "worker-0.pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_longer_run_goes_on_from_an_old_checkpoint(train: Train, tmp_path: Path) -> None:
    assert train("twice", "train.epochs=2", "optimizer.lr=0.05")[0] == 0
    assert train("once", "optimizer.lr=0.05")[0] == 0
    resume = f"checkpoint.resume={tmp_path / 'once'}"
    assert train("again", "train.epochs=2", "optimizer.lr=0.05", resume)[0] == 0
    last = "checkpoints/step_00000186/dense.safetensors"
    assert (tmp_path / "twice" / last).read_bytes() == (tmp_path / "again" / last).read_bytes()
    first = (tmp_path / "once/checkpoints/step_00000093/dense.safetensors").read_bytes()
    assert first != (tmp_path / "twice" / last).read_bytes()


def test_what_does_not_fit_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("run", "train.steps=10")
    assert code == 0
    capsys.readouterr()
    refused = [
        (("run",), 2, "is not empty; two runs never share a folder"),
        (("run", "checkpoint.resume=auto", "train.steps=10"), 2, "this run is complete"),
        (
            ("new", f"checkpoint.resume={folder}", "train.batch_size=32"),
            3,
            "train.batch_size = 32: the checkpoint was made with 64",
        ),
        (("new2", f"checkpoint.resume={tmp_path / 'nowhere'}"), 3, "no checkpoint here"),
    ]
    for arguments, code, message in refused:
        assert train(*arguments)[0] == code
        assert message in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("diverged", "optimizer.lr=1e30")
    assert code == 4
    assert "step 2: the loss is nan" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"
