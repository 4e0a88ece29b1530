"""Worlds that go on without a trainer that dies, and take it up again."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from world_runs import Train, pids, summary

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE

ELASTIC = (
    *("parallel=hybrid", "sync=async", "embedding=served", "parallel.elastic=true"),
    *("parallel.trainers=3", "parallel.cuts=[bottom.2]", "parallel.servers=2"),
    *("parallel.table_servers=1", "network.patience_seconds=30", "train.batch_size=16"),
    *("train.epochs=40", "checkpoint.every=0", "telemetry.every=10", "sync.check_every=1"),
)
RANKS = 9
DEADLINE_SECONDS = 90.0


class Killer(threading.Thread):
    """Kills ranks of a run one after the other, each when it is time, each incarnation once."""

    def __init__(self, folder: Path, kills: list[tuple[str, Callable[[Path], bool]]]) -> None:
        super().__init__()
        self.folder, self.kills = folder, kills
        self.struck: list[str] = []

    def run(self) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        for role, is_time in self.kills:
            path = self.folder / "log" / f"{role}.pid"
            while not is_time(self.folder) or path.read_text().strip() in {"", *self.struck}:
                if time.monotonic() > until:
                    return
                time.sleep(0.002)
            self.struck.append(path.read_text().strip())
            os.kill(int(self.struck[-1]), signal.SIGKILL)


def record(folder: Path) -> list[Event]:
    path = folder / "events.jsonl"
    return list(events.read(path)) if path.exists() else []


def reached(step: int) -> Callable[[Path], bool]:
    return lambda folder: any(
        event.kind is Kind.PROGRESS and event.step >= step for event in record(folder)
    )


def run(
    train: Train, tmp_path: Path, kills: list[tuple[str, Callable[[Path], bool]]], *options: str
) -> tuple[Path, list[Event]]:
    """A whole run in which these ranks are killed: it must end complete, in one attempt."""
    killer = Killer(tmp_path / "run", kills)
    killer.start()
    code, folder = train("run", *ELASTIC, *options)
    killer.join()
    assert len(killer.struck) == len(kills), "a fault did not strike"
    assert (code, summary(folder)["status"]) == (0, "complete")
    told = record(folder)
    assert [event.step for event in told if event.kind is Kind.STARTED] == [0]
    left = {*pids(folder).values(), *map(int, killer.struck)}
    assert not any(psutil.pid_exists(pid) for pid in left)
    return folder, told


def assert_all_learned(folder: Path, told: list[Event], lost: int) -> None:
    """By the leader's counts each batch was told of once; points of the curve miss none."""
    steps = summary(folder)["steps"]
    last = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    progress = json.loads((last / "manifest.json").read_text())["progress"]
    assert sum(progress["batches"]) == 3 * steps
    assert sum(one.values["rows"] for one in told if one.kind is Kind.PROGRESS) == 3 * 16 * steps
    (finished,) = [event for event in told if event.kind is Kind.FINISHED]
    assert finished.values["lost_trainers"] == lost
    assert 0 <= finished.values["redone_batches"] <= 2 * MOST_AT_ONCE * lost
    assert summary(folder)["sync"]["lost_trainers"] == lost


def test_others_go_on_without_a_killed_trainer(train: Train, tmp_path: Path) -> None:
    kills = [("worker-1.1", reached(20))]
    folder, told = run(train, tmp_path, kills, "train.steps=300")
    assert_all_learned(folder, told, 1)
    times = [event.time_seconds for event in told if event.kind is Kind.PROGRESS]
    assert max(after - before for before, after in zip(times[3:], times[4:], strict=False)) < 1.5


@pytest.mark.slow
def test_a_trainer_may_be_killed_twice(train: Train, tmp_path: Path) -> None:
    kills = [("worker-0.0", reached(20)), ("worker-0.0", reached(30))]
    folder, told = run(train, tmp_path, kills, "train.steps=300")
    assert_all_learned(folder, told, 2)


@pytest.mark.parametrize("role", ["worker-0.0", pytest.param("worker-2.1", marks=pytest.mark.slow)])
def test_a_trainer_killed_while_evaluating(role: str, train: Train, tmp_path: Path) -> None:
    kills = [(role, lambda folder: reached(50)(folder))]
    options = ("train.steps=100", "train.evaluate_every=50", "evaluate.batch_size=16")
    folder, told = run(train, tmp_path, kills, *options)
    assert_all_learned(folder, told, 1)
    assert [one.step for one in told if one.kind is Kind.EVALUATED] == [50, 100]


def test_a_trainer_killed_while_a_checkpoint_is_saved(train: Train, tmp_path: Path) -> None:
    def saving(folder: Path) -> bool:
        return bool(list((folder / "checkpoints").glob("*partial*"))) and reached(20)(folder)

    options = ("train.steps=200", "checkpoint.every=30", "gradient=dct", "gradient.sparsity=0.9")
    folder, told = run(train, tmp_path, [("worker-2.0", saving)], *options)
    assert_all_learned(folder, told, 1)
    saved = [one.step for one in told if one.kind is Kind.SAVED]
    assert saved == [30, 60, 90, 120, 150, 180, 200]
