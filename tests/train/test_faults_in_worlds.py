"""Ranks of a world that are killed, stopped or told to stop: who ends, what is said, what goes on.

That a killed world restarts and learns the same bits is a row of `test_world_matrix.py`.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import world_faults
from patience import HANG_SECONDS
from struck_program import STRUCK
from world_faults import Fault, planned, struck
from world_runs import Train, Trained, assert_same, checkpoint, pids, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

STEPS = 20
WORLD = ("parallel=hybrid", "train.batch_size=16", f"train.steps={STEPS}")
TWO_STAGES = (*WORLD, "parallel.cuts=[bottom.2]")  # four workers and a server
ASYNC = (
    *(*TWO_STAGES, "sync=async", "embedding=served", "parallel.table_servers=1", "sync.ahead=12"),
    *("sync.check_every=1", "checkpoint.every=0"),
)
# 30 groups of two batches would follow the one in which the signal comes.
EVALUATES = (*TWO_STAGES, "evaluate.batch_size=16")
IN_PROCESS = "parallel.world=in_process"


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)


def slow(*values: object, id: str) -> object:
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def events_of(folder: Path, kind: Kind) -> list[events.Event]:
    return [event for event in events.read(folder / "events.jsonl") if event.kind is kind]


def assert_nobody_left(folder: Path) -> None:
    assert pids(folder) and not any(psutil.pid_exists(pid) for pid in pids(folder).values())


def batches(folder: Path, step: int) -> list[int]:
    """Of each trainer, at a checkpoint."""
    facts = json.loads((checkpoint(folder, step) / "manifest.json").read_text())
    return facts["progress"]["batches"]


THREADS = (*ASYNC, "parallel.threads=2", "sync.lr_scale=one", "gradient=dct", "optimizer.lr=0.03")
SIGTERM, SIGINT = ("SIGTERM", 75, "preempted"), ("SIGINT", 130, "interrupted")


@pytest.mark.parametrize(
    ("world", "fault", "ends"),
    [
        pytest.param(TWO_STAGES, Fault(rank=3, step=8), SIGTERM, id="step"),
        pytest.param(EVALUATES, Fault(rank=3, step=12, evaluating=True), SIGINT, id="evaluation"),
        slow(EVALUATES, Fault(rank=3, step=12, evaluating=True), SIGTERM, id="evaluation, term"),
        pytest.param(ASYNC, Fault(rank=2, step=10), SIGTERM, id="async"),
        slow(ASYNC, Fault(rank=2, step=10), SIGINT, id="async, int"),
        slow(THREADS, Fault(rank=2, step=10), SIGTERM, id="threads"),
    ],
)
def test_a_signal_to_a_rank_stops_all_at_one_step_and_the_run_goes_on(
    world: tuple[str, ...],
    fault: Fault,
    ends: tuple[str, int, str],
    train: Train,
    trained: Trained,
    tmp_path: Path,
) -> None:
    name, exit_code, status = ends
    replace(fault, signal=name).plan(tmp_path / "run")
    code, folder = train("run", *world)
    assert planned(folder) == []
    assert (code, summary(folder)["status"]) == (exit_code, status)
    assert_nobody_left(folder)
    step = int((folder / "checkpoints" / "latest").read_text()[5:])
    assert events_of(folder, Kind.EVALUATED) == []
    assert step == STEPS if fault.evaluating else fault.step <= step < STEPS or world != TWO_STAGES
    is_async = "sync=async" in world
    if is_async:
        assert 0 < step < STEPS and sum(batches(folder, step)) == 2 * step
    trained("run", *world, "checkpoint.resume=auto")
    assert [one.step for one in events_of(folder, Kind.EVALUATED)] == [STEPS]
    assert (summary(folder)["status"], summary(folder)["samples"]) == ("complete", STEPS * 2 * 16)
    if is_async:
        assert sum(batches(folder, STEPS)) == 2 * STEPS
        return
    unbroken = trained("unbroken", *world, IN_PROCESS)
    assert_same(folder, unbroken, STEPS)
    assert summary(folder)["test"] == summary(unbroken)["test"]


@pytest.mark.parametrize(
    ("role", "rank"),
    [
        ("worker-0.1", 1),
        slow("worker-1.1", 3, id="worker-1.1"),
        slow("server-0", 4, id="server-0"),
    ],
)
def test_a_killed_rank_is_named_and_ends_the_others_and_the_run_goes_on_by_hand(
    role: str,
    rank: int,
    train: Train,
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (*TWO_STAGES, "checkpoint.every=7")
    Fault(rank=rank, step=12, sends=1).plan(tmp_path / "run")
    code, folder = train("run", *options, "checkpoint.max_restarts=0")
    assert planned(folder) == []
    assert (code, summary(folder)["status"]) == (1, "failed")
    assert f"{role} (rank {rank}) was killed by SIGKILL" in capsys.readouterr().err
    assert len(pids(folder)) == 5
    assert_nobody_left(folder)
    trained("run", *options, "checkpoint.resume=auto")
    # The checkpoint of step 7 counts once somebody has heard that all have written theirs.
    assert events_of(folder, Kind.STARTED)[-1].step in (0, 7)
    assert_same(folder, trained("unbroken", *options, IN_PROCESS), STEPS)


PATIENCE_SECONDS = 10.0  # the only thing that this waits for; a busy machine needs less
SMALL = (*WORLD, "parallel.trainers=1", "parallel.cuts=[bottom.1]")
ALONE = (*WORLD, "parallel.trainers=1", "parallel.cuts=[]")


@dataclass(frozen=True)
class Stopped:
    """The rank that is stopped; who notices it."""

    world: tuple[str, ...]
    rank: int
    name: str


@pytest.mark.parametrize(
    "case",
    [
        # The server notices it, which waits for nobody.
        pytest.param(Stopped(ALONE, 0, "worker-0.0"), id="only worker"),
        slow(Stopped(SMALL, 2, "server-0"), id="server"),  # workers that wait for weights
        slow(Stopped(SMALL, 0, "worker-0.0"), id="worker"),  # who waits for its activations
        slow(Stopped(WORLD, 4, "worker-1.1"), id="tables"),  # who shares tables with it
        slow(Stopped(ASYNC, 2, "worker-1.0"), id="async"),  # all, at the next rest
    ],
)
def test_a_stopped_rank_is_named_and_the_run_goes_on(
    case: Stopped, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Fault(rank=case.rank, step=8, signal="SIGSTOP").plan(tmp_path / "stopped")
    patience = f"network.patience_seconds={PATIENCE_SECONDS}"
    folder = trained("stopped", *case.world, "checkpoint.every=5", patience)
    told = capsys.readouterr().out
    stopped = f"\n{case.name} (rank {case.rank}) has been stopped, by SIGSTOP or a debugger: "
    assert stopped in told
    last = events_of(folder, Kind.STARTED)[-1]
    assert last.time_seconds - struck(folder).time >= PATIENCE_SECONDS
    assert summary(folder)["restarts"] == 1
    if case.world == ASYNC:
        assert sum(batches(folder, STEPS)) == 2 * STEPS
        return
    assert last.step in (0, 5)
    assert_same(folder, trained("unbroken", *case.world, IN_PROCESS), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 7, 12])
def test_a_supervisor_killed_at_any_step_leaves_nobody_and_the_run_goes_on(
    step: int,
    trained: Trained,
    small_rows: list[str],
    tmp_path: Path,
    short_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", short_folder)  # what a killed program cannot remove stays here
    options, folder = (*WORLD, "checkpoint.every=7"), tmp_path / "run"
    Fault(rank=step % 5, step=step, supervisor=True).plan(folder)
    arguments = ("train", *small_rows, f"hydra.run.dir={folder}", *options)
    with (tmp_path / "output").open("w") as log:
        supervisor = subprocess.Popen([sys.executable, *STRUCK, *arguments], stdout=log)
        assert supervisor.wait() == -9
    left = struck(folder)
    assert len(left.pids) >= 7 + 1, "the ranks and the forkserver"
    while any(map(_lives, left.pids)) and time.time() - left.time < HANG_SECONDS:
        time.sleep(0.01)
    assert not any(map(_lives, left.pids))
    assert len(left.sockets) >= 7 and not world_faults.listening().keys() & left.sockets.keys()
    trained("run", *options, "checkpoint.resume=auto")
    assert_same(folder, trained("unbroken", *options, IN_PROCESS), STEPS)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
