"""Compressed worlds that are struck and go on end like the one that was not.

Killed ones go on by themselves, those that SIGTERM has stopped when they are started again.
"""

from pathlib import Path
from random import Random

import pytest
import world_faults
from patience import PATIENT
from world_faults import Fault, planned
from world_runs import Train, assert_moved, assert_same_state, curve, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

STEPS = 40
EVERY = 7
RANKS = 7
WORLD = (
    *("+experiment=dct_hybrid", PATIENT, "train.batch_size=16"),
    *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=9"),
    *("telemetry.every=5", "train.evaluate_every=25"),
)
EXACT = ("activation.precision=float32",)
METHODS = {
    "hybrid": (),
    "late": ("sync=bounded", "sync.staleness=2"),
    "sparse pulls": ("pull.sparsity=0.95", "gradient.sparsity=0.9", "parallel.servers=2"),
    "drained": ("gradient.drain=flush", "gradient.drain_every=10", "gradient.sparsity=0.9"),
    "discarded": ("gradient.drain=discard", "gradient.drain_every=10", "optimizer=adagrad"),
    "momentum": ("gradient=dgc", "gradient.sparsity=0.9", "gradient.correction.warmup_steps=8"),
    "fitted": ("gradient=sidco", "gradient.sparsity=0.9", "gradient.scope=stage"),
    "levels": ("activation.bits=4", "schedule=one_f_one_b", "schedule.microbatches=2"),
    "levels of weights": ("gradient.precision=levels", "pull.precision=levels"),
    "sketched": ("activation=sketch", *EXACT),
    "feedback": ("activation=gradient_topk", "schedule.microbatches=2", *EXACT),
}
CASES = [(method, name) for method in METHODS for name in ("SIGKILL", "SIGTERM")]
QUICK = ("hybrid", "SIGKILL")


def starts(folder: Path) -> list[int]:
    """The step at which each attempt began."""
    found = events.read(folder / "events.jsonl")
    return [event.step for event in found if event.kind is Kind.STARTED]


@pytest.mark.parametrize(
    ("method", "name"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_struck_world_goes_on_with_all_it_remembers(
    method: str, name: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*WORLD, *METHODS[method])
    code, unbroken = train("unbroken", *options, "parallel.world=in_process")
    assert code == 0
    assert_moved(unbroken, EVERY, STEPS)
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    draw = Random(f"{method} {name}")
    kills = 2 if name == "SIGKILL" else 1
    # By then a checkpoint is valid: soon after a save, with stale weights, it need not be yet.
    steps = sorted(draw.sample(range(2 * EVERY, STEPS - 10), kills))
    faults = [Fault(rank=draw.randrange(RANKS), step=step, signal=name) for step in steps]
    world_faults.plan(tmp_path / "struck", *faults)
    code, folder = train("struck", *options)
    if name == "SIGTERM":
        assert code == 75
        code, _ = train("struck", *options, "checkpoint.resume=auto")
    assert code == 0
    assert planned(folder) == []
    assert len(starts(folder)) == 1 + kills
    assert 0 < starts(folder)[1] <= starts(folder)[-1] < STEPS
    for step in range(EVERY, STEPS, EVERY):
        assert_same_state(folder, unbroken, step)
    assert_same_state(folder, unbroken, STEPS)
    assert curve(folder) == curve(unbroken)
    assert summary(folder)["restarts"] == kills
    for part in ("test", "compression"):
        assert summary(folder)[part] == summary(unbroken)[part]
