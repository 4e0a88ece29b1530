"""The verb `export`: writes a checkpoint's model for other programs."""

from __future__ import annotations

from dlrm_hybrid.checkpoint.folder import shown
from dlrm_hybrid.cli.terminal import Terminal, quantity
from dlrm_hybrid.export.delta import export_delta
from dlrm_hybrid.export.writing import export
from dlrm_hybrid.report.table import Table, cell
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.types import ExitCode


def run(request: Request) -> int:
    """Write the model of `export.checkpoint`, check it and show how well both agree."""
    terminal = Terminal()
    if request.config.export.since is not None:
        return _delta(request, terminal)
    done = export(request, terminal)
    compared = done.comparison
    terminal.line(shown(done.checkpoint, done.step))
    if compared.before is not None and compared.after is not None:
        rows = [_cells("checkpoint", compared.before), _cells(done.file, compared.after)]
        terminal.table(Table((f"{compared.rows:,} test rows", "log-loss", "AUC"), rows))
    auc = "" if compared.auc_difference is None else f", AUC by {compared.auc_difference:+.6f}"
    terminal.line(
        f"largest difference of a score {compared.score_difference:.2g}, "
        f"of a logit {compared.logit_difference:.2g}{auc}"
    )
    for remark in done.remarks:
        terminal.line(remark)
    terminal.line(f"wrote {done.folder} ({done.file}: {quantity(done.num_bytes)}B)")
    return ExitCode.DONE


def _delta(request: Request, terminal: Terminal) -> int:
    """Write what the model has learned since `export.since`."""
    done = export_delta(request, terminal)
    terminal.line(f"from {done.base.text}")
    terminal.line(f"to {done.model.text}")
    terminal.line(
        f"wrote {done.folder} ({quantity(done.num_bytes)}B): {done.changed:,} of {done.rows:,} "
        f"rows changed, {done.appended:,} of them new"
    )
    return ExitCode.DONE


def _cells(name: str, scores: BinaryScores) -> list[str]:
    return [name, *(cell(x, "{:.6f}".format) for x in (scores.log_loss, scores.auc))]
