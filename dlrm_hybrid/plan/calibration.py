"""Costs of the ranks of a run, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.types import ConfigError, DataError

KEY = "plan.calibration"
LEAST_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """Costs of a step on one rank, means over the timed steps.

    Attributes:
        cpu_seconds: CPU seconds of all threads.
        thread_seconds: CPU seconds of the main thread.
        spans: wall seconds of the main thread by span.
        messages: messages sent.
        num_bytes: bytes sent in them.
        peak_rss_bytes: peak memory of the rank while it ran.
    """

    cpu_seconds: float
    thread_seconds: float
    spans: Mapping[Span, float]
    messages: float
    num_bytes: float
    peak_rss_bytes: int

    @property
    def working(self) -> float:
        """Wall seconds of all spans except waiting."""
        return sum(seconds for span, seconds in self.spans.items() if span is not Span.WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A finished run that costs are taken from.

    Attributes:
        folder: folder of the run.
        config: configuration of the run.
        cores: cores of its machine.
        samples_per_second: measured speed.
        ranks: costs by rank; empty for a run of one process.
    """

    folder: Path
    config: Config
    cores: int
    samples_per_second: float
    ranks: Mapping[int, RankCosts]


def read(folder: Path) -> Calibration:
    """Read the costs in a run folder.

    Raises:
        ConfigError: the run is unsuitable or its record is damaged; begins with
            `plan.calibration`.
    """
    what = f"{KEY} = {folder}"
    try:
        return _read(folder, what)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # the file is untrusted
        raise ConfigError(f"{what}: its record is damaged: {error!r:.200}") from error


def _read(folder: Path, what: str) -> Calibration:
    if not is_run(folder):
        raise ConfigError(f"{what}: is no run folder")
    try:
        run = read_run(folder)
        config = validate(run.config)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{what}: {error}") from error
    if run.status != COMPLETE:
        raise ConfigError(f"{what}: its status is {run.status}; only a complete run says its costs")
    if config.parallel.threads > 1:
        raise ConfigError(f"{what}: parallel.threads = {config.parallel.threads} must be 1")
    speed = run.summary.get("samples_per_second")
    if not speed:
        raise ConfigError(f"{what}: too short, no step was timed")
    return Calibration(
        folder=folder,
        config=config,
        cores=run.environment["cores"],
        samples_per_second=speed,
        ranks=_ranks(run, config, what),
    )


def check_same_model(calibration: Calibration, config: Config) -> None:
    """Raise ConfigError, with a line for each key, if the costs are of another model."""
    run = calibration.config
    keys = [
        (f"model.{key}", getattr(run.model, key), getattr(config.model, key))
        for key in ("embedding_dim", "table_dims", "bottom", "top", "interaction", "cross", "fm")
    ]
    keys.append(("precision", run.precision, config.precision))
    keys.append(("threads", run.threads, config.threads))
    faults = [
        f"{key} = {now}: {KEY} = {calibration.folder} was made with {then}"
        for key, then, now in keys
        if then != now
    ]
    if faults:
        raise ConfigError(faults_text(faults))


def _ranks(run: Run, config: Config, what: str) -> dict[int, RankCosts]:
    if config.parallel.name == "single":
        return {}
    attempts = [event.values for event in run.events if event.kind is Kind.RANK]
    last = {values["rank"]: values for values in attempts}
    if not last:
        raise ConfigError(
            f"{what}: its ranks were in one process, or have not come to their end; what each "
            "costs is only known of parallel.world=processes"
        )
    steps = max(int(values["timed_steps"]) for values in last.values())
    if steps < LEAST_STEPS:
        raise ConfigError(f"{what}: {steps} timed steps, at least {LEAST_STEPS} are needed")
    return {rank: _rank(values, steps) for rank, values in sorted(last.items())}


def _rank(values: Mapping[str, Any], steps: int) -> RankCosts:
    traffic: Mapping[str, Any] = values["traffic"] or {}
    sent: list[Mapping[str, int]] = list(traffic.get(Phase.TRAIN, {}).values())
    return RankCosts(
        cpu_seconds=values["cpu_seconds"][Phase.TRAIN] / steps,
        thread_seconds=values["thread_cpu_seconds"][Phase.TRAIN] / steps,
        spans={Span(name): seconds / steps for name, seconds in values["seconds_by_span"].items()},
        messages=sum(tally["messages"] for tally in sent) / steps,
        num_bytes=sum(tally["bytes"] for tally in sent) / steps,
        peak_rss_bytes=values["peak_rss_bytes"],
    )
