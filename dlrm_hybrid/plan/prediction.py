"""Predictions for a world: its speed, what limits it, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.plan.calibration import Calibration
from dlrm_hybrid.plan.costs import UnitCosts
from dlrm_hybrid.plan.fit import units_of
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.machine import Hosts
from dlrm_hybrid.plan.memory import Runtimes, memory_bytes, runtimes
from dlrm_hybrid.plan.simulation import simulate
from dlrm_hybrid.plan.worlds import Planned, as_configured
from dlrm_hybrid.telemetry.traffic import Traffic

BUSY = 0.6  # below this use of the busiest resource, ranks mostly wait for messages in flight
SLOW, SLOWER = "one trainer at half speed", 2.0
LIKENESS = {"gradient": 8, "activation": 4, "embedding": 4, "network": 2}
"""Weights of equal choices in the configuration, for the likeness of two worlds' costs."""
UNITS_OF = {
    "embedding": ("own_lookup", "lookup", "ask", "serve"),
    "activation": ("encode_activation", "decode_activation"),
}
"""Unit costs that can be taken from any run with the same choice in a section."""
COMPUTING = ("multiply", "layer", "interact", "loop")
"""Unit costs that no choice changes: the mean of all runs with the same stages and batches."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The resource that limits how fast a world trains.

    Attributes:
        name: `link of server-0`, `cores`, `thread of worker-0.1`, `network thread of server-0` or
            `waiting`.
        use: share of the time in which the busiest resource is busy.
        busiest: name of that resource.
    """

    name: str
    use: float
    busiest: str

    def __str__(self) -> str:
        percent = f"{100 * self.use:.0f} %"
        if self.name == self.busiest:
            return f"{self.name}, {percent}"
        return f"{self.name} for each other ({self.busiest}: {percent})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction for one world: speed, bytes, memory, and what limits it.

    Attributes:
        planned: the world.
        samples_per_second: speed of all trainers together.
        seconds: duration of the configured run.
        bytes_per_sample: bytes sent per sample, by class of traffic.
        uses: share of the time in which each resource is busy, by its name; see `Outcome`.
        memory_bytes: peak memory of each rank, by its name.
        what_if: factor on the speed, by change.
    """

    planned: Planned
    samples_per_second: float
    seconds: float
    bytes_per_sample: Mapping[Traffic, float]
    uses: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    what_if: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def bottleneck(self) -> Bottleneck:
        """The resource that limits the speed, or waiting if none is busy enough."""
        busiest = max(self.uses, key=lambda name: self.uses[name])
        use = self.uses[busiest]
        return Bottleneck(busiest if use >= BUSY else "waiting", use, busiest)

    def use_of(self, kind: str) -> dict[str, float]:
        """Uses of all `link`s, `thread`s or `network thread`s, by rank."""
        prefix = f"{kind} of "
        named = self.uses.items()
        return {name.removeprefix(prefix): use for name, use in named if name.startswith(prefix)}

    def to_json(self) -> dict[str, Any]:
        """The prediction as JSON values, with names that mean the same as in a run's summary."""
        parallel = self.planned.config.parallel
        by_class = {traffic.value: size for traffic, size in self.bytes_per_sample.items()}
        return {
            "name": self.planned.name,
            "machines": parallel.machines,
            "trainers": parallel.trainers,
            "stages": len(parallel.cuts) + 1,
            "servers": parallel.servers,
            "table_servers": parallel.table_servers,
            "rate": self.planned.rate,
            "latency": self.planned.latency,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
            "network": {"bytes_per_sample": sum(by_class.values()), "by_class": by_class},
            "core_use": self.uses["cores"],
            "link_use": self.use_of("link"),
            "thread_use": self.use_of("thread"),
            "network_thread_use": self.use_of("network thread"),
            "memory_bytes": dict(self.memory_bytes),
            "bottleneck": asdict(self.bottleneck),
            "what_if": dict(self.what_if),
        }


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a run, from which worlds are predicted.

    Attributes:
        calibration: the run.
        units: its unit costs.
        runtimes: memory of its ranks beside what they owned.
    """

    calibration: Calibration
    units: UnitCosts
    runtimes: Runtimes

    @classmethod
    def of(cls, run: Calibration, world: Layout) -> Costs:
        """Derive the costs of a run from its measurements and its layout."""
        peaks = {rank: costs.peak_rss_bytes for rank, costs in run.ranks.items()}
        hosts = as_configured(run.config).hosts(run.cores)
        return cls(run, units_of(run, world, hosts), runtimes(world, peaks))

    def knows(self, config: Config, section: str) -> bool:
        """Whether the run had the same choice in a section of the configuration."""
        return _name(self.calibration.config, section) == _name(config, section)

    def likeness(self, config: Config) -> int:
        """Score of how much a world has in common with the run in choices that decide costs."""
        run = self.calibration.config
        alike = sum(LIKENESS[section] for section in LIKENESS if self.knows(config, section))
        alike += 2 * (run.parallel.cuts == config.parallel.cuts)
        return alike + (run.parallel.trainers == config.parallel.trainers)


def most_like(costs: Sequence[Costs], config: Config) -> Costs:
    """Costs of the run most like a world; those of tables and activations may be from others."""
    ranked = sorted(costs, key=lambda run: -run.likeness(config))
    units = ranked[0].units
    for section, names in UNITS_OF.items():
        source = next((run for run in ranked if run.knows(config, section)), ranked[0]).units
        units = replace(units, **{name: getattr(source, name) for name in names})
    first = ranked[0].calibration.config
    alike = [
        run.units
        for run in ranked
        if (run.calibration.config.parallel.cuts, run.calibration.config.train.batch_size)
        == (first.parallel.cuts, first.train.batch_size)
    ]
    means = {name: fmean(getattr(unit_costs, name) for unit_costs in alike) for name in COMPUTING}
    units = replace(units, **means)
    sizes = {kind: size for run in reversed(ranked) for kind, size in run.runtimes.items()}
    return Costs(ranked[0].calibration, units, sizes)


def remarks(costs: Sequence[Costs], config: Config) -> list[str]:
    """Warnings about choices of a world that no run had, so that costs are extrapolated."""
    first = most_like(costs, config).calibration
    unlike = [
        f"{section}={_name(config, section)} (it had {_name(first.config, section)})"
        for section in LIKENESS
        if section != "activation" or config.parallel.cuts
        if _name(config, section) != _name(first.config, section)
        if section not in UNITS_OF or not any(run.knows(config, section) for run in costs)
    ]
    rows, then = config.train.batch_size, first.config.train.batch_size
    if rows != then:
        unlike.append(f"train.batch_size={rows} (it had {then})")
    return [f"not known of {first.folder}, so extrapolated: {', '.join(unlike)}"] * bool(unlike)


def _name(config: Config, section: str) -> str:
    """The choice in a section, and whether it codes: that costs more than all else it does."""
    chosen: Any = getattr(config, section)
    codes = getattr(chosen, "precision", "") == "levels" or getattr(chosen, "levels", False)
    return f"{chosen.name} as levels" if codes else chosen.name


def predict(planned: Planned, world: Layout, costs: Costs, train_rows: int) -> Prediction:
    """Predict the speed and memory of a planned world, given its layout, by simulating it."""
    config, topology = planned.config, world.topology
    outcome = simulate(world, costs.units, planned.hosts(cores(config, costs)))
    step_rows = config.train.batch_size * topology.trainers
    steps = config.train.steps
    rows = train_rows * config.train.epochs if steps is None else steps * step_rows
    return Prediction(
        planned=planned,
        samples_per_second=outcome.samples_per_second,
        seconds=rows / outcome.samples_per_second,
        bytes_per_sample={
            traffic: size / step_rows for traffic, size in world.bytes_by_class().items()
        },
        uses=outcome.uses,
        memory_bytes={
            topology.name(rank): memory_bytes(world, rank, costs.runtimes)
            for rank in range(topology.size)
        },
    )


def with_changes(prediction: Prediction, world: Layout, costs: Costs) -> Prediction:
    """Complete a prediction by `what_if`."""
    hosts = prediction.planned.hosts(cores(world.config, costs))
    slow = range(world.topology.stages) if world.topology.trainers > 1 else ()
    what_if = {
        change: simulate(world, costs.units, there).samples_per_second
        for change, there in _changes(hosts, slow)
    }
    speed = prediction.samples_per_second
    return replace(prediction, what_if={name: new / speed for name, new in what_if.items()})


def cores(config: Config, costs: Costs) -> float:
    """Cores of each machine."""
    return config.plan.cores or costs.calibration.cores


def _changes(hosts: Hosts, slow: Sequence[int]) -> Iterator[tuple[str, Hosts]]:
    """Yield changes of the hosts, one thing at a time, with their names."""
    if hosts.bytes_per_second is not None:
        yield "rate × 2", replace(hosts, bytes_per_second=2 * hosts.bytes_per_second)
    if hosts.latency_seconds:
        yield "latency ÷ 2", replace(hosts, latency_seconds=hosts.latency_seconds / 2)
    yield "cores × 2", replace(hosts, cores=2 * hosts.cores)
    if slow:
        yield SLOW, replace(hosts, slowness=dict.fromkeys(slow, SLOWER))
