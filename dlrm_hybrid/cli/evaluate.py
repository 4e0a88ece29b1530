"""The verb `evaluate`: score a checkpoint on the test part of the rows it was trained on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from dlrm_hybrid.cli.closing import tell_scores
from dlrm_hybrid.cli.prepare import prepared_rows
from dlrm_hybrid.cli.request import EvaluateTask, Request
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.cli.train import best_reachable
from dlrm_hybrid.config.validate import faults_text, validate_saved
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.checkpoint_folder import find, read_facts
from dlrm_hybrid.train.rank import Rank
from dlrm_hybrid.train.supervisor import run_ranks
from dlrm_hybrid.types import ConfigError, ExitCode, RunFailedError

EVALUATE_RANK = "dlrm_hybrid.cli.rank:evaluate_rank"


def run(request: Request) -> int:
    """Evaluate `evaluate.checkpoint`; model and data are those in the checkpoint."""
    options, terminal = request.config.evaluate, Terminal()
    if options.checkpoint is None:
        fault = "evaluate.checkpoint = null: name a run folder or one of its checkpoints"
        raise ConfigError(faults_text([fault]))
    checkpoint = find(Path(options.checkpoint))
    facts = read_facts(checkpoint)
    config = validate_saved(facts["config"])
    rows = prepared_rows(config, terminal)
    task = EvaluateTask(
        checkpoint=str(checkpoint),
        prepared=str(rows),
        batch_size=options.batch_size,
        masked=request.config.activation.evaluate_masked,
    )
    found: list[Event] = []
    with TemporaryDirectory(prefix="dlrm_hybrid-") as logs:
        rank = Rank(
            index=0, name="worker-0", argument=json.dumps(asdict(task)), log_folder=Path(logs)
        )
        outcome = run_ranks([rank], EVALUATE_RANK, found.append)
    if outcome.exit_code != ExitCode.DONE:
        raise RunFailedError(outcome.message, outcome.exit_code)
    (event,) = (event for event in found if event.kind is Kind.EVALUATED)
    teacher = best_reachable(config)
    scores = {**event.values, "loss": event.values["log_loss"]}
    tell_scores(terminal, f"step {event.step:,}", scores, teacher)
    if options.output is not None:
        values = {"checkpoint": str(checkpoint), "step": event.step, **event.values}
        Path(options.output).write_text(json.dumps(values, indent=1), encoding="utf-8")
    return ExitCode.DONE
