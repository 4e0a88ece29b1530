"""A training run as a function of its configuration, to be called by hyperparameter tuners."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from os import stat_result
from pathlib import Path
from typing import Any, cast

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.run.folder import is_complete
from dlrm_hybrid.run.jobs.process import JobProcess, listen
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event, Kind, part_of
from dlrm_hybrid.telemetry.summary import SUMMARY_FILE
from dlrm_hybrid.types import ConfigError, ExitCode, RunFailedError, ScoredPart

POLL_SECONDS = 0.2
GRACE_SECONDS = 60.0  # time for a checkpoint after a signal

Report = Callable[[int, float], object]


def objective(overrides: Sequence[str], *, report: Report | None = None) -> float:
    """Train with these overrides and return the score of the model.

    The run has its own processes, so several threads may call this at once; its output goes to
    `output.log` in its folder. It ends when this process does, and stops with a checkpoint when
    this call is interrupted. Python delivers Ctrl-C to the main thread only: runs of other threads
    continue until they finish or their `report` raises.

    Args:
        overrides: as on the command line after `train`, such as `["optimizer.lr=0.1"]`.
            `hydra.run.dir=FOLDER` sets the run folder; with `skip_completed=true` a run that is
            complete there is not repeated.
        report: called with step and score after each evaluation (`train.evaluate_every`) of the
            part that the result is from. If it raises, the run stops and the exception propagates.

    Returns:
        The score named by `train.monitor`, log-loss (lower is better) or AUC (higher is better), on
        the validation part if the rows have one, else on the test part; of the best evaluated
        weights, which `predict` and `export` take, or of the last without `train.evaluate_every`.

    Raises:
        ConfigError: lists all errors of the overrides.
        RunFailedError: the run ended without a score; `exit_code` is that of the command `train`.
    """
    texts = _texts(overrides)
    job = compose.job_of(texts, _sweep_faults(texts))
    request = Request(validate(job.values), job.values, job.folder, job.overrides)
    if not (request.config.skip_completed and is_complete(request)):
        _run(request, report)
    return _score(request)


def _texts(overrides: Sequence[str]) -> Sequence[str]:
    """The overrides as a list.

    Raises:
        ConfigError: they are not texts, or a single one, which would be read letter by letter.
    """
    if isinstance(overrides, str):
        fault = f"overrides = {overrides}: must be several, such as [{overrides!r}]"
        raise ConfigError(faults_text([fault]))
    texts = list(overrides)  # a generator can be read only once
    faulty = [x for x in cast("Sequence[object]", texts) if not isinstance(x, str)]
    if faulty:
        raise ConfigError(faults_text([f"overrides: {x!r}: must be a str" for x in faulty]))
    return texts


def _sweep_faults(overrides: Sequence[str]) -> list[str]:
    return [f"{key}: only applies to a sweep" for key in compose.of_sweeps(overrides)]


def _run(request: Request, report: Report | None) -> None:
    """Train in a separate process, to the end.

    Raises:
        RunFailedError: the run failed or was stopped.
    """
    evaluations = _Evaluations(request.folder / EVENTS_FILE, request.config.train.monitor)
    process = JobProcess.start(request.overrides, request.folder)
    with _ended_at_last(process):
        while (code := process.ended()) is None:
            listen([process], POLL_SECONDS)
            process.hear()
            for step, score in evaluations.new() if report is not None else ():
                assert report is not None
                report(step, score)
        if code != ExitCode.DONE:
            message = process.message or f"ended with exit code {code}"
            raise RunFailedError(f"{request.folder}: {message}", code)


@contextmanager
def _ended_at_last(process: JobProcess) -> Generator[None, None, None]:
    """End a run in any case; if an error leaves the `with`, let it save a checkpoint first."""
    try:
        yield
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        process.send(signal.SIGINT if is_interrupt else signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # then its time is over
            process.process.wait(GRACE_SECONDS)
        process.hear()
        raise
    finally:
        process.kill()


class _Evaluations:
    """Reads the scores that a run records while it trains."""

    def __init__(self, path: Path, monitor: str) -> None:
        self._path = path
        self._monitor = monitor
        self._read: tuple[int, ...] = ()
        self._step = -1

    def new(self) -> list[tuple[int, float]]:
        """Steps and scores not returned before; after a restart, of later steps only."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return []
        if _stamp(stat) == self._read:
            return []
        self._read = _stamp(stat)
        record = list(events.read(self._path))
        part = _deciding(record)
        later = [
            (event.step, float(score))
            for event in record
            if event.kind is Kind.EVALUATED and part_of(event) is part and event.step > self._step
            if (score := event.values[self._monitor]) is not None
        ]
        self._step = max([self._step, *(step for step, _ in later)])
        return later


def _stamp(stat: stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _deciding(record: Sequence[Event]) -> ScoredPart:
    """The part whose scores decide: validation, if the rows have that part, else test."""
    has_one = any(x.kind is Kind.STARTED and x.values.get("validation_rows") for x in record)
    return ScoredPart.VALIDATION if has_one else ScoredPart.TEST


def _score(request: Request) -> float:
    """Read the score of a complete run.

    Raises:
        RunFailedError: it has none: an AUC needs both labels.
    """
    summary: dict[str, Any] = read_object(request.folder, SUMMARY_FILE)
    if best := summary["best"]:
        return float(best["value"])
    scores = summary.get("validation") or summary["test"]
    monitor = request.config.train.monitor
    score = scores["loss" if monitor == "log_loss" else monitor]
    if score is None:
        raise RunFailedError(f"{request.folder}: has no {monitor}", ExitCode.FAILED)
    return float(score)
