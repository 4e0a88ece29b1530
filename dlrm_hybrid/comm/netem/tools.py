"""Calls of `ip` and `tc` in this thread's network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

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
        done = subprocess.run(
            [find_tool(tool), "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"network=emulated: {tool} did not end") from error
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise ResourceError(f"network=emulated: {tool} cannot make the network: {said}")
