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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Protocol, final

from typing_extensions import override

from dlrm_hybrid import limits
from dlrm_hybrid.process import is_stopped
from dlrm_hybrid.run.rank.process import READY, PeerFailure, Rank, Report, root_cause
from dlrm_hybrid.run.running import (
    Forwarder,
    Running,
    end,
    forkserver_errors,
    kill,
    start,
)
from dlrm_hybrid.telemetry.events import Event, Kind, from_json
from dlrm_hybrid.types import ExitCode

GRACE_SECONDS = 0.5
SILENCE_SECONDS = 2.0
IMPORTING = "__import__(modname)"  # a line of a traceback of the forkserver at its imports
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


class Revival(Protocol):
    """Which ranks may be lost while the others go on, and what becomes of them."""

    @property
    def is_over(self) -> bool:
        """Whether all is done but the goodbyes: a rank that may be lost is not missed any more."""
        ...

    def mates(self, index: int) -> frozenset[int]:
        """The ranks that go with this one, itself among them; none if no rank may."""
        ...

    def revive(self, index: int, message: str) -> Sequence[Rank]:
        """What is started in place of this rank and its mates; nothing: the attempt ends.

        Args:
            index: the rank that is lost.
            message: how, for a person.
        """
        ...

    def rejoin(self, index: int) -> Sequence[Rank]:
        """What is started in place of this rank and its mates, all of which have left."""
        ...


@final
@dataclass(frozen=True, slots=True)
class NoRevival(Revival):
    """The first rank that is lost ends the attempt."""

    @property
    @override
    def is_over(self) -> bool:
        return False

    @override
    def mates(self, index: int) -> frozenset[int]:
        return frozenset()

    @override
    def revive(self, index: int, message: str) -> Sequence[Rank]:
        return ()

    @override
    def rejoin(self, index: int) -> Sequence[Rank]:
        return ()


NOBODY = NoRevival()


class _NotStartedError(Exception):
    """A rank could not be started; says what becomes of the attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


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
    revival: Revival = NOBODY,
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
        revival: of ranks that may be lost within an attempt; after a signal, too, since others
            may need them to come to where they stop.
    """
    outcome = None
    while outcome is None:
        outcome = _attempt(ranks(), entry, report, forwarder, revival)
        if outcome.lost and not forwarder.received:
            outcome = again(outcome)
    return outcome


def _attempt(
    ranks: Sequence[Rank], entry: str, report: Report, forwarder: Forwarder, revival: Revival
) -> Outcome:
    attempt = _Attempt(entry=entry, forwarder=forwarder, report=report, revival=revival)
    try:
        attempt.start(ranks)
        return attempt.listen()
    except _NotStartedError as error:
        return error.outcome
    finally:
        end(forwarder.running)
        forwarder.running.clear()


@final
@dataclass(slots=True, kw_only=True)
class _Attempt:
    """Listens to the ranks of an attempt.

    Attributes:
        entry: of the ranks.
        forwarder: knows those that run.
        report: gets their events.
        revival: of ranks that may be lost.
    """

    entry: str
    forwarder: Forwarder
    report: Report
    revival: Revival
    _open: dict[Connection, Running] = field(default_factory=dict[Connection, Running])
    _failed: list[Running] = field(default_factory=list[Running])
    _silent: dict[Connection, float] = field(default_factory=dict[Connection, float])
    _deadline: float = math.inf

    def start(self, ranks: Sequence[Rank]) -> None:
        """Start ranks; raises _NotStartedError."""
        for rank in ranks:
            try:
                one = start(rank, self.entry)
            except (EOFError, ConnectionError) as error:
                raise _NotStartedError(_forkserver_lost(rank, error)) from error
            self.forwarder.running.append(one)
            self._open[one.connection] = one

    def listen(self) -> Outcome:
        """Take messages until every rank has ended or one has failed that must not."""
        while self._open and time.monotonic() < self._deadline:
            until = min([self._deadline, *self._silent.values()])
            seconds = None if math.isinf(until) else max(0.0, until - time.monotonic())
            for connection in wait(list(self._open), seconds):
                one = self._open.get(connection)  # pyright: ignore[reportArgumentType]
                if one is not None:  # else it has ended with a mate
                    self._take(one)
            self._end_silent()
        if self._failed and self.forwarder.in_haste:
            return Outcome(ExitCode.INTERRUPTED, "killed by a second Ctrl-C")
        if self._failed:
            return _failure(self._failed, self.forwarder.running)
        return Outcome(ExitCode.DONE, "")

    def _take(self, one: Running) -> None:
        """A message of a rank, or its end."""
        try:
            message = one.connection.recv_bytes()
        except EOFError:
            del self._open[one.connection]
            one.ended = True
            one.process.join()
            if one.process.exitcode != ExitCode.DONE:
                self._miss(one)
            elif one.has_left:
                self._take_up_again(one)
            is_over = self.revival.is_over or bool(self.forwarder.received)
            if is_over and all(map(self._is_mortal, self._open.values())):
                # One that is stopped, or comes again for nothing, is not waited for.
                self._deadline = min(self._deadline, time.monotonic() + SILENCE_SECONDS)
            return
        if message == READY:
            self.forwarder.ready(one)
        elif (event := from_json(message)).kind is Kind.FAILED:
            one.failure = event
        elif event.kind is Kind.LEFT:
            one.has_left = True
        elif event.kind is Kind.LOST:
            self._note_silence(event)
        else:
            self.report(event)

    def _is_mortal(self, one: Running) -> bool:
        return bool(self.revival.mates(one.rank.index))

    def _miss(self, one: Running) -> None:
        """A rank has failed: start another in its place, or end the attempt."""
        mates = self.revival.mates(one.rank.index)
        if mates and (self.revival.is_over or (one.peer_failure and self.forwarder.received)):
            return  # it came too late to be missed
        if mates and not self._failed:
            ranks = self._instead(one, mates)
            if ranks:
                self._replace(mates, ranks)
                return
        self._failed.append(one)
        if not (self.forwarder.received and one.process.exitcode in TOGETHER):
            # Ranks that lose a peer may say so before the kernel reports its death, those that
            # lost patience do not lose it at one moment.
            grace = GRACE_SECONDS if one.peer_failure is None else SILENCE_SECONDS
            self._deadline = min(self._deadline, time.monotonic() + grace)

    def _take_up_again(self, one: Running) -> None:
        """A rank has left: when its mates have, too, start others in their place."""
        mates = self.revival.mates(one.rank.index)
        here = [other for other in self.forwarder.running if other.rank.index in mates]
        if all(other.ended for other in here) and not (self._failed or self.revival.is_over):
            self._replace(mates, self.revival.rejoin(one.rank.index))

    def _replace(self, mates: frozenset[int], ranks: Sequence[Rank]) -> None:
        for mate in [other for other in self.forwarder.running if other.rank.index in mates]:
            self._open.pop(mate.connection, None)
            self.forwarder.running.remove(mate)
            kill(mate)  # it cannot go on alone
        self.start(ranks)

    def _note_silence(self, event: Event) -> None:
        """Others hear nothing of a rank: if it does not end soon by itself, it is to be killed."""
        missed = event.values["rank"], event.values["incarnation"]
        for one in self._open.values():
            if (one.rank.index, one.rank.incarnation) == missed:
                self._silent[one.connection] = time.monotonic() + SILENCE_SECONDS

    def _end_silent(self) -> None:
        """Kill the ranks that have been silent for too long."""
        now = time.monotonic()
        for connection in [one for one, until in self._silent.items() if until <= now]:
            del self._silent[connection]
            if (one := self._open.get(connection)) is not None:
                one.was_silent = True
                one.process.kill()

    def _instead(self, one: Running, mates: frozenset[int]) -> Sequence[Rank]:
        """What is started in place of a rank that has ended, and of its mates."""
        if one.peer_failure is not None and not mates.issuperset(one.peer_failure.ranks):
            return ()  # it misses one without which nobody goes on
        outcome = _failure([one], self.forwarder.running)
        return self.revival.revive(one.rank.index, outcome.message) if outcome.lost else ()


def _forkserver_lost(rank: Rank, error: Exception) -> Outcome:
    """It went before it had forked this rank; ranks that are there end with it."""
    said = forkserver_errors()
    log = rank.log_folder / "forkserver.log"
    with suppress(OSError):
        log.write_text(said, encoding="utf-8")
    limit = limits.reached_in(said)
    if limit is not None:
        return Outcome(ExitCode.RESOURCES, f"ranks cannot be started: {limit}; see {log}")
    if IMPORTING in said:  # not lost: another one would fail in the same way
        cause = said.rstrip().rpartition("\n")[2]
        advice = "`dlrm_hybrid doctor` looks for more"
        return Outcome(ExitCode.FAILED, f"ranks cannot be started: {cause}; see {log}; {advice}")
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
        if one.was_silent:
            cause = "was stopped or cut off, and has been killed"
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
