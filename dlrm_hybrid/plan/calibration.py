"""What a run says of the costs of its parts: densities, CPU seconds of units, times to wake up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, saved_values, validate
from dlrm_hybrid.plan.frames import bytes_by_class, frames, pull_density
from dlrm_hybrid.plan.layout import Densities, Interval, Layout, layout
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.run.assembly.build import many_processes
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.telemetry.traffic import Phase, Traffic
from dlrm_hybrid.types import ConfigError, DataError

KEY = "plan.calibration"
LEAST_STEPS = 20

T = TypeVar("T")
Sent = Mapping[str, Mapping[str, float]]
"""By name: elements, and how many of these were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """What one rank took for a step, on average over the steps that were timed.

    Attributes:
        cpu_seconds: of all its threads.
        thread_seconds: of CPU, of its main thread; None in runs of older versions.
        spans: wall seconds of its main thread.
        messages: sent.
        num_bytes: sent in them.
        peak_rss_bytes: of memory, while it ran; None in runs of older versions.
    """

    cpu_seconds: float
    thread_seconds: float | None
    spans: Mapping[Span, float]
    messages: float
    num_bytes: float
    peak_rss_bytes: int | None = None

    @property
    def working(self) -> float:
        """Wall seconds of all spans but waiting."""
        return sum(seconds for span, seconds in self.spans.items() if span is not Span.WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A run, as far as it says what things cost.

    Attributes:
        folder: of the run.
        world: it, with the densities it has measured.
        train_rows: of its data.
        cores: of its machine.
        samples_per_second: measured.
        ranks: by rank.
    """

    folder: Path
    world: Layout
    train_rows: int
    cores: int
    samples_per_second: float
    ranks: Mapping[int, RankCosts]


def read(folder: Path) -> Calibration:
    """What a run folder says.

    Raises:
        ConfigError: it says too little, or what the program never writes; begins with
            `plan.calibration`.
    """
    what = f"{KEY} = {folder}"
    try:
        return _read(folder, what)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of anybody's figures
        raise ConfigError(f"{what}: its record is damaged: {error!r:.200}") from error


def _read(folder: Path, what: str) -> Calibration:
    if not is_run(folder):
        raise ConfigError(f"{what}: is no run folder")
    try:
        run = read_run(folder)
        config = validate(saved_values(run.config))
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{what}: {error}") from error
    if run.status != COMPLETE:
        raise ConfigError(f"{what}: its status is {run.status}; only a complete run says its costs")
    if config.parallel.threads > 1:
        raise ConfigError(f"{what}: parallel.threads = {config.parallel.threads} must be 1")
    started = [event.values for event in run.events if event.kind is Kind.STARTED]
    speed = run.summary.get("samples_per_second")
    if not started or not speed:
        raise ConfigError(f"{what}: too short, no step was timed")
    train_rows = int(started[-1].get("train_rows") or 0)
    ranks = _ranks(run, config, what)
    world = layout(config, train_rows, Densities())
    world = measured(run, world, train_rows)
    return Calibration(
        folder=folder,
        world=world,
        train_rows=train_rows,
        cores=run.environment["cores"],
        samples_per_second=speed,
        ranks=ranks,
    )


def densities_of(run: Run) -> Densities:
    """What a complete run has sent, whatever its ranks were."""
    (started, *_) = (event.values for event in run.events if event.kind is Kind.STARTED)
    train_rows = int(started["train_rows"])
    plain = layout(validate(saved_values(run.config)), train_rows, Densities())
    return measured(run, plain, train_rows).densities


def check_same_model(calibration: Calibration, config: Config) -> None:
    """Refuse costs of another model.

    Raises:
        ConfigError: one line for each key that differs.
    """
    run = calibration.world.config
    keys = [
        (f"model.{key}", getattr(run.model, key), getattr(config.model, key))
        for key in ("embedding_dim", "bottom", "top", "interaction", "cross", "fm")
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
    attempts = [event.values for event in run.events if event.kind is Kind.RANK]
    last = {values["rank"]: values for values in attempts}
    if not last:
        if many_processes(config) or config.parallel.name == "hybrid":
            raise ConfigError(
                f"{what}: its ranks were in one process, or have not come to their end; what each "
                "costs is only known of parallel.world=processes"
            )
        return {0: _alone(run)}
    steps = max(int(values["timed_steps"]) for values in last.values())
    if steps < LEAST_STEPS:
        raise ConfigError(f"{what}: {steps} timed steps, at least {LEAST_STEPS} are needed")
    return {rank: _rank(values, steps) for rank, values in sorted(last.items())}


def _rank(values: Mapping[str, Any], steps: int) -> RankCosts:
    traffic: Mapping[str, Any] = values["traffic"] or {}
    sent: list[Mapping[str, int]] = list(traffic.get(Phase.TRAIN, {}).values())
    threads: Mapping[str, float] | None = values.get("thread_cpu_seconds")
    return RankCosts(
        cpu_seconds=values["cpu_seconds"][Phase.TRAIN] / steps,
        thread_seconds=None if threads is None else threads[Phase.TRAIN] / steps,
        spans={Span(name): one / steps for name, one in values["seconds_by_span"].items()},
        messages=sum(one["messages"] for one in sent) / steps,
        num_bytes=sum(one["bytes"] for one in sent) / steps,
        peak_rss_bytes=values.get("peak_rss_bytes"),
    )


def _alone(run: Run) -> RankCosts:
    """A world of one process: its leader's points of the loss curve say what it took."""
    points = [event.values for event in run.events if event.kind is Kind.PROGRESS]
    rows = sum(point["timed_rows"] for point in points)
    steps = rows / points[-1]["samples_per_step"]
    spans = {
        span: sum(point["seconds_by_span"].get(span, 0.0) for point in points) / steps
        for span in Span
    }
    seconds = sum(point["timed_cpu_seconds"] for point in points)
    return RankCosts(
        cpu_seconds=seconds / steps, thread_seconds=None, spans=spans, messages=0.0, num_bytes=0.0
    )


def measured(run: Run, world: Layout, train_rows: int) -> Layout:
    """The same world with what the run has sent in place of what it was asked to send.

    Args:
        run: a complete one.
        world: its layout.
        train_rows: of its data.
    """
    counts = compression.merged(
        {name: _counts(one) for name, one in event.values["of"].items()}
        for event in run.events
        if event.kind is Kind.COMPRESSION
    )
    share = _shares(counts)
    known = Densities(
        gradient=_below(share, compression.GRADIENT),
        course=_course(run),
        activation={int(cut): one for cut, one in _below(share, compression.ACTIVATION).items()},
    )
    wanted = run.summary["network"]["pull_density"]
    known = replace(known, overlap=_overlap(world, known, train_rows, wanted))
    known = known.over(sum(one.steps for one in known.course))  # bytes are those of timed steps
    now = layout(world.config, train_rows, known)
    sent = run.summary["network"]["by_class"]
    steps = _counted_steps(run)
    if not steps:
        return now
    calculated = bytes_by_class(now, frames(now))
    factor = {
        traffic: sent[traffic]["bytes"] / steps / calculated[traffic]
        for traffic in calculated
        if traffic in sent and calculated[traffic] and sent[traffic]["bytes"]
    }
    counted = run.summary["distinct_ids_per_batch"]["mean"]
    ids = counted / sum(now.ids.distinct) if counted else 1.0
    known = replace(
        known,
        push=factor.get(Traffic.GRADIENT_PUSH, 1.0),
        version=factor.get(Traffic.PARAMETER_PULL, 1.0),
        ids=factor.get(Traffic.EMBEDDING, ids) if world.config.embedding.deduplicate else ids,
    )
    return layout(world.config, train_rows, known)


def _counted_steps(run: Run) -> int:
    steps = [int(one.values["timed_steps"]) for one in run.events if one.kind is Kind.RANK]
    return max(steps, default=0)


def _course(run: Run) -> tuple[Interval, ...]:
    """Shares of elements along a run; steps that were made again count once, the last time.

    The first steps, which are not timed, are an interval of their own: after the first one little
    is held back by a threshold that was found when no element had waited yet.
    """
    parts: list[tuple[int, int, Sent]] = []
    start = starts = 0
    for event in run.events:
        if event.kind is Kind.STARTED:
            start, starts = event.step, starts + 1
            parts = [part for part in parts if part[1] <= start]
        elif event.kind is Kind.COMPRESSION:
            counts = {name: _counts(one) for name, one in event.values["of"].items()}
            parts.append((start, event.step, _below(counts, compression.GRADIENT)))
            start = event.step
    if starts == 1 and parts and parts[0][1] > WARMUP_STEPS:
        (first, last, counts), total = parts[0], compression.merged(part[2] for part in parts)
        warm = {
            name: {
                "elements": one["elements"] * WARMUP_STEPS / (last - first),
                "sent": min(one["sent"], total[name]["sent"] * _untimed_share(run)),
            }
            for name, one in counts.items()
        }
        rest = {
            name: {key: one[key] - warm[name][key] for key in one} for name, one in counts.items()
        }
        middle = first + WARMUP_STEPS
        parts[:1] = [(first, middle, warm), (middle, last, rest)]
    return tuple(Interval(last - first, _shares(counts)) for first, last, counts in parts)


def _untimed_share(run: Run) -> float:
    """Of the bytes of all pushes, those of the first steps, which were not timed."""
    sent: list[Mapping[str, Mapping[str, Mapping[str, int]]]] = [
        one.values["traffic"] or {} for one in run.events if one.kind is Kind.RANK
    ]

    def pushed(phase: Phase) -> int:
        tallies = [one.get(phase, {}).get(Traffic.GRADIENT_PUSH) for one in sent]
        return sum(tally["bytes"] for tally in tallies if tally)

    early, late = pushed(Phase.WARMUP), pushed(Phase.TRAIN)
    return early / (early + late) if early else 0.0


def _shares(counts: Sent) -> dict[str, float]:
    return {name: one["sent"] / one["elements"] for name, one in counts.items() if one["elements"]}


def _counts(one: Mapping[str, Any]) -> dict[str, float]:
    return {name: one.get(name) or 0.0 for name in ("elements", "sent")}


def _below(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {
        name.removeprefix(prefix): one for name, one in values.items() if name.startswith(prefix)
    }


def _overlap(world: Layout, known: Densities, train_rows: int, wanted: float | None) -> float:
    """The power that makes pulls as dense as they were; 1 where trainers do not overlap."""
    if wanted is None or world.topology.trainers == 1:
        return 1.0
    low, high = 0.0, 1.5

    def density(overlap: float) -> float:
        at = layout(world.config, train_rows, replace(known, overlap=overlap))
        total = sum(one.count for one in at.tensors)
        return sum(pull_density(at, one) * one.count for one in at.tensors) / total

    if not density(low) < wanted < density(high):
        return 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if density(middle) < wanted else (low, middle)
    return (low + high) / 2
