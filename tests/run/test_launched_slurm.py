"""Ranks that SLURM has started, on loopback: its variables are set by hand."""

import os
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from launched_runs import SIZE, WORLD, await_training, ended, slurm, started
from patience import HANG_SECONDS
from struck_program import STRUCK
from world_faults import Fault, await_stop
from world_runs import Train, assert_same, summary

from dlrm_hybrid.data.manifest import MANIFEST_FILE, read, write
from dlrm_hybrid.disk import locked

TWO = ("parallel.trainers=1", "parallel.cuts=[]")


def run(*arguments: str, size: int = SIZE, **changes: str):
    """Start all tasks and wait for them."""
    commands, environments = zip(*slurm(size, *arguments, **changes), strict=True)
    with started(commands, environments) as processes:
        return ended(processes)


@pytest.mark.slow
def test_tasks_learn_the_same_as_ranks_of_a_supervisor(
    train: Train, small_rows: list[str], tmp_path: Path
) -> None:
    steps = ("train.steps=20", "checkpoint.every=20")
    folder = tmp_path / "tasks"
    tasks = run(*small_rows, *WORLD, *steps, f"hydra.run.dir={folder}")
    assert [task.code for task in tasks] == [0] * SIZE, tasks
    code, plain = train("plain", *WORLD, *steps)
    assert code == 0
    assert_same(folder, plain, 20)
    told, expected = summary(folder), summary(plain)
    assert told["status"] == "complete"
    assert told["network"]["by_class"] == expected["network"]["by_class"]
    assert told["roles"].keys() == expected["roles"].keys()
    assert told["test"] == expected["test"]
    # Rank 0 says what it prepares, the leader shows the run, the others are silent.
    assert tasks[0].text == f"run folder {folder}\n"
    assert "Bayes optimum" in tasks[1].text
    assert [task.text for task in tasks[2:]] == [""] * 3
    assert len(list(folder.glob("log/*.log"))) == SIZE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (WORLD, 2, "configuration: 1 fault\n  SLURM_NTASKS = 2: parallel.trainers = 2, "),
        ((*WORLD, *TWO), 2, "configuration: 1 fault\n  hydra.run.dir = "),  # in use
        (("-m", "optimizer.lr=0.1,0.2"), 2, "-m: a launcher starts the processes of one run"),
        (("--cfg", "job"), 0, "batch_size: 64"),
    ],
    ids=["size", "folder", "sweep", "help"],
)
def test_all_end_alike_and_rank_0_says_why(
    arguments: tuple[str, ...], code: int, said: str, small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    is_taken = TWO[0] in arguments
    where = [f"hydra.run.dir={folder}"] if arguments[:2] == WORLD[:2] else []
    with locked(folder / ".lock") if is_taken else nullcontext():
        tasks = run(*small_rows, *arguments, *where, size=2)
    assert [task.code for task in tasks] == [code, code]
    assert said in tasks[0].text
    assert (f"{folder}: in use by process {os.getpid()} on " in tasks[0].text) == is_taken
    assert tasks[1].text == ""
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["server-0", "worker-1.1"])
def test_a_killed_rank_is_named_and_ends_the_others(
    killed: str, small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ("train.epochs=1000", "telemetry.every=10", f"hydra.run.dir={folder}")
    commands, environments = zip(*slurm(SIZE, *small_rows, *WORLD, *more), strict=True)
    with started(commands, environments) as processes:
        pids = await_training(folder, lambda: all(one.poll() is None for one in processes))
        ranks = {process.pid: rank for rank, process in enumerate(processes)}
        os.kill(pids[killed], signal.SIGKILL)
        tasks = ended(processes)
    lost = ranks[pids[killed]]
    for rank, task in enumerate(tasks):
        if rank == lost:
            assert task.code == -signal.SIGKILL
        else:
            assert task.code == 1
            assert f"{killed} (rank {lost}) is gone: " in task.text
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert summary(folder)["status"] == "failed"


# Rank 0 leaves as soon as it may, without ranks that have died, and waits for the others.
IN_HASTE = f"""
import sys
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.run.launch import member
member.FAREWELL_SECONDS, member.LATE_SECONDS = 0.0, {HANG_SECONDS}
sys.exit(run(sys.argv))
"""


@pytest.mark.slow
def test_a_rank_that_is_late_names_the_killed_one_too(
    small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ("train.epochs=1000", "telemetry.every=10", f"hydra.run.dir={folder}")
    commands, environments = zip(*slurm(SIZE, *small_rows, *WORLD, *more), strict=True)
    commands = [[sys.executable, "-c", IN_HASTE, *command[3:]] for command in commands]
    with started(commands, environments) as processes:
        pids = await_training(folder, lambda: all(one.poll() is None for one in processes))
        os.kill(pids["worker-1.0"], signal.SIGSTOP)
        os.kill(pids["worker-1.1"], signal.SIGKILL)
        for process in (processes[1], processes[SIZE - 1]):
            process.wait(HANG_SECONDS)
        os.kill(pids["worker-1.0"], signal.SIGCONT)
        tasks = ended(processes)
    assert "worker-1.0 (rank 2): worker-1.1 (rank 3) is gone: " in tasks[2].text


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_that_the_next_start_goes_on_from(
    small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = (*small_rows, *WORLD, "train.steps=40", f"hydra.run.dir={folder}")
    commands, environments = zip(*slurm(SIZE, *arguments), strict=True)
    commands = [[sys.executable, *STRUCK, *command[3:]] for command in commands]
    Fault(rank=0, step=20, signal="SIGSTOP").plan(folder)
    with started(commands, environments) as processes:
        stopped = await_stop(folder, "worker-0.0")
        for process in processes:
            process.send_signal(signal.SIGTERM)
        os.kill(stopped, signal.SIGCONT)
        tasks = ended(processes)
    assert [task.code for task in tasks[:4]] == [75] * 4
    before = summary(folder)
    assert f"checkpoint saved at step {before['steps']}" in tasks[1].text
    assert "resume with\n  srun … python -m dlrm_hybrid train " in tasks[1].text
    assert before["status"] == "preempted"
    assert before["steps"] < 40
    tasks = run(*arguments, "checkpoint.resume=auto")
    assert [task.code for task in tasks] == [0] * SIZE, tasks
    assert "steps of 128 samples, from step " in tasks[1].text
    assert summary(folder)["steps"] == 40


@pytest.mark.slow
def test_other_rows_on_another_machine_are_refused(small_rows: list[str], tmp_path: Path) -> None:
    """Two machines are made believe: each task works in a folder of its own."""
    given = next(one for one in small_rows if one.startswith("data.prepared="))
    prepared = Path(given.partition("=")[2])
    world = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[bottom.1]")
    more = ("parallel.servers=0", "data.prepared=rows", f"hydra.run.dir={tmp_path / 'run'}")
    commands, environments = [], []
    for rank, (command, changes) in enumerate(slurm(2, *small_rows, *world, *more)):
        shutil.copytree(prepared, tmp_path / f"machine-{rank}" / "rows")
        commands.append(["env", "-C", str(tmp_path / f"machine-{rank}"), *command])
        environments.append({**changes, "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)})
    with started(commands, environments) as processes:
        assert [task.code for task in ended(processes)] == [0, 0]

    manifest = tmp_path / "machine-1" / "rows" / MANIFEST_FILE
    known = read(manifest.parent)
    train, test = known.parts.train, known.parts.test
    moved = replace(  # a row of the training part
        known.parts,
        train=replace(train, rows=train.rows - 1),
        test=replace(test, rows=test.rows + 1),
    )
    write(manifest.parent, replace(known, parts=moved))
    commands = [[*command, f"hydra.run.dir={tmp_path / 'other'}"] for command in commands]
    with started(commands, environments) as processes:
        tasks = ended(processes)
    assert [task.code for task in tasks] == [3, 3]
    for task in tasks:
        assert "(rank 1) differ from those of rank 0" in task.text
