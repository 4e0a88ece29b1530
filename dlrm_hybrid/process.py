"""Signals and lifetime of child processes: who sees Ctrl-C, and who ends with whom."""

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
FORKSERVER_ERRORS = "dlrm_hybrid-forkserver"
"""Name of the file in memory that has the standard error of a supervisor's forkserver."""
FIRST_KERNELS = "DLRM_HYBRID_FIRST_KERNELS"
"""Variable that tells the forkserver which kernels its ranks call first."""


@contextmanager
def shielded() -> Generator[None, None, None]:
    """Block SIGTERM and SIGINT for processes started inside the `with`, from their first instant.

    Ctrl-C in a terminal, `timeout`, systemd and SLURM send these to all processes of a run at once;
    only the one that the user has started decides what they mean. Children inherit the signal mask;
    `unshield` lifts it. A Ctrl-C waits until the end of the block, as in `interrupts_wait`; so does
    SIGTERM if this is the only thread.
    """
    resource_tracker.ensure_running()  # multiprocessing would start it inside, and undo the mask
    with masked():
        yield


@contextmanager
def masked() -> Generator[None, None, None]:
    """The same as `shielded`, for processes that multiprocessing does not start."""
    with interrupts_wait():  # the mask is of this thread alone: any other can take the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def interrupts_wait() -> Generator[None, None, None]:
    """Delay a Ctrl-C to the end of the `with`; a second one is seen at once.

    Of nested blocks the outer one counts. Does nothing outside the main thread, which alone handles
    signals.
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
        if len(waiting.received) == 1:  # also if the block failed: Ctrl-C may have ended children
            before(*waiting.received[0])


@contextmanager
def stop_signals(handle: Callable[[int, FrameType | None], object]) -> Generator[None, None, None]:
    """Handle SIGTERM and SIGINT inside the `with`, unless this process ignores them.

    Shells let their background jobs ignore SIGINT.
    """
    before = {
        number: signal.signal(number, handle)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Signal handler that keeps the first Ctrl-C and passes it on with the second."""

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
    """Unblock SIGTERM and SIGINT in a process that was started inside `shielded`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as `parent` is gone, however that ended.

    Linux only; elsewhere an orphan notices when it next writes to its pipe. Call it from the main
    thread, before others exist: the kernel watches the thread that forked.

    Args:
        parent: process id of the parent; it may be gone already.
    """
    tie_to(parent)()


def tie_to(parent: int) -> Callable[[], None]:
    """Make a `die_with_parent` that a child can call between fork and exec: it loads nothing there.

    The tie survives exec, so at no moment can the program outlive its parent.
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
    return status.rpartition(")")[2].split()[0] in STOPPED  # the name may contain anything
