"""A rank of a world that is stopped is noticed by whoever waits, named, and started again."""

from pathlib import Path

import pytest
import world_faults
from world_faults import Fault, all_struck
from world_runs import Trained, assert_same, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

PATIENCE_SECONDS = 10.0  # the only thing that this waits for; a busy machine needs less
STEPS = 20
SMALL = ("parallel.trainers=1", "parallel.cuts=[bottom.1]")
ALONE = ("parallel.trainers=1", "parallel.cuts=[]")
# The rank that is stopped; who notices it.
CASES = {
    "server": (SMALL, 2, "server-0"),  # workers that wait for weights
    "worker": (SMALL, 0, "worker-0.0"),  # the worker that waits for its activations
    "only_worker": (ALONE, 0, "worker-0.0"),  # the server, which waits for nobody
    "tables": ((), 4, "worker-1.1"),  # the worker that shares tables with it
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one == "only_worker" else pytest.mark.slow) for one in CASES],
)
def test_a_stopped_rank_is_named_and_the_run_goes_on(
    case: str,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world, rank, name = CASES[case]
    options = ("parallel=hybrid", *world, "train.batch_size=16", f"train.steps={STEPS}")
    unbroken = trained("unbroken", *options, "parallel.world=in_process")
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    Fault(rank=rank, step=8, signal="SIGSTOP").plan(tmp_path / "stopped")
    patience = f"network.patience_seconds={PATIENCE_SECONDS}"
    folder = trained("stopped", *options, "checkpoint.every=5", patience)
    told = capsys.readouterr().out
    assert f"\n{name} (rank {rank}) has been stopped, by SIGSTOP or a debugger: " in told
    starts = [event for event in events.read(folder / "events.jsonl") if event.kind is Kind.STARTED]
    (struck,) = all_struck(folder)
    assert starts[-1].time_seconds - struck.time >= PATIENCE_SECONDS
    # The checkpoint of step 5 counts once somebody has heard that all have written theirs.
    assert starts[-1].step in (0, 5)
    assert summary(folder)["restarts"] == 1
    assert_same(folder, unbroken, STEPS)
