"""Worlds that go on without a trainer that dies, leaves or stops, and take it up again."""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import world_faults
from elastic_runs import (
    ELASTIC,
    Fault,
    Killer,
    assert_all_learned,
    assert_nobody_left,
    reached,
    record,
    run,
)
from world_runs import (
    Train,
    Trained,
    assert_moved,
    assert_same,
    checkpoint,
    largest_difference,
    summary,
    tensors,
)

from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE

COMPRESSED = ("gradient=dct", "gradient.density=0.1")
LEVELS = (
    *COMPRESSED,
    "gradient.precision=levels",
    "pull.precision=levels",
    "embedding.levels=true",
)
ROUNDS = "sync=sync"


def killed(role: str, step: int) -> Fault:
    return Fault(role, reached(step))


def leaves(role: str, step: int) -> Fault:
    return Fault(role, reached(step), signal.SIGTERM)


def saving(folder: Path) -> bool:
    return bool(list((folder / "checkpoints").glob("*partial*"))) and reached(20)(folder)


@dataclass(frozen=True)
class Case:
    """What happens in a run with these options, which ends after so many steps."""

    faults: tuple[Fault, ...]
    steps: int
    options: tuple[str, ...] = ()
    evaluate_every: int = 0
    checkpoint_every: int = 0


EVALUATES = ("evaluate.batch_size=4",)
CASES = {
    "threads": Case((killed("worker-1.1", 20), killed("worker-0.0", 30)), 400),
    "killed evaluating": Case((killed("worker-2.1", 50),), 100, EVALUATES, 50),
    "killed saving": Case((Fault("worker-2.0", saving),), 200, COMPRESSED, checkpoint_every=30),
    "levels, rounds": Case(
        (killed("worker-1.1", 20), killed("worker-1.0", 60)), 300, (ROUNDS, *LEVELS)
    ),
    "rounds, killed twice": Case(
        (killed("worker-0.1", 20), killed("worker-0.0", 30)),
        *(300, (ROUNDS, "embedding.staleness=2"), 100),
    ),
    "leaves before it has begun": Case(
        (Fault("worker-1.0", lambda folder: bool(record(folder)), signal.SIGTERM),), 60, COMPRESSED
    ),
    "leaves with rows that it keeps": Case(
        (leaves("worker-1.0", 20),),
        120,
        ("embedding.cache_rows=200", "embedding.cache_batches=8", *COMPRESSED),
        checkpoint_every=60,
    ),
    "all leave": Case(
        tuple(leaves(f"worker-{one}.{one % 2}", 20) for one in (0, 1, 2)), 300, COMPRESSED
    ),
    "leaves evaluating": Case((leaves("worker-0.0", 50),), 100, (*EVALUATES, *COMPRESSED), 50),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_is_learned_whoever_is_killed_or_leaves(
    name: str, train: Train, tmp_path: Path
) -> None:
    case, threads = CASES[name], 2 if name == "threads" else 1
    options = (*case.options, f"train.steps={case.steps}", f"parallel.threads={threads}")
    every = (f"train.evaluate_every={case.evaluate_every}",) if case.evaluate_every else ()
    every = (*every, f"checkpoint.every={case.checkpoint_every}")
    folder, told = run(train, tmp_path, [*case.faults], *options, *every)
    lost = sum(one.number == signal.SIGKILL for one in case.faults)
    redone = assert_all_learned(folder, told, lost, len(case.faults) - lost, threads)
    assert lost or redone == 0
    for due, kind in ((case.evaluate_every, Kind.EVALUATED), (case.checkpoint_every, Kind.SAVED)):
        if due:
            expected = sorted({*range(due, case.steps, due), case.steps})
            assert [one.step for one in told if one.kind is kind] == expected
            if kind is Kind.SAVED:
                assert_moved(folder, *expected[-2:])


@pytest.mark.parametrize(("name", "lost"), [("SIGKILL", 1), ("SIGTERM", 0)])
def test_others_go_on_without_a_trainer_and_it_comes_again(
    name: str, lost: int, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes in a step of its own, and the others wait: no machine is too slow or too fast."""
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
    fault = world_faults.Fault(rank=3, step=10, signal=name, held=(0, 1, 4, 5), returning=2)
    world_faults.plan(tmp_path / "run", fault)
    folder, told = run(train, tmp_path, [], *COMPRESSED, "train.steps=40", "checkpoint.every=20")
    assert world_faults.planned(folder) == []
    redone = assert_all_learned(folder, told, lost, 1 - lost)
    assert_moved(folder, 20, 40)
    texts = [(folder / "log" / f"worker-1.{stage}.log").read_text() for stage in (0, 1)]
    assert [text.count("goes on at batch") for text in texts] == [1, 1]
    if not lost:
        assert redone == 0
        assert [text.count("leaves after SIGTERM") for text in texts] == [1, 1]


@pytest.mark.slow
def test_in_rounds_others_go_on_and_the_killed_trainer_comes_again(
    train: Train, tmp_path: Path
) -> None:
    options = (ROUNDS, "train.steps=300", *COMPRESSED)
    folder, told = run(train, tmp_path, [killed("worker-1.1", 20)], *options)
    assert_all_learned(folder, told, 1)
    batches = [event.values["batches"] for event in told if event.kind is Kind.PROGRESS]
    first, second, third = batches[-1]
    # It has missed some turns; in the end, as before, it takes as many as the others.
    assert second < first and abs(first - third) <= 1
    gained = [now - before for before, now in zip(batches[-4], batches[-1], strict=True)]
    assert max(gained) - min(gained) <= 2 * MOST_AT_ONCE and min(gained) > 0


def test_while_nobody_dies_dense_weights_are_those_of_lock_step(trained: Trained) -> None:
    """Rows that a rate of nearly nothing does not move are the same in whatever order."""
    options = (*ELASTIC, ROUNDS, "parallel.trainers=2", "train.steps=20", "embedding.lr=1e-35")
    options = (*options, "checkpoint.every=10", *COMPRESSED)
    elastic = trained("elastic", *options)
    plain = ("parallel.elastic=false", "parallel.world=in_process")
    lockstep = trained("lockstep", *options, *plain)
    assert_same(elastic, lockstep, 20)
    first, last = tensors(elastic, 10), tensors(elastic, 20)
    assert all(largest_difference(first, last, part) >= 1e-3 for part in ("bottom", "top"))
    assert summary(elastic)["test"] == summary(lockstep)["test"]


@pytest.mark.slow
@pytest.mark.parametrize("elastic", ["true", "false"])
def test_one_trainer_in_rounds_learns_the_bits_of_lock_step(elastic: str, trained: Trained) -> None:
    options = (*ELASTIC, ROUNDS, "parallel.trainers=1", "train.steps=60", "checkpoint.every=30")
    rounds = trained("rounds", *options)
    plain = ("parallel.elastic=false", "parallel.world=in_process")
    lockstep = trained("lockstep", *options, *plain)
    assert_same(rounds, lockstep, 60)
    # Either goes on from what the other has saved.
    resumed = (f"checkpoint.resume={checkpoint(rounds, 30)}", f"parallel.elastic={elastic}")
    again = trained("again", *options, *resumed)
    assert_same(again, lockstep, 60)
    assert_moved(rounds, 30, 60)


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
    steps = 150
    options = (*ELASTIC, f"train.steps={steps}", "sync.ahead=4", *COMPRESSED)
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
    assert 20 <= stopped < steps
    if number == signal.SIGKILL:  # it was not there yet when the checkpoint was saved
        assert residuals(folder, stopped) == {0, 2}
    code, _ = train("run", *options, "parallel.elastic=false", "checkpoint.resume=auto")
    assert (code, summary(folder)["steps"]) == (0, steps)
    assert residuals(folder, steps) == {0, 1, 2}
    assert sum(manifest(folder, steps)["progress"]["batches"]) == 3 * steps


@pytest.mark.slow
def test_a_trainer_that_is_stopped_is_killed_and_started_again(
    train: Train, tmp_path: Path
) -> None:
    fault = Fault("worker-1.0", reached(20), signal.SIGSTOP)
    options = ("parallel.cuts=[]", "network.patience_seconds=3", "train.steps=1500")
    folder, told = run(train, tmp_path, [fault], *options)
    assert_all_learned(folder, told, 1)
    assert "goes on at batch" in (folder / "log" / "worker-1.0.log").read_text()
