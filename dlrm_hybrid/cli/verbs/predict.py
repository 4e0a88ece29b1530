"""The verb `predict`: scores new rows."""

from __future__ import annotations

from dlrm_hybrid.checkpoint.folder import shown
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.cli.verbs.train import show_scores
from dlrm_hybrid.predict.scoring import predict
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ExitCode


def run(request: Request) -> int:
    """Score `predict.rows`, and show the speed, and the quality if there are labels."""
    terminal = Terminal()
    done = predict(request, terminal)
    terminal.line(shown(done.checkpoint, done.step))
    if done.scores is not None:
        values = {**done.scores.values, "loss": done.scores.log_loss}
        show_scores(terminal, f"{done.rows:,} rows", values, None)
    if done.unknown:
        counts = ", ".join(f"{name} {count:,}" for name, count in done.unknown.items())
        terminal.line(f"values that the run has not seen: {counts}")
    terminal.line(
        f"wrote {done.output}: {done.rows:,} rows, {done.rows / done.seconds:,.0f} rows/s"
    )
    return ExitCode.DONE
