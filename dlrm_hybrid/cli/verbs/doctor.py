"""The verb `doctor`: checks of this machine, a file of keys for several, compiled kernels."""

from __future__ import annotations

import shlex
from pathlib import Path

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.comm.zmq.curve import make_key_file
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.doctor import Finding, Level, check_rows, run_checks
from dlrm_hybrid.kernels import ALL
from dlrm_hybrid.kernels.compiler.cache import ROOT_VARIABLE, kernel_folder
from dlrm_hybrid.kernels.compiler.jit import cache_state
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.compiling import compile_ahead
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ExitCode, ResourceError


def run(request: Request) -> int:
    """Do what `doctor.action` says."""
    action, terminal = request.config.doctor.action, Terminal()
    if action == "keys":
        return _make_keys(Path(request.config.doctor.output), terminal)
    if action == "compile":
        return _compile(terminal)
    return _check(build.prepared_folder(request.config), terminal)


def _compile(terminal: Terminal) -> int:
    """Compile all kernels.

    Raises:
        ResourceError: there is nowhere to keep them, or not all of them could be kept.
    """
    found = kernel_folder()
    if found.path is None:
        reasons = "".join(f"\n  {line}" for line in found.refused)
        raise ResourceError(
            f"no usable folder for the kernel cache; set {ROOT_VARIABLE} to one{reasons}"
        )
    compile_ahead(ALL, terminal)
    if missing := cache_state(found.path, ALL).missing:
        raise ResourceError(f"{found.path}: kernels of {', '.join(missing)} could not be cached")
    terminal.line(f"all kernels are compiled and cached in {found.path}")
    return ExitCode.DONE


def _check(rows: Path, terminal: Terminal) -> int:
    """Print every check as it is made; exit 5 if training cannot run."""
    failed = 0
    for check in run_checks(Path.cwd(), lambda: _check_rows(rows, terminal)):
        terminal.line(f"{check.level:<4}  {check.name:<19}  {check.detail}")
        failed += check.level is Level.FAIL
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
