"""A training run in processes of this machine: preparations, ranks, restarts, record, result."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from dlrm_hybrid.checkpoint.folder import (
    CHECKPOINTS,
    best_score,
    has_checkpoint,
    lost_latest,
    saved_step,
)
from dlrm_hybrid.comm.netem.network import latency_figures, latency_remark, open_network
from dlrm_hybrid.config.choices import Synthetic
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.disk import RUN_FOLDER_KEY
from dlrm_hybrid.output import TERMINAL_LOG, log_losses
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display, TrainingView
from dlrm_hybrid.run.rank.process import Outcome, Rank
from dlrm_hybrid.run.readiness import no_empty_folder, ready_rows, require_memory, thread_remark
from dlrm_hybrid.run.request import Request, TrainTask
from dlrm_hybrid.run.supervisor import Forwarder, run_attempts
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import DataError, ExitCode, ResourceError, RunFailedError, StoppedLateError

TRAIN_RANK = "dlrm_hybrid.run.rank.main:train_rank"
# Not repeated when a run resumes: a checkpoint's rows must never be replaced.
NOT_REPEATED = ("checkpoint.resume", "prepare.overwrite")
Namespaces = Callable[[int], tuple[str, ...]]
"""The namespaces that the rank with this number enters before anything else."""
STATUS: dict[int, str] = {
    ExitCode.DONE: COMPLETE,
    ExitCode.DIVERGED: "diverged",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, slots=True)
class _Links:
    """The network of a run: namespaces that ranks enter, and figures of emulated latency."""

    namespaces: Namespaces
    latency: Callable[[], Mapping[str, Any] | None]


def train(request: Request, display: Display, view: TrainingView) -> int:
    """Run a training to its end, restarts included, and show its result.

    Args:
        request: the run.
        display: for all before the ranks start.
        view: for the ranks' events, and the result.

    Returns:
        The exit code of the run.

    Raises:
        RunFailedError: the run ended without a result; its exit code says how.
        StoppedLateError: a signal came after the result.
    """
    with no_empty_folder(request.folder), run_folder.one_run(request.folder):
        request = run_folder.with_base(request)
        resume_from = run_folder.claim(request)
        log_losses(request.folder / "log" / TERMINAL_LOG)
        if lost := lost_latest(request.folder):
            display.line(lost)
        rows = ready_rows(request, resume_from, display)
        require_memory(request.config, open_shards(rows, None).table_rows)
        with _links(request.config, display) as links:
            run_folder.write_facts(request, rows)
            cores = len(os.sched_getaffinity(0))
            if remark := thread_remark(request.config, cores, os.getloadavg()[0]):
                display.line(remark)
            run_folder.tell_start(request, resume_from, display.line)
            # A signal during the summary changes nothing: all it could save is saved.
            with Forwarder.installed() as forwarder:
                outcome = _run_ranks(request, rows, links.namespaces, display, view, forwarder)
                latency = links.latency() if outcome.exit_code == ExitCode.DONE else None
                close(request, rows, outcome, cores, view, latency)
    if forwarder.received:
        raise StoppedLateError(forwarder.received[0])
    return ExitCode.DONE


@contextmanager
def _links(config: Config, display: Display) -> Generator[_Links, None, None]:
    """Open the emulated network, if one is configured, until the run has ended.

    Raises:
        ResourceError: this machine cannot emulate it.
    """
    plan = build.emulation(config)
    if plan is None:
        yield _Links(lambda rank: (), lambda: None)
        return
    with open_network(plan) as network:
        display.line(
            f"emulated network: {plan.hosts} hosts at {plan.rate_bits_per_second / 1e6:g} Mbit/s, "
            f"an echo of {plan.echo_bytes:,} bytes took {1e3 * network.echo_seconds:.1f} ms, "
            f"{network.echo_share:.0%} of the link's nominal time"
        )
        if remark := latency_remark(network):
            display.line(remark)
        yield _Links(
            lambda rank: network.namespaces[build.host(config, rank)],
            lambda: latency_figures(network),
        )


def _run_ranks(
    request: Request,
    rows: Path,
    namespaces: Namespaces,
    display: Display,
    view: TrainingView,
    forwarder: Forwarder,
) -> Outcome:
    """Run all ranks to the end, and record what they report."""
    counters: list[Event] = []  # what the present attempt's ranks report at their end
    with view.live() as show, TemporaryDirectory(prefix="dlrm_hybrid-") as rendezvous:
        loop = RestartLoop(
            request=request,
            rows=rows,
            rendezvous=Path(rendezvous),
            namespaces=namespaces,
            say=display.line,
        )

        def ranks() -> Sequence[Rank]:
            counters.clear()
            return loop.ranks()

        def report(event: Event) -> None:
            if event.kind is Kind.RANK:
                counters.append(event)
            show(event)

        outcome = run_attempts(forwarder, ranks, TRAIN_RANK, report, loop.again, loop.instead)
    run_folder.append_events(request.folder, counters)
    return outcome


@final
@dataclass(slots=True)
class RestartBudget:
    """Limits the restarts of a run within a time window: after too many, another will not help.

    Attributes:
        limit: most restarts within a window.
        window_seconds: length of the window.
    """

    limit: int
    window_seconds: float
    _times: list[float] = field(default_factory=list[float])

    @property
    def made(self) -> int:
        """Number of restarts so far."""
        return len(self._times)

    def another(self, now_seconds: float) -> int | None:
        """Count a restart; returns its number within the window, None if it is one too many.

        Args:
            now_seconds: time of a monotonic clock.
        """
        recent = sum(restart > now_seconds - self.window_seconds for restart in self._times)
        if recent >= self.limit:
            return None
        self._times.append(now_seconds)
        return recent + 1


@final
@dataclass(slots=True, kw_only=True)
class RestartLoop:
    """Prepares the attempts of a run, and decides whether there is another.

    Attributes:
        request: the run.
        rows: folder of the run's shards.
        rendezvous: folder of this start of the program, with one below for each attempt.
        namespaces: the namespaces that ranks enter.
        say: shows the user a line.
    """

    request: Request
    rows: Path
    rendezvous: Path
    namespaces: Namespaces
    say: Callable[[str], None]
    _first: int = field(init=False)  # number of the first attempt
    _restarts: RestartBudget = field(init=False)
    _trainers: RestartBudget = field(init=False)  # of restarts of trainers
    _task: TrainTask | None = None

    def __post_init__(self) -> None:
        self._first = run_folder.attempts(self.request.folder)
        options = self.request.config.checkpoint
        limit = options.max_restarts, options.restart_window_seconds
        self._restarts, self._trainers = RestartBudget(*limit), RestartBudget(*limit)

    def ranks(self) -> list[Rank]:
        """Make the processes of the next attempt; a world of one process has one."""
        resume_from = run_folder.resume_point(self.request)
        attempt = self._first + self._restarts.made
        self._task = TrainTask(
            run_folder=str(self.request.folder),
            prepared=str(self.rows),
            resume_from=resume_from and str(resume_from),
            attempt=attempt,
            rendezvous=str(self.rendezvous / str(attempt)),
        )
        return [self._rank(index) for index in range(len(build.rank_names(self.request.config)))]

    def instead(self, lost: Rank, message: str | None) -> list[Rank]:
        """Make the processes in place of a rank and its mates; see `run_attempts`."""
        if message is None:
            names = build.rank_names(self.request.config)
            left = ", ".join(names[mate] for mate in sorted(lost.mates))
            self.say(f"left after SIGTERM: {left}; started again, the others go on")
        else:
            number = self._trainers.another(time.monotonic())
            if number is None:
                return []
            self.say(
                f"{message}; its trainer is started again, {number} of {self._trainers.limit}, the "
                "others go on"
            )
        return [self._rank(index, lost.incarnation + 1) for index in sorted(lost.mates)]

    def _rank(self, index: int, incarnation: int = 0) -> Rank:
        assert self._task is not None
        task, config = replace(self._task, rank=index, incarnation=incarnation), self.request.config
        return Rank(
            index=index,
            name=build.rank_names(config)[index],
            argument=json.dumps(asdict(task)),
            log_folder=self.request.folder / "log",
            namespaces=self.namespaces(index),
            incarnation=incarnation,
            mates=build.mates(config, index),
        )

    def again(self, lost: Outcome) -> Outcome | None:
        """Decide on a run that has lost a rank: its outcome, or None to restart it."""
        number = self._restarts.another(time.monotonic())
        if number is not None:
            try:
                step = saved_step(run_folder.resume_point(self.request))
            except DataError as error:
                return Outcome(error.exit_code, f"{lost.message}; {error}")
            self.say(
                f"{lost.message}; restart {number} of {self._restarts.limit} from step {step:,}"
            )
            return None
        if not self._restarts.limit:
            return lost
        options = self.request.config.checkpoint
        reason = (
            f"no restarts left (checkpoint.max_restarts = {options.max_restarts} within "
            f"{options.restart_window_seconds:g} s)"
        )
        return replace(lost, message=f"{lost.message}; {reason}")


def close(
    request: Request,
    rows: Path,
    outcome: Outcome,
    cores: int,
    view: TrainingView,
    latency: Mapping[str, Any] | None = None,
    program: str = "python",
) -> None:
    """Write the summary and show the result.

    Args:
        request: the run.
        rows: the folder of its prepared rows.
        outcome: outcome of its ranks.
        cores: number of cores of all machines of the run.
        view: for the result.
        latency: figures of emulated latency, for the summary.
        program: what starts the run's processes, to name it where the run can be resumed.

    Raises:
        RunFailedError: there is no result; has the reason.
    """
    status = STATUS.get(outcome.exit_code, "failed")
    if status != COMPLETE:
        with suppress(ResourceError):  # a full disk may be why the run has ended
            run_folder.write_summary(request.folder, status, cores, None, None)
        raise _error(outcome, request, program)
    shards = open_shards(rows, expected=None)
    teacher = teacher_scores(request.config, shards)
    best = best_score(request.folder / CHECKPOINTS) if request.config.train.evaluate_every else None
    summary = run_folder.write_summary(
        request.folder, status, cores, teacher, latency, best, shards.manifest
    )
    view.result(request.folder / run_folder.SUMMARY_FILE, summary, teacher)


def teacher_scores(config: Config, shards: Shards) -> dict[str, float] | None:
    """Scores of the teacher of synthetic rows on the test part; None for other rows."""
    sources = [source.stamp.name for source in shards.manifest.sources]
    data = config.data
    if not isinstance(data, Synthetic) or sources != [build.synthetic_name(config)]:
        return None
    from dlrm_hybrid.data import synthetic  # numba takes a second

    test_rows = shards.test_rows(data.test_part)
    scores = synthetic.teacher_scores(test_rows, data.seed, build.profile())
    return {"loss": scores.log_loss, "auc": scores.auc}


def _error(outcome: Outcome, request: Request, program: str) -> RunFailedError:
    message = outcome.message
    stopped = outcome.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    if stopped and has_checkpoint(request.folder):
        with suppress(DataError):
            message += f"; checkpoint saved at step {saved_step(request.folder):,}"
        arguments = request.again or [
            *(text for text in request.overrides if head_of(text) not in NOT_REPEATED),
            override_text(RUN_FOLDER_KEY, str(request.folder)),
            "checkpoint.resume=auto",
        ]
        message += f"; resume with\n  {program} -m dlrm_hybrid train {shlex.join(arguments)}"
    return RunFailedError(message, outcome.exit_code)
