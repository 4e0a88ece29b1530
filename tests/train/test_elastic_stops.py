"""Elastic worlds that are stopped while a trainer is away, and trainers that are stopped."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from elastic_runs import (
    ELASTIC,
    Fault,
    Killer,
    assert_all_learned,
    assert_nobody_left,
    reached,
    run,
)
from world_runs import Train, checkpoint, summary

COMPRESSED = ("gradient=dct", "gradient.density=0.1")
STEPS = 150


def manifest(folder: Path, step: int) -> dict:
    return json.loads((checkpoint(folder, step) / "manifest.json").read_text())


def residuals(folder: Path, step: int) -> set[int]:
    """Trainers whose residuals a checkpoint holds."""
    names = [name.split(".") for name in manifest(folder, step)["tensors"]]
    return {int(name[1]) for name in names if name[0] == "trainer" and name[-1] == "residual"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_stopped_without_a_trainer_goes_on_with_all(
    number: int, train: Train, tmp_path: Path
) -> None:
    # With short leases the others rest before it can be there again.
    options = (*ELASTIC, f"train.steps={STEPS}", "sync.ahead=4", *COMPRESSED)
    killer = Killer(tmp_path / "run", [Fault("worker-1.0", reached(20), number)])

    def stop() -> None:
        killer.run()
        os.kill(os.getpid(), signal.SIGTERM)  # the supervisor is this process

    stopper = threading.Thread(target=stop)
    stopper.start()
    code, folder = train("run", *options)
    stopper.join()
    assert (code, summary(folder)["status"], len(killer.struck)) == (75, "preempted", 1)
    assert_nobody_left()
    stopped = summary(folder)["steps"]
    assert 20 <= stopped < STEPS
    if number == signal.SIGKILL:  # it was not there yet when the checkpoint was saved
        assert residuals(folder, stopped) == {0, 2}
    code, _ = train("run", *options, "parallel.elastic=false", "checkpoint.resume=auto")
    assert (code, summary(folder)["steps"]) == (0, STEPS)
    assert residuals(folder, STEPS) == {0, 1, 2}
    assert sum(manifest(folder, STEPS)["progress"]["batches"]) == 3 * STEPS


@pytest.mark.slow
def test_a_trainer_that_is_stopped_is_killed_and_started_again(
    train: Train, tmp_path: Path
) -> None:
    fault = Fault("worker-1.0", reached(20), signal.SIGSTOP)
    options = ("parallel.cuts=[]", "network.patience_seconds=3", "train.steps=1500")
    folder, told = run(train, tmp_path, [fault], *options)
    assert_all_learned(folder, told, 1)
    assert "goes on at batch" in (folder / "log" / "worker-1.0.log").read_text()
