"""Ties between a process and the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
STOPPED = ("T", "t")
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


@contextmanager
def shielded() -> Generator[None, None, None]:
    """Processes started inside do not see SIGTERM and SIGINT, from their first instant on.

    Ctrl-C in a terminal, `timeout`, systemd and SLURM send these to all processes of a run at once;
    only the one that the user has started decides what they mean. The shield is the signal mask,
    which a child inherits: one that wants to see them lifts it by `unshield`. A Ctrl-C waits until
    the end of the block, as in `interrupts_wait`; SIGTERM does if this is the only thread.
    """
    resource_tracker.ensure_running()  # multiprocessing would start it inside, and undo the mask
    with masked():
        yield


@contextmanager
def masked() -> Generator[None, None, None]:
    """As `shielded`, for processes that multiprocessing does not start."""
    with interrupts_wait():  # the mask is of this thread alone: any other can take the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def interrupts_wait() -> Generator[None, None, None]:
    """A Ctrl-C inside is seen at the end of the block; a second one at once.

    For what must not be cut off in the middle. Of blocks in each other the outer one counts. In
    other threads than the main one nothing is to be done: no signal is handled there.
    """
    before = signal.getsignal(signal.SIGINT)
    is_elsewhere = threading.current_thread() is not threading.main_thread()
    if is_elsewhere or not callable(before) or isinstance(before, _Waiting):
        yield
        return
    waiting = _Waiting(before)
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(waiting.received) == 1:  # also where it made the block fail: it has ended children
            before(*waiting.received[0])


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Notes the first Ctrl-C, and hands it on with the second."""

    before: Callable[[int, FrameType | None], object]
    received: list[tuple[int, FrameType | None]] = field(
        default_factory=list[tuple[int, FrameType | None]]
    )

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append((number, frame))
        if len(self.received) == 2:
            self.before(*self.received[0])
        if len(self.received) > 1:
            self.before(number, frame)


def unshield() -> None:
    """See SIGTERM and SIGINT again, in a process that was started inside `shielded`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as `parent` is gone, however it went.

    Linux only; elsewhere an orphan notices when it next writes to its pipe. Call it from the main
    thread, before others exist: the kernel watches the thread that forked.

    Args:
        parent: process id of the parent; it may be gone already.
    """
    tie_to(parent)()


def tie_to(parent: int) -> Callable[[], None]:
    """As `die_with_parent`, for a child to call between fork and exec: it loads nothing there.

    The tie outlasts exec, so there is no moment in which the program could be stopped without it.

    Args:
        parent: process id of the parent.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped, by SIGSTOP or by a debugger; Linux only, else False."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in STOPPED  # the name before may hold anything
