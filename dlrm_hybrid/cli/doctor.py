"""The verb `doctor`: one line for each check, exit 5 if training cannot run."""

from __future__ import annotations

from pathlib import Path

from dlrm_hybrid.cli.request import Request
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.doctor.checks import Level, run_checks
from dlrm_hybrid.types import ExitCode


def run(request: Request) -> int:
    """Print every check as it is made."""
    terminal = Terminal()
    failed = 0
    for check in run_checks(Path.cwd()):
        terminal.line(f"{check.level:<4}  {check.name:<19}  {check.detail}")
        failed += check.level is Level.FAIL
    if failed:
        terminal.line(f"{failed} of these must be put right before training can run")
        return ExitCode.RESOURCES
    terminal.line("this machine is able to train")
    return ExitCode.DONE
