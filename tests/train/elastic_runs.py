"""Runs of elastic worlds, and signals to their ranks."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from patience import HANG_SECONDS
from world_runs import Train, summary

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE

ELASTIC = (
    *("parallel=hybrid", "sync=async", "embedding=served", "parallel.elastic=true"),
    *("parallel.trainers=3", "parallel.cuts=[bottom.2]", "parallel.servers=2"),
    *("parallel.table_servers=1", "train.batch_size=16"),
    *("train.epochs=40", "checkpoint.every=0", "telemetry.every=10", "sync.check_every=1"),
)
RANKS = 9


class Fault(NamedTuple):
    """A signal to the rank with this role, as soon as it is time."""

    role: str
    is_time: Callable[[Path], bool]
    number: int = signal.SIGKILL


class Killer(threading.Thread):
    """Sends signals to ranks of a run one after the other, to each incarnation once."""

    def __init__(self, folder: Path, faults: list[Fault]) -> None:
        super().__init__()
        self.folder, self.faults = folder, faults
        self.struck: list[str] = []

    def run(self) -> None:
        until = time.monotonic() + HANG_SECONDS
        for role, is_time, number in self.faults:
            path = self.folder / "log" / f"{role}.pid"
            while not is_time(self.folder) or path.read_text().strip() in {"", *self.struck}:
                if time.monotonic() > until:
                    return
                time.sleep(0.002)
            self.struck.append(path.read_text().strip())
            os.kill(int(self.struck[-1]), number)


def record(folder: Path) -> list[Event]:
    path = folder / "events.jsonl"
    return list(events.read(path)) if path.exists() else []


def reached(step: int) -> Callable[[Path], bool]:
    return lambda folder: any(
        event.kind is Kind.PROGRESS and event.step >= step for event in record(folder)
    )


def run(
    train: Train, tmp_path: Path, faults: list[Fault], *options: str
) -> tuple[Path, list[Event]]:
    """A whole run with these faults: it must end complete, in one attempt."""
    killer = Killer(tmp_path / "run", faults)
    killer.start()
    code, folder = train("run", *ELASTIC, *options)
    killer.join()
    assert len(killer.struck) == len(faults), "a fault did not strike"
    assert (code, summary(folder)["status"]) == (0, "complete")
    told = record(folder)
    assert [event.step for event in told if event.kind is Kind.STARTED] == [0]
    assert_nobody_left()
    return folder, told


def assert_nobody_left() -> None:
    """No rank of any incarnation: the forkserver, a child of this process, has no children."""
    assert [child.children() for child in psutil.Process().children() if child.children()] == []


def assert_all_learned(
    folder: Path, told: list[Event], lost: int, left: int = 0, threads: int = 1
) -> int:
    """By the leader's counts each batch was told of once; how many were given out again."""
    steps = summary(folder)["steps"]
    last = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    progress = json.loads((last / "manifest.json").read_text())["progress"]
    assert sum(progress["batches"]) == 3 * steps
    assert sum(one.values["rows"] for one in told if one.kind is Kind.PROGRESS) == 3 * 16 * steps
    (finished,) = [event for event in told if event.kind is Kind.FINISHED]
    found = summary(folder)["sync"]
    counts = ("lost_trainers", "left_trainers", "redone_batches")
    assert all(finished.values[name] == found[name] for name in counts)
    assert (found["lost_trainers"], found["left_trainers"]) == (lost, left)
    assert 0 <= found["redone_batches"] <= 2 * MOST_AT_ONCE * threads * lost
    return found["redone_batches"]
