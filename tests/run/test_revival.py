"""Ranks that are started again while the others go on."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.run.rank.process import Outcome, Rank
from dlrm_hybrid.run.supervisor import Forwarder, run_attempts
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ExitCode, PeerLostError

SERVER, WORKER, MATE = 0, 1, 2
SIGNALS = {"killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}


def awaited(path: Path) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.005)


def act(argument: str, report, stop) -> None:
    """A server that ends when it is told; workers of which one fails, in its way, and its mate."""
    values = json.loads(argument)
    folder, index, incarnation = Path(values["folder"]), values["index"], values["incarnation"]
    (folder / f"{index}.{incarnation}").write_text(str(os.getpid()))
    report(Event(Kind.STARTED, 0, 0.0, {}))
    if index == SERVER:
        if values["how"] == "is stopped":
            awaited(folder / f"{WORKER}.0")
            report(Event(Kind.LOST, 0, 0.0, {"rank": WORKER, "incarnation": 0}))
        awaited(folder / f"{MATE}.{values['lives'] - 1}")
        awaited(folder / f"{WORKER}.{values['lives'] - 1}")
        report(Event(Kind.FINISHED, 0, 0.0, {}))
        return
    if values["how"] == "leaves" and incarnation < values["lives"] - 1:
        report(Event(Kind.LEFT, 0, 0.0, {}))
        return
    if index == WORKER and incarnation < values["lives"] - 1:
        awaited(folder / f"{MATE}.{incarnation}")
        if values["how"] in SIGNALS:
            os.kill(os.getpid(), SIGNALS[values["how"]])
        raise {
            "misses its mate": PeerLostError(MATE, "gone"),
            "misses a server": PeerLostError(SERVER, "gone"),
            "is wrong": ValueError("wrong"),
        }[values["how"]]
    time.sleep(2 * HANG_SECONDS)  # the end does not wait for it


@dataclass
class Workers:
    folder: Path
    how: str
    lives: int
    budget: int = 9
    started: int = 0
    told: list[str] = field(default_factory=list[str])
    rejoined: list[int] = field(default_factory=list[int])

    def instead(self, lost: Rank, message: str | None) -> Sequence[Rank]:
        if message is None:
            self.rejoined.append(lost.index)
        else:
            self.told.append(message)
            if self.started == self.budget:
                return []
        self.started += 1
        return [self.rank(one) for one in sorted(lost.mates)]

    def rank(self, index: int) -> Rank:
        values = {
            **{"folder": str(self.folder), "index": index, "how": self.how, "lives": self.lives},
            "incarnation": self.started if index != SERVER else 0,
        }
        return Rank(
            index=index,
            name=f"rank-{index}",
            argument=json.dumps(values),
            log_folder=self.folder,
            incarnation=values["incarnation"],
            mates=frozenset({WORKER, MATE} if index != SERVER else ()),
        )

    def run(self) -> Outcome:
        with Forwarder.installed() as forwarder:
            ranks = [self.rank(index) for index in (SERVER, WORKER, MATE)]
            return run_attempts(
                forwarder,
                lambda: ranks,
                f"{__name__}:act",
                lambda event: None,
                instead=self.instead,
            )

    def left(self) -> list[int]:
        found = [int(path.read_text()) for path in self.folder.glob("?.?")]
        return [pid for pid in found if psutil.pid_exists(pid)]


@pytest.mark.parametrize("how", ["killed", pytest.param("misses its mate", marks=pytest.mark.slow)])
def test_a_rank_and_its_mates_are_started_again(how: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path, how, lives=3)
    outcome = workers.run()
    assert (outcome.exit_code, outcome.message) == (ExitCode.DONE, "")
    assert len(workers.told) == 2 and all("(rank " in text for text in workers.told)
    assert len(list(tmp_path.glob("?.?"))) == 1 + 2 * 3
    assert workers.left() == []


def test_ranks_that_have_left_are_started_again_together_and_without_end(tmp_path: Path) -> None:
    workers = Workers(tmp_path, "leaves", lives=3, budget=0)
    outcome = workers.run()
    assert (outcome.exit_code, outcome.message) == (ExitCode.DONE, "")
    assert len(workers.rejoined) == 2 and workers.told == []
    assert len(list(tmp_path.glob("?.?"))) == 1 + 2 * 3
    assert workers.left() == []


def test_a_rank_of_which_nothing_is_heard_is_killed_and_started_again(tmp_path: Path) -> None:
    workers = Workers(tmp_path, "is stopped", lives=2)
    outcome = workers.run()
    assert (outcome.exit_code, outcome.message) == (ExitCode.DONE, "")
    (told,) = workers.told
    assert "rank-1 (rank 1) was stopped or cut off, and has been killed" in told
    assert workers.left() == []


@pytest.mark.parametrize(("how", "lost"), [("misses a server", True), ("is wrong", False)])
def test_who_misses_an_immortal_rank_or_is_wrong_ends_all(
    how: str, lost: bool, tmp_path: Path
) -> None:
    workers = Workers(tmp_path, how, lives=2)
    outcome = workers.run()
    assert outcome.exit_code != ExitCode.DONE and bool(outcome.lost) is lost
    assert workers.told == [] and workers.left() == []


def test_who_may_not_be_started_again_ends_all(tmp_path: Path) -> None:
    workers = Workers(tmp_path, "killed", lives=9, budget=1)
    outcome = workers.run()
    assert workers.started == 1
    assert outcome.lost and "rank-1 (rank 1) was killed by SIGKILL" in outcome.message
    assert workers.left() == []
