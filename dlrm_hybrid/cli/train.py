"""The verb `train`: rows are made ready, ranks started and watched, results told."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dlrm_hybrid.checkpoint.folder import has_checkpoint, lost_latest, saved_step
from dlrm_hybrid.cli.attempts import Attempts
from dlrm_hybrid.cli.closing import tell_run, tell_scores
from dlrm_hybrid.cli.emulated import Namespaces, rank_namespaces
from dlrm_hybrid.cli.live import LiveTraining
from dlrm_hybrid.cli.output import TERMINAL_LOG, log_losses
from dlrm_hybrid.cli.readiness import no_empty_folder, ready_rows, require_memory
from dlrm_hybrid.cli.remarks import remarks
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.profile import raw_name
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.disk import RUN_FOLDER_KEY
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.restarts import Restarts
from dlrm_hybrid.run.running import Forwarder
from dlrm_hybrid.run.supervisor import Outcome, run_attempts
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import DataError, ExitCode, ResourceError, RunFailedError, StoppedLateError

WORLD_RANK = "dlrm_hybrid.run.rank.world:world_rank"
TRAIN_RANK = "dlrm_hybrid.run.rank.single:train_rank"
# Of a command line, where it resumes: rows that a checkpoint was trained on are never replaced.
NOT_REPEATED = ("checkpoint.resume=", "prepare.overwrite=")
STATUS: dict[int, str] = {
    ExitCode.DONE: COMPLETE,
    ExitCode.DIVERGED: "diverged",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.INTERRUPTED: "interrupted",
}


def run(request: Request) -> int:
    """Train as configured; returns the exit code of the run."""
    terminal = Terminal()
    with no_empty_folder(request.folder), run_folder.one_run(request.folder):
        resume_from = run_folder.claim(request)
        log_losses(request.folder / "log" / TERMINAL_LOG)
        if lost := lost_latest(request.folder):
            terminal.line(lost)
        rows = ready_rows(request, resume_from, terminal)
        require_memory(request.config, rows)
        with rank_namespaces(request.config, terminal) as namespaces:
            run_folder.write_facts(request)
            for remark in remarks(request.config):
                terminal.line(remark)
            _compile(request.config, terminal)
            terminal.line(f"run folder {request.folder}")
            run_folder.tell_start(request, resume_from, terminal.line)
            # A signal while the summary is made changes nothing: all that it could save is there.
            with Forwarder() as forwarder:
                outcome = _run_ranks(request, rows, namespaces, terminal, forwarder)
                code = close(request, outcome, len(os.sched_getaffinity(0)), terminal)
    if forwarder.received:
        raise StoppedLateError(f"stopped by {signal.Signals(forwarder.received[0]).name}")
    return code


def _compile(config: Config, terminal: Terminal) -> None:
    """Compile the kernels of ranks; what is wrong before that is told before numba is imported."""
    from dlrm_hybrid.cli.compiling import compile_for

    compile_for(config, terminal)


def _run_ranks(
    request: Request, rows: Path, namespaces: Namespaces, terminal: Terminal, forwarder: Forwarder
) -> Outcome:
    """Run all ranks to the end and put on record what they say."""
    options = request.config.checkpoint
    with LiveTraining(terminal) as live, TemporaryDirectory(prefix="dlrm_hybrid-") as rendezvous:
        attempts = Attempts(
            request=request,
            rows=rows,
            rendezvous=Path(rendezvous),
            namespaces=namespaces,
            restarts=Restarts(options.max_restarts, options.restart_window_seconds),
            first=run_folder.attempts(request.folder),
            say=terminal.line,
        )

        def report(event: Event) -> None:
            if event.kind is Kind.RANK:
                attempts.told.append(event)
            live.show(event)

        outcome = run_attempts(
            forwarder, attempts.ranks, _entry(request.config), report, attempts.again
        )
    run_folder.append_events(request.folder, attempts.told)
    return outcome


def _entry(config: Config) -> str:
    """What each process of the run does."""
    return WORLD_RANK if build.many_processes(config) else TRAIN_RANK


def close(request: Request, outcome: Outcome, cores: int, terminal: Terminal) -> int:
    """Write the summary, tell the result.

    Args:
        request: what was asked for.
        outcome: how the run ended.
        cores: of all machines of the run.
        terminal: for the result.

    Raises:
        RunFailedError: the reason why there is none.
    """
    status = STATUS.get(outcome.exit_code, "failed")
    if status != COMPLETE:
        with suppress(ResourceError):  # a full disk may be why the run has ended
            run_folder.write_summary(request.folder, status, cores, None)
        raise _error(outcome, request)
    shards = open_shards(build.prepared_folder(request.config), expected=None)
    teacher = best_reachable(request.config, shards)
    summary = run_folder.write_summary(request.folder, status, cores, teacher)
    tell_scores(terminal, "test part", summary["test"], teacher)
    tell_run(terminal, summary)
    terminal.line(f"summary {request.folder / run_folder.SUMMARY_FILE}")
    return ExitCode.DONE


def best_reachable(config: Config, shards: Shards) -> dict[str, float] | None:
    """What the teacher of synthetic rows reaches on the test part; None for other rows."""
    rows, seed = config.data.rows, config.data.seed
    sources = [source.stamp.name for source in shards.manifest.sources]
    if rows is None or seed is None or sources != [raw_name(rows, seed, build.profile())]:
        return None
    from dlrm_hybrid.data.synthetic import teacher_scores  # numba takes a second

    scores = teacher_scores(shards.test_rows(config.data.test_part), seed, build.profile())
    return {"loss": scores.log_loss, "auc": scores.auc}


def _error(outcome: Outcome, request: Request) -> RunFailedError:
    message = outcome.message
    stopped = outcome.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    if stopped and has_checkpoint(request.folder):
        with suppress(DataError):
            message += f"; checkpoint saved at step {saved_step(request.folder):,}"
        arguments = [
            *(text for text in request.overrides if not text.startswith(NOT_REPEATED)),
            override_text(RUN_FOLDER_KEY, str(request.folder)),
            "checkpoint.resume=auto",
        ]
        message += f"; resume with\n  python -m dlrm_hybrid train {shlex.join(arguments)}"
    return RunFailedError(message, outcome.exit_code)
