"""Whoever of a world is killed, and whenever: all go on soon, by themselves where they may.

Where they may not, and where the supervisor is killed, all end, say why and leave nothing.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import world_faults
from patience import HANG_SECONDS, PATIENT
from world_faults import Fault, listening, struck
from world_runs import Train, Trained, assert_moved, assert_same, pids, summary

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

KILLS = 20
BY_HAND = 5  # of them, in runs that are started again by hand
STEPS = 60
EVERY = 7
WORLD = (
    *("parallel=hybrid", PATIENT, "train.batch_size=16"),
    *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}"),
)
ROLES = (
    *("worker-0.0", "worker-0.1", "worker-0.2", "worker-1.0", "worker-1.1", "worker-1.2"),
    "server-0",
)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_left(folder: Path) -> None:
    assert len(pids(folder)) == len(ROLES)
    assert not any(alive(pid) for pid in pids(folder).values())
    sockets = struck(folder).sockets
    assert len(sockets) >= len(ROLES)
    assert not listening().keys() & sockets.keys()


def last_checkpoint(folder: Path) -> int:
    latest = folder / "checkpoints" / "latest"
    return int(latest.read_text()[len("step_") :]) if latest.exists() else 0


def starts(folder: Path) -> list[events.Event]:
    """The first event of each attempt."""
    found = events.read(folder / "events.jsonl")
    return [event for event in found if event.kind is Kind.STARTED]


def assert_goes_on(folder: Path, unbroken: Path, train: Train) -> None:
    """From the last checkpoint to the weights of a run that was not broken."""
    begin = last_checkpoint(folder)
    code, _ = train(folder.name, *WORLD, "checkpoint.resume=auto")
    assert code == 0
    assert starts(folder)[-1].step == begin
    assert_same(folder, unbroken, STEPS)
    scores, expected = summary(folder)["test"], summary(unbroken)["test"]
    assert scores == expected


@pytest.fixture
def unbroken(trained: Trained) -> Path:
    folder = trained("unbroken", *WORLD, "parallel.world=in_process", "checkpoint.keep=9")
    assert_moved(folder, EVERY, STEPS)
    return folder


def faults(role: str) -> list[Fault]:
    """At random steps and places in them, always the same ones."""
    draw = random.Random(role)
    steps = draw.sample(range(STEPS), KILLS)
    if role == "supervisor":
        return [
            Fault(rank=draw.randrange(len(ROLES)), step=step, supervisor=True) for step in steps
        ]
    return [Fault(rank=ROLES.index(role), step=step, sends=draw.randrange(3)) for step in steps]


KILLED = ("worker-0.0", "worker-0.1", "worker-1.2", "server-0")


@pytest.mark.slow
@pytest.mark.parametrize("role", KILLED)
def test_a_rank_killed_at_any_step_ends_the_run_and_it_goes_on(
    role: str,
    train: Train,
    faulty: None,
    unbroken: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, fault in enumerate(faults(role)[:BY_HAND]):
        folder = tmp_path / f"killed-{number}"
        fault.plan(folder)
        capsys.readouterr()
        code, _ = train(folder.name, *WORLD, "checkpoint.max_restarts=0")
        assert code == 1
        assert f"{role} (rank {fault.rank}) was killed by SIGKILL" in capsys.readouterr().err
        assert summary(folder)["status"] == "failed"
        assert_nothing_left(folder)
        # The last one may have been on its way.
        assert fault.step - last_checkpoint(folder) <= 2 * EVERY
        assert_goes_on(folder, unbroken, train)


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import dlrm_hybrid.run.training, world_faults
from dlrm_hybrid.cli.main import run
dlrm_hybrid.run.training.TRAIN_RANK = world_faults.ENTRY
sys.exit(run(sys.argv))
"""


@pytest.mark.slow
def test_a_supervisor_killed_at_any_step_leaves_nobody_and_the_run_goes_on(
    train: Train,
    small_rows: list[str],
    unbroken: Path,
    tmp_path: Path,
    short_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", short_folder)  # what a killed program cannot remove stays here
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    for number, fault in enumerate(faults("supervisor")):
        folder = tmp_path / f"killed-{number}"
        fault.plan(folder)
        arguments = ("train", *small_rows, f"hydra.run.dir={folder}", *WORLD)
        log = (tmp_path / "output").open("w")
        supervisor = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=log)
        assert supervisor.wait() == -9
        left = struck(folder)
        assert len(left.pids) >= len(ROLES) + 1, "the ranks and the forkserver"
        while any(alive(pid) for pid in left.pids) and time.time() - left.time < HANG_SECONDS:
            time.sleep(0.01)
        assert not any(alive(pid) for pid in left.pids)
        assert_nothing_left(folder)
        if number < BY_HAND:
            assert_goes_on(folder, unbroken, train)
