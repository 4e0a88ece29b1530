"""Starts the ranks of a run, listens to them, passes signals on and never leaves one behind.

Ranks are forked from a forkserver that has made the slow imports once. The kernel ends forkserver
and ranks with the supervisor, even after kill -9. The first rank that fails decides the outcome;
the others are ended. Where that rank was lost, not wrong, all may be started again.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from dlrm_hybrid.telemetry.events import Event, Kind, from_json
from dlrm_hybrid.train.rank import READY, Rank, Report, run_rank
from dlrm_hybrid.types import ExitCode

PRELOAD = "dlrm_hybrid.train.preload"
GRACE_SECONDS = 0.5
# After a signal all ranks stop with one of these, at one step; the last one may still be saving.
TOGETHER = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the exit code and, unless it is DONE, a message for a person.

    Attributes:
        exit_code: for the shell.
        message: why.
        lost: a rank was killed, or is gone for another; what was saved is whole.
    """

    exit_code: int
    message: str
    lost: bool = False


@dataclass(slots=True)
class _Running:
    """A started rank.

    Attributes:
        ready: it has said so: its signal handlers are in place.
        failure: what it said before it ended.
    """

    rank: Rank
    process: BaseProcess
    connection: Connection
    ready: bool = False
    failure: Event | None = None

    def send(self, number: int) -> None:
        """Send a signal, unless the rank is gone."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)


@dataclass(slots=True)
class _Forwarder:
    """While ranks run, passes SIGTERM and SIGINT on to them; a second SIGINT kills them.

    What comes before a rank is ready waits until it is.
    """

    running: list[_Running] = field(default_factory=list[_Running])
    received: list[int] = field(default_factory=list[int])
    _before: dict[int, Any] = field(default_factory=dict[int, Any])

    def __enter__(self) -> _Forwarder:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ready(self, one: _Running) -> None:
        """Send a rank what it has missed."""
        one.ready = True
        for number in self.received:
            one.send(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        enough = self.received.count(signal.SIGINT) > 1
        for one in self.running:
            if enough or one.ready:
                one.send(signal.SIGKILL if enough else number)


def warm_up(modules: Sequence[str]) -> None:
    """Let the forkserver begin with its imports now; ranks are started from it later.

    What ranks are to find in their environment must be there already.

    Args:
        modules: what it imports besides, those of the entries of ranks.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD, *modules])
    forkserver.ensure_running()


def run_ranks(ranks: Sequence[Rank], entry: str, report: Report) -> Outcome:
    """Start all ranks, hand their events to `report`, return when all have ended.

    Args:
        ranks: what to start.
        entry: `module:function`, an `Entry`; a name, so that only ranks import what it needs.
        report: called in this process for every event of every rank.
    """
    return run_attempts(lambda: ranks, entry, report, lambda lost: lost)


def run_attempts(
    ranks: Callable[[], Sequence[Rank]],
    entry: str,
    report: Report,
    again: Callable[[Outcome], Outcome | None],
) -> Outcome:
    """As `run_ranks`, time after time as long as a rank is lost and `again` has no outcome.

    Nobody is asked after a signal. One that comes between two attempts reaches the ranks of the
    next.

    Args:
        ranks: what to start, for each attempt.
        entry: as above.
        report: as above.
        again: what becomes of the run after this outcome; None is another attempt.
    """
    with _Forwarder() as forwarder:
        outcome = None
        while outcome is None:
            outcome = _attempt(ranks(), entry, report, forwarder)
            if outcome.lost and not forwarder.received:
                outcome = again(outcome)
        return outcome


def _attempt(ranks: Sequence[Rank], entry: str, report: Report, forwarder: _Forwarder) -> Outcome:
    running = forwarder.running
    try:
        for rank in ranks:
            running.append(_start(rank, entry))
        return _listen(running, forwarder, report)
    finally:
        _end(running)
        running.clear()


def _start(rank: Rank, entry: str) -> _Running:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    rank.log_folder.mkdir(parents=True, exist_ok=True)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_rank, args=(rank, entry, sender), name=rank.name)
    process.start()
    sender.close()  # or the end of the rank would not end the connection
    return _Running(rank, process, receiver)


def _listen(running: Sequence[_Running], forwarder: _Forwarder, report: Report) -> Outcome:
    """Take messages until every rank has ended or one has failed."""
    open_ranks = {one.connection: one for one in running}
    failed: list[_Running] = []
    deadline = math.inf
    while open_ranks and time.monotonic() < deadline:
        patience = None if math.isinf(deadline) else deadline - time.monotonic()
        ready = wait(list(open_ranks), patience)
        for connection in ready:
            one = open_ranks[connection]  # pyright: ignore[reportArgumentType]
            try:
                message = one.connection.recv_bytes()
            except EOFError:
                del open_ranks[one.connection]
                one.process.join()
                if one.process.exitcode != ExitCode.DONE:
                    failed.append(one)
                    if not (forwarder.received and one.process.exitcode in TOGETHER):
                        # Ranks that lose a peer may say so before the kernel tells of its death.
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                continue
            if message == READY:
                forwarder.ready(one)
            else:
                _take(one, from_json(message), report)
    return _failure(min(failed, key=_blame)) if failed else Outcome(ExitCode.DONE, "")


def _blame(one: _Running) -> int:
    """Who is named for a failure: a killed rank before one with a reason of its own, and that
    before those who only lost a peer; among equals the first.
    """
    code = one.process.exitcode
    if one.failure is None:
        return 0 if code is not None and code < 0 else 1
    return 3 if one.failure.values["lost_peer"] else 2


def _take(one: _Running, event: Event, report: Report) -> None:
    if event.kind is Kind.FAILED:
        one.failure = event
    else:
        report(event)


def _failure(one: _Running) -> Outcome:
    code = one.process.exitcode
    assert code is not None
    if one.failure is not None and code == one.failure.values["exit_code"]:
        return Outcome(code, one.failure.values["message"], one.failure.values["lost_peer"])
    log = one.rank.log_folder / f"{one.rank.name}.log"
    lost = code < 0 and -code not in (signal.SIGINT, signal.SIGTERM)
    if code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        code = ExitCode.INTERRUPTED if -code == signal.SIGINT else ExitCode.FAILED
    else:
        cause = f"ended with exit code {code}"
    return Outcome(code, f"{one.rank.name} (rank {one.rank.index}) {cause}; see {log}", lost)


def _end(running: Sequence[_Running]) -> None:
    for one in running:
        if one.process.is_alive():
            one.process.kill()
        one.process.join()
        one.connection.close()
