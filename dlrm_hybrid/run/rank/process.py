"""A rank of a run: one process that is started, does its work, and reports its end."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dlrm_hybrid.comm.netem.namespaces import enter
from dlrm_hybrid.disk import RUN_FOLDER_KEY, refusals, writing
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import DeadlineError, DlrmError, ExitCode, PeerLostError, ResourceError

READY = b"ready"

Report = Callable[[Event], None]
Entry = Callable[[str, Report, StopRequest], None]
"""The work of a rank: called with its argument, a function for events and the stop request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process of a run, as the supervisor starts it.

    Attributes:
        index: number in the run.
        name: name in messages and files: `worker-0.2`.
        argument: argument of the entry function.
        log_folder: folder for `<name>.log`, its output, and `<name>.pid`.
        namespaces: paths of kernel namespaces that it enters in order before all else.
        incarnation: how often it was started before in this attempt.
        mates: ranks that are lost with this one, itself included; none if it must not be lost.
    """

    index: int
    name: str
    argument: str
    log_folder: Path
    namespaces: tuple[str, ...] = ()
    incarnation: int = 0
    mates: frozenset[int] = frozenset()

    @property
    def title(self) -> str:
        """Name and number of the rank, for messages."""
        return f"{self.name} (rank {self.index})"

    @property
    def log(self) -> Path:
        """The file that has its output."""
        return self.log_folder / f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """The loss of other ranks, without which a rank cannot go on.

    Attributes:
        ranks: one of these has died or is silent.
        cause: how the loss was noticed.
    """

    ranks: tuple[int, ...]
    cause: str

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PeerFailure:
        """Parse the JSON that `asdict` of this class became."""
        return cls(tuple(values["ranks"]), values["cause"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rank or of a run: an exit code and, unless it is DONE, a message for the user.

    Attributes:
        exit_code: exit code of the process.
        message: why it ended.
        lost: the ranks that were killed, or missed by others; checkpoints are then intact.
    """

    exit_code: int
    message: str
    lost: PeerFailure | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Outcome:
        """Parse the JSON that `asdict` of this class became."""
        lost = values["lost"] and PeerFailure.from_values(values["lost"])
        return cls(values["exit_code"], values["message"], lost)


def outcome_of(rank: Rank, work: Callable[[], None]) -> Outcome:
    """Do a rank's work; errors become messages, and faults of the program tracebacks."""
    try:
        with refusals():
            work()
    except DlrmError as error:
        return Outcome(error.exit_code, str(error), _peer_failure(error))
    except BaseException as error:
        with suppress(OSError):  # the log may be on a full disk too
            traceback.print_exc()
        fault = f"{rank.title}: {type(error).__name__}: {error}; see {rank.log}"
        return Outcome(ExitCode.FAILED, fault)
    return Outcome(ExitCode.DONE, "")


def _peer_failure(error: DlrmError) -> PeerFailure | None:
    if isinstance(error, PeerLostError):
        return PeerFailure((error.rank,), error.cause)
    if isinstance(error, DeadlineError) and error.ranks:
        return PeerFailure(error.ranks, str(error))
    return None


def root_cause(failure: PeerFailure, failures: Mapping[int, PeerFailure]) -> int:
    """The rank that died or fell silent without a report; others may be lost because of it.

    A rank that is only cut off reports whom it misses too: it is the one missed most.

    Args:
        failure: the report of one rank.
        failures: the reports of ranks, by rank.
    """
    visited: list[int] = []
    waiting = list(failure.ranks)
    while waiting:
        rank = waiting.pop(0)
        if rank in visited:
            continue
        visited.append(rank)
        reported = failures.get(rank)
        if reported is None:
            return rank
        waiting.extend(reported.ranks)
    missed = Counter(rank for report in failures.values() for rank in report.ranks)
    return max(visited, key=lambda rank: missed[rank])


def rank_main(rank: Rank, entry: str, connection: Connection) -> None:
    """The main function of a rank's process."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C then reaches only the supervisor, which forwards it once
    parent = os.getppid()
    die_with_parent(parent)
    stop = StopRequest(supervised=True)
    stop.install()
    connection.send_bytes(READY)

    def report(event: Event) -> None:
        connection.send_bytes(event.to_json().encode())

    def work() -> None:
        write_log(rank)
        _enter(rank.namespaces)
        die_with_parent(parent)  # the kernel drops it when rights change
        module, _, name = entry.partition(":")
        function: Entry = getattr(import_module(module), name)
        function(rank.argument, report, stop)

    end = outcome_of(rank, work)
    if end.exit_code != ExitCode.DONE:
        report(Event(Kind.FAILED, -1, time.time(), asdict(end)))
    flush_log()
    sys.exit(end.exit_code)


def _enter(paths: Sequence[str]) -> None:
    for path in paths:
        try:
            enter(path)
        except OSError as error:
            raise ResourceError(f"network=emulated: cannot enter {path}: {error}") from error


def flush_log() -> None:
    """Flush output; what a full disk refuses is lost, without changing the exit code."""
    for name in ("stdout", "stderr"):
        try:
            if (stream := getattr(sys, name)) is not None:
                stream.flush()
        except OSError:
            setattr(sys, name, None)


def write_log(rank: Rank) -> None:
    """Redirect standard output and error of this process and its libraries to its log.

    Its process id goes to a file beside that.

    Raises:
        ResourceError: the files cannot be written.
    """
    path = rank.log_folder / f"{rank.name}.pid"
    with writing(path, RUN_FOLDER_KEY):
        path.write_text(f"{os.getpid()}\n", encoding="ascii")
    descriptor = os.open(rank.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a log takes any character, whatever the locale
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
