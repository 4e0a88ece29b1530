"""Faults while a run saves: told with their cause, and nothing that was saved is lost."""

import json
from pathlib import Path

import pytest
from world_runs import Train, Trained, assert_same, checkpoint, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

WORLD = (
    *("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]", "parallel.servers=1"),
    *("train.batch_size=16", "train.steps=30", "checkpoint.every=10"),
)
EVERY = ("telemetry.every=1", "checkpoint.every=7")


def test_a_full_disk_of_a_server_ends_the_run_and_it_goes_on(
    train: Train,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:full_disk_rank")
    code, folder = train("full", *WORLD)
    assert code == 5
    root = folder / "checkpoints"
    partial = root / ".step_00000020.0.partial"
    assert (
        f"server-0 (rank 1): {partial}/dense.server-0.safetensors: the checkpoint cannot be "
        f"written: No space left on device (hydra.run.dir = {folder}; "
    ) in capsys.readouterr().err
    assert partial.exists()
    assert (root / "latest").read_text() == "step_00000010\n"
    trained("full", *WORLD, "checkpoint.resume=auto")
    assert not partial.exists()
    unbroken = trained("unbroken", *WORLD, "parallel.world=in_process")
    assert_same(folder, unbroken, 30)


def test_what_sigterm_saves_in_an_evaluation_may_become_the_best(
    train: Train, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("train.evaluate_every=20", "train.steps=50", "checkpoint.keep=9")
    unbroken = trained("unbroken", *options, "checkpoint.every=20")
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:evaluation_rank")
    code, folder = train("stopped", *options)
    assert code == 75
    manifests = [checkpoint(one, 20) / "manifest.json" for one in (unbroken, folder)]
    assert json.loads(manifests[1].read_text())["score"] is None
    assert not (folder / "checkpoints" / "best").exists()
    trained("stopped", *options, "checkpoint.resume=auto")
    scores = [json.loads(manifest.read_text())["score"] for manifest in manifests]
    assert scores[0] == scores[1] is not None
    evaluated = [
        event.step for event in events.read(folder / "events.jsonl") if event.kind is Kind.EVALUATED
    ]
    assert evaluated == [20, 40, 50]
    assert_same(folder, unbroken, 50)


def test_a_damaged_checkpoint_ends_a_run_that_lost_a_rank(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", "saving_faults:damaging_rank")
    code, folder = train("damaged", *EVERY)
    assert code == 3
    told = capsys.readouterr().err
    assert "was killed by SIGKILL" in told
    assert "manifest.json: not a checkpoint" in told
    assert "; to resume from the one before, " in told
    assert summary(folder)["status"] == "failed"


def test_a_saved_event_tells_of_a_valid_checkpoint(trained: Trained) -> None:
    folder = trained("run", *EVERY, "checkpoint.keep=99")
    saved = [event for event in events.read(folder / "events.jsonl") if event.kind is Kind.SAVED]
    assert [event.step for event in saved] == [*range(7, 93, 7), 93]
    for event in saved:
        one: Path = checkpoint(folder, event.step)
        assert event.values["path"] == one.name
        told_since = (
            sum(path.stat().st_size for path in one.glob("*.*")) - event.values["num_bytes"]
        )
        assert told_since == 0 or (event.step == 93 and 0 < told_since < 1000)  # its scores
        assert event.values["background_seconds"] > 0.0
        assert event.values["seconds"] > 0.0
    assert not list((folder / "checkpoints").glob(".*"))
