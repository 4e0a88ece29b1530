"""Ties between a process and the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as `parent` is gone, however it went.

    Linux only; elsewhere an orphan notices when it next writes to its pipe. Call it from the main
    thread, before others exist: the kernel watches the thread that forked.

    Args:
        parent: process id of the parent; it may be gone already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
