"""Calls of `ip` and `tc`, in the network namespace of this thread."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from dlrm_hybrid.types import ResourceError

TOOL_SECONDS = 30.0
# Where these tools are on systems that keep them from the search path of ordinary users.
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
    """Let a tool do what the lines say.

    Raises:
        ResourceError: it is not installed, or does not do it.
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
