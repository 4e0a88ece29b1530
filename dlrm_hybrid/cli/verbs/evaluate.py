"""The verb `evaluate`: scores a checkpoint on the data that it was trained on, or on other data.

A checkpoint is untrusted: nothing in its configuration decides where anything is written.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from dlrm_hybrid.checkpoint.folder import shown
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.cli.verbs.train import LiveWork, show_scores
from dlrm_hybrid.config.validate import NAME_CHECKPOINT, faults_text
from dlrm_hybrid.run.evaluating import open_source, prepare_evaluation, score
from dlrm_hybrid.run.folder import one_user, output_file, write_whole
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.rows import Command
from dlrm_hybrid.run.training import teacher_scores
from dlrm_hybrid.types import ConfigError, ExitCode

OUTPUT_KEY = "evaluate.output"


def run(request: Request) -> int:
    """Evaluate `evaluate.checkpoint`, on the rows of its run by default."""
    options, terminal = request.config.evaluate, Terminal()
    if options.checkpoint is None:
        fault = f"evaluate.checkpoint = null: {NAME_CHECKPOINT}"
        raise ConfigError(faults_text([fault]))
    with ExitStack() as stack:
        if options.output is not None:
            path = output_file(options.output, OUTPUT_KEY)
            lock = path.with_name(f".{path.name}.lock")
            stack.enter_context(one_user(lock, OUTPUT_KEY, path))
        source = open_source(request, Path(options.checkpoint))
        evaluation = prepare_evaluation(source, terminal, Command("evaluate", request.overrides))
        with LiveWork(terminal) as live:
            event = score(evaluation, live.show)
        source, rows = evaluation.source, evaluation.shards.folder
        part = source.config.data.test_part
        other = "" if evaluation.trained_on else " (not those it was trained on, same vocabulary)"
        terminal.line(shown(source.checkpoint, event.step))
        terminal.line(f"rows {rows}, test part `{part}`: {event.values['rows']:,} rows{other}")
        teacher = teacher_scores(source.config, evaluation.shards)
        scores = {**event.values, "loss": event.values["log_loss"]}
        show_scores(terminal, f"{rows.name}, {part}", scores, teacher)
        if options.output is not None:
            values = {
                "checkpoint": str(source.checkpoint),
                "data": str(rows),
                "part": part,
                "trained_on": evaluation.trained_on,
                "step": event.step,
                **event.values,
            }
            write_whole(Path(options.output), json.dumps(values, indent=1), OUTPUT_KEY)
    return ExitCode.DONE
