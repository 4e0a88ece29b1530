"""The verb `import`: makes a checkpoint from the weights of another program."""

from __future__ import annotations

import shlex

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.export.importing import import_weights
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ExitCode


def run(request: Request) -> int:
    """Make a checkpoint of `import.file`, and print how to evaluate it."""
    terminal = Terminal()
    done = import_weights(request, terminal)
    terminal.line(f"took {done.tensors:,} tensors, {done.parameters:,} parameters")
    folder = shlex.quote(override_text("evaluate.checkpoint", str(done.folder)))
    terminal.line(f"wrote {done.folder}; score it with\n  python -m dlrm_hybrid evaluate {folder}")
    return ExitCode.DONE
