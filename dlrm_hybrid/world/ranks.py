"""The processes of a world, as its program starts, uses and ends them."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Never, final

from torch import Tensor

from dlrm_hybrid.parallel.messages import message, values_of
from dlrm_hybrid.process import interrupts_wait
from dlrm_hybrid.run.rank.process import Outcome, Rank
from dlrm_hybrid.run.supervisor import Forwarder, ensure_forkserver, run_attempts
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.types import DlrmError, ExitCode, ResourceError, RunFailedError
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode

Tensors = Mapping[str, Tensor]
ENTRY = "dlrm_hybrid.world.rank:world_rank"
LEAVE_SECONDS = 10.0  # longest wait for goodbyes
NOTICE_SECONDS = 10.0  # longest wait for the supervisor's reason why a rank has ended
KILL_SECONDS = 0.1  # between attempts to kill ranks that were started meanwhile


@final
class WorldRanks:
    """Ranks under a supervisor in a separate thread, with a connection to each worker.

    Args:
        ranks: all ranks.
        workers: number of the first ranks, which take orders.
        meeting: path of the socket to which they connect.
    """

    def __init__(self, ranks: Sequence[Rank], workers: int, meeting: Path) -> None:
        ensure_forkserver()  # not in the thread: the kernel ends it with the thread that starts it
        self._ranks = ranks
        self._process = os.getpid()
        self._forwarder = Forwarder()  # leaves signals to the program
        self._outcome: Outcome | None = None
        self._number = 0
        self._workers: dict[int, Connection] = {}
        self._owed: set[Connection] = set()  # connections of workers that have not answered yet
        self._ended, self._ending = _pipe()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(str(meeting))
            self._listening.listen(workers)
        except OSError as error:
            raise ResourceError(f"{meeting}: cannot listen there: {error.strerror}") from error
        self._thread = threading.Thread(target=self._supervise, name="world", daemon=True)
        atexit.register(self.close)
        try:
            with interrupts_wait():
                self._begin()
            self.steps = self._meet(workers)
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end()
            raise ResourceError(f"the ranks' supervisor: {error}") from error

    def _supervise(self) -> None:
        try:
            self._outcome = run_attempts(self._forwarder, lambda: self._ranks, ENTRY, ignore)
        except Exception as error:
            self._outcome = Outcome(ExitCode.FAILED, f"the ranks' supervisor failed: {error!r}")
        finally:
            self._end()

    def _end(self) -> None:
        """Make `_ended` readable; closing alone does not if a fork of the program has it open."""
        self._ending.send_bytes(b"")
        self._ending.close()

    def _meet(self, workers: int) -> int:
        """Wait for the connections of all workers; returns their number of earlier steps."""
        steps: list[int] = []
        while len(self._workers) < workers:
            if self._ended in wait([self._listening, self._ended]):
                self._fail()
            connection = Connection(self._listening.accept()[0].detach())
            try:
                hello = decode(connection.recv_bytes())
            except (EOFError, OSError):
                self._fail()
            self._workers[hello.sender] = connection
            steps.append(values_of(hello)["learned"])
        if len(set(steps)) != 1:
            raise DlrmError(f"internal error: workers at steps {steps}")
        return steps[0]

    def ask(
        self,
        do: str,
        values: Mapping[str, Any] | None = None,
        tensors: Mapping[int, Tensors] | None = None,
        meanwhile: Callable[[], None] = ignore,
    ) -> dict[int, Frame]:
        """Give all workers an order, and wait for their answers; returns them by rank.

        Args:
            do: what to do.
            values: values of the order.
            tensors: tensors for some workers, by rank.
            meanwhile: called between the order and the answers.

        Raises:
            RunFailedError: a rank has failed or died.
        """
        self._order(do, values or {}, tensors or {})
        meanwhile()
        return {x.sender: x for x in sorted(self._answers(), key=lambda x: x.sender)}

    def parts(self, do: str) -> Iterator[Frame]:
        """Give all workers an order, and yield the parts of their answers as they come."""
        self._order(do, {}, {})
        yield from (answer for answer in self._answers() if answer.kind is not Kind.REPORT)

    def _order(self, do: str, values: Mapping[str, Any], tensors: Mapping[int, Tensors]) -> None:
        self._number += 1
        self._owed = set(self._workers.values())
        for rank, connection in self._workers.items():
            try:
                _send(connection, {"do": do, **values}, self._number, tensors.get(rank))
            except OSError:
                self._fail()

    def _answers(self) -> Iterator[Frame]:
        """Yield the workers' answers to the last order, until all have reported on it."""
        owed = self._owed
        if not owed:
            raise DlrmError("the world has been closed meanwhile")  # by a loader or another thread
        while owed:
            for source in wait([*owed, self._ended]):
                if source is self._ended:
                    self._fail()
                assert isinstance(source, Connection)
                try:
                    answer = decode(source.recv_bytes())
                except (EOFError, OSError):
                    self._fail()
                yield answer
                if answer.kind is Kind.REPORT:
                    owed.remove(source)

    def _fail(self) -> Never:
        """Raise the supervisor's reason why a rank has ended."""
        wait([self._ended], NOTICE_SECONDS)
        self.close()
        outcome = self._outcome
        assert outcome is not None
        if outcome.exit_code == ExitCode.DONE:
            raise RunFailedError("all ranks have left", ExitCode.FAILED)
        raise RunFailedError(outcome.message, outcome.exit_code)

    def close(self) -> None:
        """End all workers, and wait until every rank has ended; those that do not are killed.

        A second Ctrl-C kills them too. The call has no effect a second time, or in a fork.
        """
        if self._ended.closed or os.getpid() != self._process:
            return
        if threading.current_thread() is self._thread:  # called by a garbage collection there
            for child in tuple(self._forwarder.running):
                child.send(signal.SIGKILL)
            return
        with interrupts_wait():
            try:
                self._end_workers()
            finally:
                self._kill()
        atexit.unregister(self.close)

    def _end_workers(self) -> None:
        for connection in self._workers.values():
            with suppress(OSError):
                _send(connection, {"do": "end"})
        # A worker cut off in an answer may wait for this process to read, and take no order.
        wait([self._ended], LEAVE_SECONDS if self._workers and not self._owed else 0.0)

    def _kill(self) -> None:
        """Kill the remaining ranks, and close all connections."""
        # Not by `join`: if Ctrl-C cuts that off, Python 3.11 takes the thread for ended.
        while not wait([self._ended], KILL_SECONDS):  # the supervisor may still start ranks
            for child in tuple(self._forwarder.running):
                child.send(signal.SIGKILL)
        for connection in self._workers.values():
            connection.close()
        self._workers.clear()
        self._owed.clear()
        self._ended.close()
        self._listening.close()


def _send(to: Connection, order: Any, number: int = 0, tensors: Tensors | None = None) -> None:
    """Send a worker an order; raises OSError if the other end is closed."""
    to.send_bytes(encode(message(Kind.DECISION, 0, 0, number, order, tensors)))


def _pipe() -> tuple[Connection, Connection]:
    """Make two connections, of which one becomes readable when the other is written to."""
    reading, writing = os.pipe()
    return Connection(reading, writable=False), Connection(writing, readable=False)
