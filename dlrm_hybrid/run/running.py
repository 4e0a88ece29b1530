"""The processes of ranks as their parent sees them: started, sent signals, ended."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, reduction, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from dlrm_hybrid.limits import check_temporary_folder
from dlrm_hybrid.process import FORKSERVER_ERRORS, shielded
from dlrm_hybrid.run.rank.process import Outcome, PeerFailure, Rank, run_rank

PRELOAD = "dlrm_hybrid.run.rank.preload"
LOG_TAIL_BYTES = 4096
OF_MAIN = ("init_main_from_name", "init_main_from_path")  # what a child imports as __main__


@dataclass(slots=True)
class Running:
    """A rank that was started: its process, its connection, and what it has said.

    Attributes:
        log_begin: bytes that earlier attempts have written to its log.
        ready: it has reported that its signal handlers are in place.
        ended: it has closed its connection, and is or will soon be gone.
        outcome: its end as it said it, unless it did all or was killed.
        has_left: it has said that it leaves.
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

    What comes before a rank is ready waits until it is. What comes when all have ended changes
    nothing, but that a second SIGINT raises KeyboardInterrupt.
    """

    running: list[Running] = field(default_factory=list[Running])
    received: list[int] = field(default_factory=list[int])
    _before: dict[int, Any] = field(default_factory=dict[int, Any])

    def __enter__(self) -> Forwarder:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def in_haste(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        return self.received.count(signal.SIGINT) > 1

    def ready(self, one: Running) -> None:
        """Send a rank what it has missed."""
        one.ready = True
        for number in self.received:
            one.send(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        # Servers before workers: who leads knows that a worker's signal is one to all.
        for one in sorted(self.running, key=lambda one: one.rank.index, reverse=True):
            if self.in_haste or one.ready:
                one.send(signal.SIGKILL if self.in_haste else number)
        if self.in_haste and not self.running:
            raise KeyboardInterrupt


@dataclass(slots=True)
class _ForkserverErrors:
    """What the forkserver writes to standard error, and ranks that have no log yet."""

    descriptor: int | None = None
    begin: int = 0

    def open(self) -> None:
        """Make the file that the forkserver looks for in its parent; see `run.rank.preload`."""
        if self.descriptor is None:
            self.descriptor = os.memfd_create(FORKSERVER_ERRORS)

    def text(self) -> str:
        """All of it since the attempt before."""
        if self.descriptor is None:
            return ""
        return os.pread(self.descriptor, self._size(), self.begin).decode(errors="replace")

    def end_attempt(self) -> None:
        """What is there now is none of the next attempt's."""
        if self.descriptor is not None:
            self.begin = self._size()

    def _size(self) -> int:
        assert self.descriptor is not None
        return os.fstat(self.descriptor).st_size


_ERRORS = _ForkserverErrors()


def forkserver_errors() -> str:
    """What the forkserver, and ranks without a log, have written since the attempt before."""
    return _ERRORS.text()


def ensure_forkserver(modules: Sequence[str] = ()) -> None:
    """Let the forkserver begin with its imports, unless it is there; ranks are started from it.

    What ranks are to find in their environment must be there already. Neither the forkserver nor a
    rank that has no handlers yet sees the signals of a person or a scheduler.

    Args:
        modules: what it imports besides, those of the entries of ranks.

    Raises:
        ResourceError: there is no room for its socket.
    """
    check_temporary_folder()
    forkserver.set_forkserver_preload([PRELOAD, *modules])
    _ERRORS.open()
    with shielded():
        forkserver.ensure_running()


def start(rank: Rank, entry: str) -> Running:
    """Fork a rank from the forkserver.

    Args:
        rank: what it is.
        entry: `module:function`, an `Entry`.
    """
    context = multiprocessing.get_context("forkserver")
    ensure_forkserver()
    rank.log_folder.mkdir(parents=True, exist_ok=True)
    receiver, sender = context.Pipe(duplex=False)
    log_begin = rank.log.stat().st_size if rank.log.exists() else 0
    process = _RankProcess(target=run_rank, args=(rank, entry, sender), name=rank.name)
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
    """Kill and reap all of them."""
    for one in running:
        kill(one)
    _ERRORS.end_attempt()


def kill(one: Running) -> None:
    """Kill and reap a rank, if it has not ended by itself."""
    if one.process.is_alive():
        one.process.kill()
    one.process.join()
    one.ended = True
    one.connection.close()
