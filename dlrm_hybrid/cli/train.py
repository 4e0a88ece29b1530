"""The verb `train` where no launcher has started this process."""

from __future__ import annotations

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.cli.view import TerminalView
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.training import train


def run(request: Request) -> int:
    """Train as configured; returns the exit code of the run."""
    terminal = Terminal()
    return train(request, terminal, TerminalView(terminal))
