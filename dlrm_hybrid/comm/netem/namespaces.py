"""Linux namespaces, made and entered by system calls, and `ip` and `tc` in them.

An unnamed namespace lives while a process is in it or a descriptor of it is open.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dlrm_hybrid.types import ResourceError

TOOL_SECONDS = 30.0
# Folders of these tools that some systems leave out of ordinary users' search path.
TOOL_FOLDERS = ("/usr/sbin", "/sbin")


def find_tool(name: str) -> str:
    """Path of `ip` or `tc`.

    Raises:
        ResourceError: it is not installed.
    """
    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), *TOOL_FOLDERS))
    path = shutil.which(name, path=folders)
    if path is None:
        raise ResourceError(f"network=emulated: needs the tool {name}; install iproute2")
    return path


def batch(tool: str, lines: Sequence[str]) -> None:
    """Run lines of commands in a tool's batch mode.

    Raises:
        ResourceError: the tool is not installed, or fails.
    """
    if not lines:
        return
    try:
        result = subprocess.run(
            [find_tool(tool), "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"network=emulated: {tool} did not end") from error
    if result.returncode:
        reason = " ".join(result.stderr.split())
        raise ResourceError(f"network=emulated: {tool} cannot make the network: {reason}")


CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000


def enter(path: str) -> None:
    """Move this thread into the namespace at `path`: `/proc/<process>/fd/<descriptor>`.

    Only a process with a single thread can enter a user namespace; one that enters a namespace of
    its own user has all rights in the namespaces that belong to it.

    Raises:
        OSError: it does not exist, or there is no right to enter it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(ctypes.CDLL(None, use_errno=True).setns(descriptor, 0), path)
    finally:
        os.close(descriptor)


def leave_network() -> bool:
    """Move this thread into a new network namespace with nothing but a loopback.

    Without the right to do so, the process first moves into a new user namespace, where its user
    is root; it must then have a single thread.

    Returns:
        Whether it made a user namespace.

    Raises:
        OSError: it may make neither.
    """
    try:
        _unshare(CLONE_NEWNET)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        user, group = os.getuid(), os.getgid()
        _unshare(CLONE_NEWUSER | CLONE_NEWNET)
        folder = Path("/proc/self")
        (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(f"0 {user} 1")
        (folder / "gid_map").write_text(f"0 {group} 1")
        return True
    return False


def hold(kind: str) -> int:
    """Open a descriptor that keeps this thread's `net` or `user` namespace alive."""
    return os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _unshare(flags: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).unshare(flags), None)


def _check(result: int, path: str | None) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
