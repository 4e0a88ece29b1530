"""Starts the ranks of a run, listens to them, forwards signals and never leaves one running.

Ranks are forked from a forkserver that has made the slow imports once. The kernel ends forkserver
and ranks with the supervisor, even after kill -9. The first rank that fails decides the outcome,
and the others are ended. If it was lost, not at fault, all may be restarted.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, reduction, spawn, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, final

from dlrm_hybrid import limits
from dlrm_hybrid.process import FIRST_KERNELS, FORKSERVER_ERRORS, is_stopped, shielded, stop_signals
from dlrm_hybrid.run.rank.process import (
    READY,
    Outcome,
    PeerFailure,
    Rank,
    Report,
    rank_main,
    root_cause,
)
from dlrm_hybrid.telemetry.events import Event, Kind, from_json
from dlrm_hybrid.types import ExitCode

PRELOAD = "dlrm_hybrid.run.rank.preload"
LOG_TAIL_BYTES = 4096
OF_MAIN = ("init_main_from_name", "init_main_from_path")  # what a child imports as __main__
GRACE_SECONDS = 0.5
SILENCE_SECONDS = 2.0
IMPORTING = "__import__(modname)"  # in a traceback of the forkserver's imports
UNKNOWN_CODE = 255  # exit code of a rank whose forkserver has died, and all ranks with it
# After a signal all ranks stop with one of these, at the same step; the last may still be saving.
TOGETHER = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(slots=True)
class Running:
    """A rank that was started: its process, its connection, and what it has reported.

    Attributes:
        log_begin: bytes that earlier attempts have written to its log.
        ready: it has reported that its signal handlers are in place.
        ended: it has closed its connection, and is or will soon be gone.
        outcome: its end as it reported it; None if it completed or was killed.
        has_left: it has reported that it leaves.
        was_silent: it was killed because others heard nothing of it any more.
    """

    rank: Rank
    process: BaseProcess
    connection: Connection
    log_begin: int
    ready: bool = False
    ended: bool = False
    outcome: Outcome | None = None
    has_left: bool = False
    was_silent: bool = False

    @property
    def misses(self) -> PeerFailure | None:
        """The peers whose failure it has reported, if any."""
        return None if self.outcome is None else self.outcome.lost

    def last_words(self) -> str:
        """The end of what it has written to its log, and all that the forkserver has written."""
        try:
            with self.rank.log.open("rb") as file:
                file.seek(max(self.log_begin, self.rank.log.stat().st_size - LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        return text + forkserver_errors()

    def send(self, number: int) -> None:
        """Send a signal, unless the rank has ended.

        Without looking at the process: a handler that does takes the exit code from `join`, which
        it has interrupted.
        """
        if self.process.pid is not None and not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


@dataclass(slots=True)
class Forwarder:
    """While ranks run, passes SIGTERM and SIGINT on to them; a second SIGINT kills them.

    Signals that come before a rank is ready wait until it is. Those that come when all have ended
    change nothing, but that a second SIGINT raises KeyboardInterrupt.
    """

    running: list[Running] = field(default_factory=list[Running])
    received: list[int] = field(default_factory=list[int])

    @classmethod
    @contextmanager
    def installed(cls) -> Generator[Forwarder, None, None]:
        """Make a forwarder that takes over this process's signals inside the `with`."""
        forwarder = cls()
        with stop_signals(forwarder._forward):
            yield forwarder

    @property
    def in_haste(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        return self.received.count(signal.SIGINT) > 1

    def ready(self, child: Running) -> None:
        """Note that a rank is ready, and send it the signals that it has missed."""
        child.ready = True
        for number in self.received:
            child.send(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        # Servers before workers: the leader knows that a worker's signal is one to all.
        for child in sorted(self.running, key=lambda child: child.rank.index, reverse=True):
            if self.in_haste or child.ready:
                child.send(signal.SIGKILL if self.in_haste else number)
        if self.in_haste and not self.running:
            raise KeyboardInterrupt


@dataclass(slots=True)
class _ForkserverErrors:
    """The file for standard error of the forkserver, and of ranks that have no log yet."""

    descriptor: int | None = None
    begin: int = 0

    def open(self) -> None:
        """Make the file that the forkserver looks for in its parent; see `run.rank.preload`."""
        if self.descriptor is None:
            self.descriptor = os.memfd_create(FORKSERVER_ERRORS)

    def text(self) -> str:
        """The text since the attempt before."""
        if self.descriptor is None:
            return ""
        return os.pread(self.descriptor, self._size(), self.begin).decode(errors="replace")

    def end_attempt(self) -> None:
        """Let the next attempt's text begin after what is there now."""
        if self.descriptor is not None:
            self.begin = self._size()

    def _size(self) -> int:
        assert self.descriptor is not None
        return os.fstat(self.descriptor).st_size


_ERRORS = _ForkserverErrors()


def forkserver_errors() -> str:
    """Errors that the forkserver, and ranks without a log, have written in this attempt."""
    return _ERRORS.text()


def ensure_forkserver(modules: Sequence[str] = (), kernels: Sequence[str] = ()) -> None:
    """Start the forkserver, from which ranks are forked, with its imports, unless it runs.

    What ranks are to find in their environment must be there already. Neither the forkserver nor a
    rank that has no handlers yet sees the signals of a person or a scheduler.

    Args:
        modules: further modules to import, those of the ranks' entries.
        kernels: names of those that ranks call first: they are compiled beside the imports.

    Raises:
        ResourceError: there is no room for its socket.
    """
    limits.check_temporary_folder()
    if kernels:
        os.environ[FIRST_KERNELS] = " ".join(kernels)
    forkserver.set_forkserver_preload([PRELOAD, *modules])
    _ERRORS.open()
    with shielded():
        forkserver.ensure_running()


def start(rank: Rank, entry: str) -> Running:
    """Fork a rank from the forkserver.

    Args:
        rank: the rank to fork.
        entry: `module:function`, an `Entry`.
    """
    context = multiprocessing.get_context("forkserver")
    ensure_forkserver()
    rank.log_folder.mkdir(parents=True, exist_ok=True)
    receiver, sender = context.Pipe(duplex=False)
    log_begin = rank.log.stat().st_size if rank.log.exists() else 0
    process = _RankProcess(target=rank_main, args=(rank, entry, sender), name=rank.name)
    process.start()
    sender.close()  # or the end of the rank would not end the connection
    return Running(rank, process, receiver, log_begin)


class _RankPopen(Popen):
    """Forks a child that does not import the program that starts it, which it does not need.

    A script that starts ranks would run again in each of them. Otherwise as multiprocessing does.
    """

    def _launch(self: Any, process_obj: BaseProcess) -> None:
        internals: Any = util  # whose types are not known
        data = spawn.get_preparation_data(process_obj.name)
        text = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump({key: data[key] for key in data if key not in OF_MAIN}, text)
            reduction.dump(process_obj, text)
        finally:
            set_spawning_popen(None)
        self.sentinel, descriptor = forkserver.connect_to_new_process(self._fds)
        held = os.dup(descriptor)  # while it is open the child sees that its parent lives
        self.finalizer = util.Finalize(self, internals.close_fds, (held, self.sentinel))
        with os.fdopen(descriptor, "wb") as pipe:
            pipe.write(text.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _RankProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802 - multiprocessing's name
        return _RankPopen(process_obj)


def end(running: Sequence[Running]) -> None:
    """Kill and reap ranks."""
    for child in running:
        kill(child)
    _ERRORS.end_attempt()


def kill(child: Running) -> None:
    """Kill and reap a rank, if it has not ended by itself."""
    if child.process.is_alive():
        child.process.kill()
    child.process.join()
    child.ended = True
    child.connection.close()


class _NotStartedError(Exception):
    """A rank could not be started; has the outcome of the attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def run_ranks(ranks: Sequence[Rank], entry: str, report: Report) -> Outcome:
    """Start all ranks and report their events; returns once all have ended.

    Args:
        ranks: the ranks to start.
        entry: `module:function`, an `Entry`; a name, so that only ranks import what it needs.
        report: called in this process for every event of every rank.
    """
    with Forwarder.installed() as forwarder:
        return run_attempts(forwarder, lambda: ranks, entry, report)


def run_attempts(
    forwarder: Forwarder,
    ranks: Callable[[], Sequence[Rank]],
    entry: str,
    report: Report,
    again: Callable[[Outcome], Outcome | None] = lambda lost: lost,
    instead: Callable[[Rank, str | None], Sequence[Rank]] = lambda rank, message: (),
) -> Outcome:
    """Run attempts as `run_ranks`, as long as a rank is lost and `again` has no outcome.

    `again` is not called after a signal; one between two attempts reaches the next one's ranks.

    Args:
        forwarder: holder of this process's signals.
        ranks: makes the ranks of each attempt.
        entry: as for `run_ranks`.
        report: as for `run_ranks`.
        again: decides on the run after this outcome; None for another attempt, by default none.
        instead: the ranks to start in place of one that has mates, and of these, while others go
            on; none ends the attempt. Called with how it was lost, or None once all of them have
            left in order; also after a signal, since others may need them to reach the step where
            they stop.
    """
    outcome = None
    while outcome is None:
        attempt = _Attempt(entry=entry, forwarder=forwarder, report=report, instead=instead)
        try:
            attempt.start(ranks())
            outcome = attempt.listen()
        except _NotStartedError as error:
            outcome = error.outcome
        finally:
            end(forwarder.running)
            forwarder.running.clear()
        if outcome.lost and not forwarder.received:
            outcome = again(outcome)
    return outcome


@final
@dataclass(slots=True, kw_only=True)
class _Attempt:
    """Listens to the ranks of an attempt."""

    entry: str
    forwarder: Forwarder
    report: Report
    instead: Callable[[Rank, str | None], Sequence[Rank]]
    _has_begun: bool = False
    _is_over: bool = False  # only goodbyes are left, so that ranks with mates are no longer missed
    _open: dict[Connection, Running] = field(default_factory=dict[Connection, Running])
    _failed: list[Running] = field(default_factory=list[Running])
    _silent: dict[Connection, float] = field(default_factory=dict[Connection, float])
    _deadline: float = math.inf

    def start(self, ranks: Sequence[Rank]) -> None:
        """Start processes for these ranks; raises _NotStartedError."""
        for rank in ranks:
            try:
                child = start(rank, self.entry)
            except (EOFError, ConnectionError) as error:
                raise _NotStartedError(_forkserver_lost(rank, error)) from error
            self.forwarder.running.append(child)
            self._open[child.connection] = child

    def listen(self) -> Outcome:
        """Handle messages until every rank has ended, or one has failed that must not."""
        while self._open and time.monotonic() < self._deadline:
            until = min([self._deadline, *self._silent.values()])
            seconds = None if math.isinf(until) else max(0.0, until - time.monotonic())
            for connection in wait(list(self._open), seconds):
                child = self._open.get(connection)  # pyright: ignore[reportArgumentType]
                if child is not None:  # else it has ended with a mate
                    self._handle(child)
            self._end_silent()
        if self._failed and self.forwarder.in_haste:
            return Outcome(ExitCode.INTERRUPTED, "killed by a second Ctrl-C")
        if self._failed:
            return _failure(self._failed, self.forwarder.running)
        return Outcome(ExitCode.DONE, "")

    def _handle(self, child: Running) -> None:
        """Handle a message of a rank, or its end."""
        try:
            message = child.connection.recv_bytes()
        except EOFError:
            del self._open[child.connection]
            child.ended = True
            child.process.join()
            if child.process.exitcode != ExitCode.DONE:
                self._handle_failure(child)
            elif child.has_left:
                self._restart_left(child)
            is_over = self._is_over or bool(self.forwarder.received)
            if is_over and all(child.rank.mates for child in self._open.values()):
                # A rank that is stopped, or restarted in vain, is not waited for.
                self._deadline = min(self._deadline, time.monotonic() + SILENCE_SECONDS)
            return
        if message == READY:
            self.forwarder.ready(child)
        elif (event := from_json(message)).kind is Kind.FAILED:
            child.outcome = Outcome.from_values(event.values)
        elif event.kind is Kind.LEFT:
            child.has_left = True
        elif event.kind is Kind.LOST:
            self._note_silence(event)
        else:
            self._has_begun |= event.kind is Kind.STARTED
            self._is_over |= event.kind is Kind.FINISHED
            self.report(event)

    def _handle_failure(self, child: Running) -> None:
        """Handle the failure of a rank: replace it, or end the attempt."""
        mates = child.rank.mates
        if mates and (self._is_over or (child.misses and self.forwarder.received)):
            return  # too late to matter
        if mates and not self._failed and self._is_replaced(child):
            return
        self._failed.append(child)
        if not (self.forwarder.received and child.process.exitcode in TOGETHER):
            # Ranks that miss a peer may report that before the kernel reports its death; those that
            # lost patience do so at different moments.
            grace = GRACE_SECONDS if child.misses is None else SILENCE_SECONDS
            self._deadline = min(self._deadline, time.monotonic() + grace)

    def _is_replaced(self, child: Running) -> bool:
        """Replace a lost rank and its mates; False if nobody takes their place."""
        # Before all have connected, a rank that has not is missed by all others.
        misses, mates = child.misses, child.rank.mates
        if not self._has_begun or (misses and not mates.issuperset(misses.ranks)):
            return False  # or it misses a rank that nobody can do without
        outcome = _failure([child], self.forwarder.running)
        return outcome.lost is not None and self._replace(child, outcome.message)

    def _restart_left(self, child: Running) -> None:
        """Replace a rank that has left in order, once its mates have left too."""
        if all(mate.ended for mate in self._mates(child)) and not (self._failed or self._is_over):
            self._replace(child, None)

    def _mates(self, child: Running) -> list[Running]:
        return [mate for mate in self.forwarder.running if mate.rank.index in child.rank.mates]

    def _replace(self, child: Running, message: str | None) -> bool:
        ranks = self.instead(child.rank, message)
        for mate in self._mates(child) if ranks else ():
            self._open.pop(mate.connection, None)
            self.forwarder.running.remove(mate)
            kill(mate)  # it cannot go on alone
        self.start(ranks)
        return bool(ranks)

    def _note_silence(self, event: Event) -> None:
        """Note that others miss a rank: unless it ends soon by itself, it will be killed."""
        missed = event.values["rank"], event.values["incarnation"]
        for child in self._open.values():
            if (child.rank.index, child.rank.incarnation) == missed:
                self._silent[child.connection] = time.monotonic() + SILENCE_SECONDS

    def _end_silent(self) -> None:
        """Kill ranks that have been silent for too long."""
        now = time.monotonic()
        for connection in [silent for silent, until in self._silent.items() if until <= now]:
            del self._silent[connection]
            if (child := self._open.get(connection)) is not None:
                child.was_silent = True
                child.process.kill()


def _forkserver_lost(rank: Rank, error: Exception) -> Outcome:
    """The outcome if the forkserver died before it forked this rank; other ranks end with it."""
    errors = forkserver_errors()
    log = rank.log_folder / "forkserver.log"
    with suppress(OSError):
        log.write_text(errors, encoding="utf-8")
    limit = limits.reached_in(errors)
    if limit is not None:
        return Outcome(ExitCode.RESOURCES, f"ranks cannot be started: {limit}; see {log}")
    if IMPORTING in errors:  # not lost: another forkserver would fail the same way
        cause = errors.rstrip().rpartition("\n")[2]
        advice = "`dlrm_hybrid doctor` looks for more"
        return Outcome(ExitCode.FAILED, f"ranks cannot be started: {cause}; see {log}; {advice}")
    text = f"the process that ranks are forked from ended before {rank.name} was there; see {log}"
    return Outcome(ExitCode.FAILED, text, PeerFailure((rank.index,), text))


def _failure_order(child: Running) -> int:
    """Order of failures to report: killed ranks, those with own reasons, those that miss others."""
    code = child.process.exitcode
    if child.outcome is None:
        return 0 if code is not None and code < 0 else 1
    return 2 if child.misses is None else 3


def _failure(failed: Sequence[Running], running: Sequence[Running]) -> Outcome:
    child = min(failed, key=_failure_order)
    code, rank = child.process.exitcode, child.rank
    assert code is not None
    if child.misses is not None:
        return Outcome(code, _lost_message(child, child.misses, running), child.misses)
    if child.outcome is not None and code == child.outcome.exit_code:
        return child.outcome
    # At a limit a process ends by itself; a SIGKILL may be from the kernel's OOM killer.
    ended_itself = code == -signal.SIGABRT or 0 < code != UNKNOWN_CODE
    if ended_itself and (limit := limits.reached_in(child.last_words())):
        # Not lost: another attempt would reach the limit too.
        return Outcome(ExitCode.RESOURCES, f"{rank.title}: {limit}; see {rank.log}")
    is_lost = (code < 0 and -code not in (signal.SIGINT, signal.SIGTERM)) or code == UNKNOWN_CODE
    if code == UNKNOWN_CODE:
        cause, code = "went with the process that ranks are forked from", ExitCode.FAILED
    elif code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        if child.was_silent:
            cause = "was stopped or cut off, and has been killed"
        code = ExitCode.INTERRUPTED if -code == signal.SIGINT else ExitCode.FAILED
    else:
        cause = f"ended with exit code {code}"
    lost = PeerFailure((rank.index,), cause) if is_lost else None
    return Outcome(code, f"{rank.title} {cause}; see {rank.log}", lost)


def _lost_message(teller: Running, failure: PeerFailure, running: Sequence[Running]) -> str:
    """The message that names the rank without which the others cannot continue.

    If it runs, or itself misses another, either side may be cut off: both are named.
    """
    for child in running:
        if child.process.pid is not None and is_stopped(child.process.pid):
            return f"{child.rank.title} has been stopped, by SIGSTOP or a debugger: {failure.cause}"
    failures = {child.rank.index: child.misses for child in running if child.misses is not None}
    named = root_cause(failure, failures)
    by_rank = {child.rank.index: child for child in running}
    first = by_rank[named]
    misses = [
        index
        for index in dict.fromkeys((teller.rank.index, *failures))
        if named in failures[index].ranks
    ]
    # Two that miss each other come before one that misses a rank which has left.
    missed = () if first.misses is None else first.misses.ranks
    index = next((index for index in misses if index in missed), misses[0])
    is_there = first.process.is_alive() or first.misses is not None
    how = f"does not answer {by_rank[index].rank.title}" if is_there else "is gone"
    return f"{first.rank.title} {how}: {failures[index].cause}"
