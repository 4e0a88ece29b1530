"""The verb `doctor`: checks this machine, makes a file of keys, or compiles all kernels."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.comm.zmq.curve import make_key_file
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.doctor import Finding, Level, check_rows, run_checks
from dlrm_hybrid.kernels.jit import ROOT_VARIABLE, kept_kernels, kernel_folder, kernels
from dlrm_hybrid.process import tie_to
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ExitCode, ResourceError

MOST_COMPILERS = 8  # each takes 200 MB; with more, the slowest kernel decides the time


def run(request: Request) -> int:
    """Run the action that `doctor.action` names."""
    action, terminal = request.config.doctor.action, Terminal()
    if action == "keys":
        return _make_keys(Path(request.config.doctor.output), terminal)
    if action == "compile":
        return _compile(terminal)
    return _check(build.prepared_folder(request.config), terminal)


def _compile(terminal: Terminal) -> int:
    """Compile all kernels on all cores.

    Raises:
        ResourceError: there is no folder to keep them in, or not all of them could be kept.
    """
    cache = kernel_folder()
    if cache.path is None:
        reasons = "".join(f"\n  {line}" for line in cache.refused)
        raise ResourceError(
            f"no usable folder for the kernel cache; set {ROOT_VARIABLE} to one{reasons}"
        )
    cores = min(len(os.sched_getaffinity(0)), MOST_COMPILERS)
    terminal.line(f"compiling kernels on {cores} cores, once; they are kept in {cache.path}")
    program = "from dlrm_hybrid.kernels.jit import compile_missing; compile_missing()"
    compilers = [
        subprocess.Popen([sys.executable, "-c", program], preexec_fn=tie_to(os.getpid()))
        for _ in range(cores)
    ]
    codes = [compiler.wait() for compiler in compilers]
    saved, count = kept_kernels(cache.path), len([*kernels()])
    if any(codes) or saved < count:
        raise ResourceError(f"{cache.path}: {count - saved} of {count} kernels could not be kept")
    terminal.line(f"all {count} kernels are compiled and kept in {cache.path}")
    return ExitCode.DONE


def _check(rows: Path, terminal: Terminal) -> int:
    failed = 0
    for name, level, detail in run_checks(Path.cwd(), lambda: _check_rows(rows, terminal)):
        terminal.line(f"{level:<4}  {name:<19}  {detail}")
        failed += level is Level.FAIL
    if failed:
        terminal.line(f"not ready to train: {failed} of these failed")
        return ExitCode.RESOURCES
    terminal.line("ready to train")
    return ExitCode.DONE


def _check_rows(folder: Path, terminal: Terminal) -> Finding:
    with terminal.counter("check", "rows", is_late=True) as show:
        return check_rows(folder, show)


def _make_keys(path: Path, terminal: Terminal) -> int:
    make_key_file(path)
    keys = shlex.quote(override_text("network.keys", str(path.absolute())))
    terminal.line(
        f"{path}: a CURVE key pair; anyone who has this file can connect to the ranks of a run.\n"
        "Copy it to every machine, readable by you only (scp -p), and train with\n"
        f"  {keys} network.bind=<the network between them, 10.0.0.0/24>"
    )
    return ExitCode.DONE
