"""Starts the ranks of a run, listens to them, passes signals on and never leaves one running.

Ranks are forked from a forkserver that has made the slow imports once. The kernel ends forkserver
and ranks with the supervisor, even after kill -9. The first rank that fails decides the outcome;
the others are ended. Where it was lost, not wrong, all may be started again.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from dlrm_hybrid import limits
from dlrm_hybrid.process import is_stopped
from dlrm_hybrid.run.rank.process import READY, PeerFailure, Rank, Report, root_cause
from dlrm_hybrid.run.running import (
    Forwarder,
    Running,
    end,
    forkserver_errors,
    start,
)
from dlrm_hybrid.telemetry.events import Kind, from_json
from dlrm_hybrid.types import ExitCode

GRACE_SECONDS = 0.5
SILENCE_SECONDS = 2.0
UNKNOWN_CODE = 255  # of a rank whose forkserver is gone, and all of its ranks with it
# After a signal all ranks stop with one of these, at one step; the last one may still be saving.
TOGETHER = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the exit code and, unless it is DONE, a message for a person.

    Attributes:
        exit_code: for the shell.
        message: why.
        lost: a rank was killed, or is gone for another; what was saved is intact.
    """

    exit_code: int
    message: str
    lost: bool = False


def run_ranks(ranks: Sequence[Rank], entry: str, report: Report) -> Outcome:
    """Start all ranks, hand their events to `report`, return when all have ended.

    Args:
        ranks: what to start.
        entry: `module:function`, an `Entry`; a name, so that only ranks import what it needs.
        report: called in this process for every event of every rank.
    """
    with Forwarder() as forwarder:
        return run_attempts(forwarder, lambda: ranks, entry, report, lambda lost: lost)


def run_attempts(
    forwarder: Forwarder,
    ranks: Callable[[], Sequence[Rank]],
    entry: str,
    report: Report,
    again: Callable[[Outcome], Outcome | None],
) -> Outcome:
    """As `run_ranks`, time after time as long as a rank is lost and `again` has no outcome.

    `again` is not called after a signal. One that comes between two attempts reaches the ranks of
    the next.

    Args:
        forwarder: has taken over this process's signals.
        ranks: what to start, for each attempt.
        entry: as above.
        report: as above.
        again: what becomes of the run after this outcome; None is another attempt.
    """
    outcome = None
    while outcome is None:
        outcome = _attempt(ranks(), entry, report, forwarder)
        if outcome.lost and not forwarder.received:
            outcome = again(outcome)
    return outcome


def _attempt(ranks: Sequence[Rank], entry: str, report: Report, forwarder: Forwarder) -> Outcome:
    running = forwarder.running
    try:
        for rank in ranks:
            try:
                running.append(start(rank, entry))
            except (EOFError, ConnectionError) as error:
                return _forkserver_lost(rank, error)
        return _listen(running, forwarder, report)
    finally:
        end(running)
        running.clear()


def _listen(running: Sequence[Running], forwarder: Forwarder, report: Report) -> Outcome:
    """Take messages until every rank has ended or one has failed."""
    open_ranks = {one.connection: one for one in running}
    failed: list[Running] = []
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
                one.ended = True
                one.process.join()
                if one.process.exitcode != ExitCode.DONE:
                    failed.append(one)
                    if not (forwarder.received and one.process.exitcode in TOGETHER):
                        # Ranks that lose a peer may say so before the kernel reports its death,
                        # those that lost patience do not lose it at one moment.
                        grace = GRACE_SECONDS if one.peer_failure is None else SILENCE_SECONDS
                        deadline = min(deadline, time.monotonic() + grace)
                continue
            if message == READY:
                forwarder.ready(one)
            elif (event := from_json(message)).kind is Kind.FAILED:
                one.failure = event
            else:
                report(event)
    if failed and forwarder.in_haste:
        return Outcome(ExitCode.INTERRUPTED, "killed by a second Ctrl-C")
    return _failure(failed, running) if failed else Outcome(ExitCode.DONE, "")


def _forkserver_lost(rank: Rank, error: Exception) -> Outcome:
    """It went before it had forked this rank; ranks that are there end with it."""
    said = forkserver_errors()
    log = rank.log_folder / "forkserver.log"
    with suppress(OSError):
        log.write_text(said, encoding="utf-8")
    limit = limits.reached_in(said)
    if limit is not None:
        return Outcome(ExitCode.RESOURCES, f"ranks cannot be started: {limit}; see {log}")
    text = f"the process that ranks are forked from ended before {rank.name} was there; see {log}"
    return Outcome(ExitCode.FAILED, text, lost=True)


def _blame(one: Running) -> int:
    """Who is named for a failure: a killed rank before one with a reason of its own, and that
    before those who only lost a peer; among equals the first.
    """
    code = one.process.exitcode
    if one.failure is None:
        return 0 if code is not None and code < 0 else 1
    return 2 if one.peer_failure is None else 3


def _failure(failed: Sequence[Running], running: Sequence[Running]) -> Outcome:
    one = min(failed, key=_blame)
    code = one.process.exitcode
    assert code is not None
    if one.peer_failure is not None:
        return Outcome(code, _lost(one, one.peer_failure, running), lost=True)
    if one.failure is not None and code == one.failure.values["exit_code"]:
        return Outcome(code, one.failure.values["message"])
    # At a limit a process ends by itself; who sends SIGKILL may be the kernel's OOM killer.
    ended_itself = code == -signal.SIGABRT or 0 < code != UNKNOWN_CODE
    if ended_itself and (limit := limits.reached_in(one.last_words())):
        # Not lost: another attempt would reach it, too.
        return Outcome(ExitCode.RESOURCES, f"{one.title}: {limit}; see {one.log}")
    lost = (code < 0 and -code not in (signal.SIGINT, signal.SIGTERM)) or code == UNKNOWN_CODE
    if code == UNKNOWN_CODE:
        cause, code = "went with the process that ranks are forked from", ExitCode.FAILED
    elif code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        code = ExitCode.INTERRUPTED if -code == signal.SIGINT else ExitCode.FAILED
    else:
        cause = f"ended with exit code {code}"
    return Outcome(code, f"{one.title} {cause}; see {one.log}", lost)


def _lost(teller: Running, failure: PeerFailure, running: Sequence[Running]) -> str:
    """Names the rank without which the others cannot continue.

    Where it runs, or itself misses another, either side may be cut off: both are named.
    """
    for one in running:
        if one.process.pid is not None and is_stopped(one.process.pid):
            return f"{one.title} has been stopped, by SIGSTOP or a debugger: {failure.cause}"
    failures = {one.rank.index: one.peer_failure for one in running if one.peer_failure is not None}
    named = root_cause(failure, failures)
    first = next(one for one in running if one.rank.index == named)
    misses = [
        index
        for index in dict.fromkeys((teller.rank.index, *failures))
        if named in failures[index].ranks
    ]
    # Two that miss each other come before who misses one of them because it has left.
    missed = () if first.peer_failure is None else first.peer_failure.ranks
    index = next((index for index in misses if index in missed), misses[0])
    title = next(one.title for one in running if one.rank.index == index)
    is_there = first.process.is_alive() or first.peer_failure is not None
    how = f"does not answer {title}" if is_there else "is gone"
    return f"{first.title} {how}: {failures[index].cause}"
