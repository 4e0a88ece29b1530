"""A signal to one rank of a world stops all of them between the batches of an evaluation."""

from pathlib import Path

import psutil
import pytest
import world_faults
from patience import PATIENT
from world_faults import Fault, struck
from world_runs import Train, Trained, assert_same, pids, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

STEPS = 20
# 50 groups of two batches would follow the one in which the signal comes.
WORLD = (
    *("parallel=hybrid", PATIENT, "train.batch_size=16"),
    *(f"train.steps={STEPS}", "evaluate.batch_size=8"),
)


def evaluated(folder: Path) -> list[int]:
    found = events.read(folder / "events.jsonl")
    return [event.step for event in found if event.kind is Kind.EVALUATED]


@pytest.mark.parametrize(
    ("name", "exit_code"), [pytest.param("SIGTERM", 75, marks=pytest.mark.slow), ("SIGINT", 130)]
)
def test_a_signal_stops_all_between_the_batches_of_an_evaluation(
    name: str,
    exit_code: int,
    train: Train,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    Fault(rank=3, step=12, evaluating=True, signal=name).plan(tmp_path / "struck")
    code, folder = train("struck", *WORLD)
    assert struck(folder)
    assert code == exit_code
    assert evaluated(folder) == []
    assert not any(psutil.pid_exists(pid) for pid in pids(folder).values())
    checkpoint = folder / "checkpoints" / f"step_{STEPS:08d}"
    assert checkpoint.exists()
    assert summary(folder)["steps"] == STEPS
    if name == "SIGTERM":
        code, _ = train("struck", *WORLD, "checkpoint.resume=auto")
        assert (code, evaluated(folder)) == (0, [STEPS])
        unbroken = trained("unbroken", *WORLD, "parallel.world=in_process")
        assert_same(folder, unbroken, STEPS)
        assert summary(folder)["test"] == summary(unbroken)["test"]
