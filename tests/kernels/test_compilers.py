"""Processes that compile kernels: one that is killed is noticed, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.run import compiling
from dlrm_hybrid.types import ResourceError

STOPPED_WHILE_STARTING = """
import signal
from dlrm_hybrid.run import compiling
with compiling._compilers(2) as compilers:
    for compiler in compilers:
        compiler.send_signal(signal.SIGSTOP)
    print(*(compiler.pid for compiler in compilers), flush=True)
    signal.pause()
"""


def test_a_killed_compiler_is_an_error_and_all_end() -> None:
    with (
        pytest.raises(ResourceError, match=r"killed by signal 9.* it compiled sample"),
        compiling._compilers(2) as compilers,
    ):
        compilers[0].kill()
        compiling._compile_in(compilers[0], "sample")
    assert all(compiler.returncode is not None for compiler in compilers)


def test_a_compiler_that_fails_is_an_error() -> None:
    with (
        pytest.raises(ResourceError, match="ended with code 1 while it compiled nothing"),
        compiling._compilers(1) as compilers,
    ):
        compiling._compile_in(compilers[0], "nothing")


def test_when_compilers_fail_nobody_waits_for_one(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rich.console import Console;"
        "from dlrm_hybrid.cli.terminal import Terminal; from dlrm_hybrid.run import compiling;"
        "display = Terminal(Console(file=sys.stderr));"
        f"folder, names = Path({str(tmp_path)!r}), ('nothing', 'nought', 'none', 'nil');"
        "compiling._compile(folder, names, display)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ended.returncode == 1
    assert "ResourceError: compiler process" in ended.stderr.splitlines()[-1]


def test_compilers_stopped_while_they_start_do_not_outlive_their_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED_WHILE_STARTING],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate(timeout=HANG_SECONDS)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        assert len(pids) == 2
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, f"still alive: {pids}"
            os.sched_yield()
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
