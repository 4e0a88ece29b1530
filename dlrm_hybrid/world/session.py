"""The session of a world: its ranks are made, used by one call at a time, and always ended."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

from dlrm_hybrid.process import interrupts_wait
from dlrm_hybrid.types import DlrmError, RunFailedError
from dlrm_hybrid.world.backend import Backend

CLOSE_SECONDS = 60.0  # longest wait for a step of another thread
Make = Callable[[Path, Path | None], Backend]
"""Makes the ranks of a world, given its folder, and a checkpoint to resume from or None."""


@final
class Session:
    """The ranks of a world, its folder, and access for one thread at a time.

    Attributes:
        folder: folder for checkpoints and logs of ranks.
        over: reason why the world has ended; None before.
    """

    def __init__(self, make: Make) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlrm-"))  # a socket's path is short
        self.over: str | None = None
        self._make = make
        self._process = os.getpid()
        self._turn = threading.RLock()
        self._is_at_work = False
        self._backends: list[Backend] = []
        # Also if the program forgets to close it, or ends.
        self._end = weakref.finalize(self, _end, self._backends, self.folder, self._process)
        try:
            self._backends.append(make(self.folder, None))
        except BaseException as error:
            self._keep_log(error)
            self._end()
            raise

    @property
    def backend(self) -> Backend:
        """The ranks; while new ones are made from a checkpoint, the old ones."""
        return self._backends[0]

    @contextmanager
    def turn(self) -> Generator[None, None, None]:
        """Hold the ranks for one thread inside a `with`; others wait.

        Raises:
            DlrmError: the world has ended, or this process is a fork of its program.
        """
        if os.getpid() != self._process:
            raise DlrmError(
                f"this world belongs to process {self._process}, of which this one is a fork: only "
                "that can use it"
            )
        with self._turn:
            if self.over is not None:
                raise DlrmError(f"this world cannot go on: {self.over}")
            yield

    @contextmanager
    def going_on(
        self, *, harmless: type[BaseException] | tuple[()] = ()
    ) -> Generator[None, None, None]:
        """Hold the ranks for work that must be whole: Ctrl-C waits, an error ends the world.

        Args:
            harmless: errors that leave all ranks as they were.

        Raises:
            DlrmError: see `turn`; or this thread is at such work already.
        """
        with self.turn(), interrupts_wait():
            if self._is_at_work:
                raise DlrmError(
                    "this world is in the middle of a step: a loader, which is read meanwhile, or "
                    "the handler of a signal cannot use it"
                )
            self._is_at_work = True
            try:
                yield
            except harmless:
                raise
            except BaseException as error:
                self.fail(error)
                raise
            finally:
                self._is_at_work = False

    def fail(self, error: BaseException) -> None:
        """End the world because of an error; a log that the error names is kept."""
        self.over = f"it was cut off by {type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, RunFailedError):
            self._keep_log(error)
            self._end()

    def begin_again(self, source: Path) -> None:
        """Replace the ranks by new ones from a checkpoint; if these fail, keep the old ones."""
        try:
            backend = self._make(self.folder, source)
        except RunFailedError as error:
            self._keep_log(error)
            raise
        with interrupts_wait():
            self._backends.append(backend)
            self._backends.pop(0).close()

    def close(self) -> None:
        """End all ranks, after another thread's step; has no effect a second time."""
        self.over = self.over or "it has been closed"
        is_ours, has_turn = os.getpid() == self._process, False
        try:
            has_turn = is_ours and self._turn.acquire(timeout=CLOSE_SECONDS)
        finally:
            try:
                self._end()
            finally:
                if has_turn:
                    self._turn.release()

    def _keep_log(self, error: BaseException) -> None:
        if str(self.folder) in str(error) and self._end.detach():
            self._end = weakref.finalize(self, _end, self._backends, None, self._process)


def _end(backends: list[Backend], folder: Path | None, process: int) -> None:
    if os.getpid() != process:
        return  # a fork of the program does not own the ranks
    with interrupts_wait(), ExitStack() as stack:  # all of it, in spite of a second Ctrl-C
        if folder is not None:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for backend in backends:
            stack.callback(backend.close)
