"""What is predicted of a world: how fast it is, what limits it, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data import manifest
from dlrm_hybrid.plan.calibration import Calibration
from dlrm_hybrid.plan.costs import UnitCosts, one_process_seconds
from dlrm_hybrid.plan.fit import units_of
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import Densities, Layout, layout
from dlrm_hybrid.plan.memory import Runtimes, memory_bytes, runtimes
from dlrm_hybrid.plan.simulation.classes import by_classes, tree
from dlrm_hybrid.plan.simulation.machine import Hosts
from dlrm_hybrid.plan.simulation.world import FEWEST_STEPS, Outcome, simulate
from dlrm_hybrid.plan.worlds import Planned
from dlrm_hybrid.run.assembly.build import pipeline, prepared_folder
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.types import DataError

BUSY = 0.6  # use of the fullest resource; below, ranks mostly wait for messages under way
SIMULATION, CLASSES = "simulation", "classes"
SLOW, SLOWER = "one trainer at half speed", 2.0
UNITS_OF = {
    "embedding": ("own_lookup", "lookup", "ask", "serve"),
    "activation": ("encode_activation", "decode_activation"),
}
"""Costs of units that only runs with the same choice in a section of the configuration know."""
MOST_RANKS = 96  # of a simulation


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The resource that limits how fast a world trains.

    Attributes:
        name: `link of server-0`, `cores`, `thread of worker-0.1`, `network thread of server-0` or
            `waiting`.
        use: share of the time in which it is busy; of `waiting` that of the busiest resource.
        busiest: that resource.
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
    """One world.

    Attributes:
        name: `2 × 3 + 1`: trainers, stages, servers and table servers.
        trainers: T.
        stages: W.
        servers: S.
        table_servers: of the tables.
        rate: of links as the configuration writes it; None for none.
        latency: likewise.
        samples_per_second: of all trainers.
        seconds: for the run that is configured; None where nobody knows how many rows there are.
        bytes_per_sample: by class of traffic.
        core_use: share of the cores of the busiest machine.
        link_use: of each host's link, both directions added, by its first rank's name.
        thread_use: share of one core that the main thread of each rank takes, by name.
        network_thread_use: likewise of its network's thread.
        memory_bytes: of each rank, by name.
        bottleneck: what limits it.
        what_if: how many times as fast it would be, by what is changed.
        method: `simulation` or `classes`.
        tree: samples per second by the model of TernGrad's authors, to compare; None without a
            rate, or where the model is cut.
    """

    name: str
    trainers: int
    stages: int
    servers: int
    table_servers: int
    rate: str | None
    latency: str | None
    samples_per_second: float
    seconds: float | None
    bytes_per_sample: Mapping[Traffic, float]
    core_use: float
    link_use: Mapping[str, float]
    thread_use: Mapping[str, float]
    network_thread_use: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    bottleneck: Bottleneck
    what_if: Mapping[str, float]
    method: str
    tree: float | None

    def to_json(self) -> dict[str, Any]:
        """For a file; `network.bytes_per_sample` is that of a run's summary."""
        values = asdict(self)
        by_class = {traffic.value: one for traffic, one in self.bytes_per_sample.items()}
        del values["bytes_per_sample"]
        network = {"bytes_per_sample": sum(by_class.values()), "by_class": by_class}
        return {**values, "bottleneck": asdict(self.bottleneck), "network": network}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What worlds are predicted from.

    Attributes:
        calibration: the run.
        units: CPU seconds of units in it.
        runtimes: bytes of memory beside what its ranks owned.
        beside: runs that say what this one cannot, by section of the configuration.
    """

    calibration: Calibration
    units: UnitCosts
    runtimes: Runtimes
    beside: Mapping[str, Calibration] = field(default_factory=dict[str, Calibration])

    @classmethod
    def of(cls, calibration: Calibration) -> Costs:
        """The costs of a run."""
        peaks = {rank: one.peak_rss_bytes for rank, one in calibration.ranks.items()}
        return cls(
            calibration=calibration,
            units=units_of(calibration),
            runtimes=runtimes(calibration.world, peaks),
        )

    def likeness(self, config: Config) -> int:
        """How much of what decides costs a world has in common with the run."""
        run = self.calibration.world.config
        return (
            8 * (run.gradient.name == config.gradient.name)
            + 4 * (run.activation.name == config.activation.name)
            + 4 * (run.embedding.name == config.embedding.name)
            + 2 * (run.parallel.cuts == config.parallel.cuts)
            + 2 * (run.network.name == config.network.name)
            + (run.parallel.trainers == config.parallel.trainers)
        )

    def remarks(self, config: Config) -> list[str]:
        """What of a world these runs cannot say."""
        had = {"gradient": self.calibration, "network": self.calibration, **self.beside}
        unlike = [
            f"{section}={_name(config, section)} (it had {_name(run.world.config, section)})"
            for section, run in had.items()
            if _name(config, section) != _name(run.world.config, section)
            and (section != "activation" or config.parallel.cuts)
        ]
        rows, then = config.train.batch_size, self.calibration.world.config.train.batch_size
        if rows != then:
            unlike.append(f"train.batch_size={rows} (it had {then})")
        told: list[str] = []
        if unlike:
            folder = self.calibration.folder
            told.append(f"not known of {folder}, so extrapolated: {', '.join(unlike)}")
        if train_rows(config, self.calibration) is None:
            told.append(
                f"data = {config.data.name} is not prepared, so nobody knows how many rows it has: "
                f"tables are as large as those of {self.calibration.train_rows:,} rows"
            )
        return told

    def world(self, config: Config, counted: Densities | None = None) -> Layout:
        """A planned world that sends as densely as was counted of it.

        Args:
            config: of it.
            counted: of this very world; None: as the run did, where its method is the run's.
        """
        rows = train_rows(config, self.calibration) or self.calibration.train_rows
        known = counted or self._known(config)
        return layout(config, rows, known.over(run_rows(config, rows) / step_rows(config)))

    def _known(self, config: Config) -> Densities:
        run = self.calibration.world
        same = (config.gradient, config.pull) == (run.config.gradient, run.config.pull)
        known = run.densities
        if not same:
            known = replace(known, gradient={}, course=(), push=1.0, version=1.0)
        if config.activation != run.config.activation or config.parallel.cuts != run.partition.cuts:
            known = replace(known, activation={})
        return known


def most_like(costs: Sequence[Costs], config: Config) -> Costs:
    """The run that is most like a world, with what others say of tables and of activations."""
    ranked = sorted(costs, key=lambda one: -one.likeness(config))
    first, units, beside = ranked[0], ranked[0].units, dict[str, Calibration]()
    for section, names in UNITS_OF.items():
        wanted = _name(config, section)
        same = (one for one in ranked if _name(one.calibration.world.config, section) == wanted)
        source = next(same, first)
        units = replace(units, **{name: getattr(source.units, name) for name in names})
        beside[section] = source.calibration
    runtimes = {kind: size for one in reversed(ranked) for kind, size in one.runtimes.items()}
    return replace(first, units=units, runtimes=runtimes, beside=beside)


def _name(config: Config, section: str) -> str:
    return getattr(config, section).name


def train_rows(config: Config, calibration: Calibration) -> int | None:
    """Of the data: as the run says, as many as are made, or as have been prepared; else None."""
    if config.data == calibration.world.config.data:
        return calibration.train_rows
    rows, days = config.data.rows, config.data.days
    if rows is not None and days is not None:
        return rows * (days - 1) // days
    try:
        return manifest.read(prepared_folder(config)).parts.train.rows
    except DataError:
        return None


def step_rows(config: Config) -> int:
    """Of the batches of all trainers."""
    return config.train.batch_size * config.parallel.trainers


def run_rows(config: Config, train_rows: int) -> int:
    """That a run learns from."""
    if config.train.steps is not None:
        return config.train.steps * step_rows(config)
    return train_rows * config.train.epochs


def predict(
    planned: Planned, costs: Costs, counted: Densities | None = None, *, changes: bool = True
) -> Prediction:
    """Simulate a world, and say what limits it.

    Args:
        planned: the world.
        costs: of its parts.
        counted: what it sends, from a run of it; None: as densely as the calibration did.
        changes: also simulate it with more of what it has, for `what_if`.
    """
    config = planned.config
    world = costs.world(config, counted)
    hosts = planned.hosts(config.plan.cores or costs.calibration.cores)
    found = measure(world, costs.units, hosts)
    rows = run_rows(config, train_rows(config, costs.calibration) or 0)
    links = _links(world, hosts, found)
    topology, samples = world.topology, step_rows(config)
    names = [topology.name(rank) for rank in range(topology.size)]
    threads = dict(zip(names, found.rank_use, strict=True))
    carriers = dict(zip(names, found.network_use, strict=True))
    return Prediction(
        name=planned.name,
        trainers=topology.trainers,
        stages=topology.stages,
        servers=topology.servers,
        table_servers=topology.table_servers,
        rate=planned.rate,
        latency=planned.latency,
        samples_per_second=found.samples_per_second,
        seconds=rows / found.samples_per_second if rows else None,
        bytes_per_sample={
            traffic: size / samples
            for traffic, size in bytes_by_class(world, frames(world)).items()
        },
        core_use=max(found.core_use),
        link_use=links,
        thread_use=threads,
        network_thread_use=carriers,
        memory_bytes={
            name: memory_bytes(world, rank, costs.runtimes) for rank, name in enumerate(names)
        },
        bottleneck=_bottleneck(max(found.core_use), links, threads, carriers),
        what_if={
            change: measure(world, units, there).samples_per_second / found.samples_per_second
            for change, units, there in _changes(costs.units, hosts, _last_trainer(world))
            if changes
        },
        method=SIMULATION if topology.size <= MOST_RANKS else CLASSES,
        tree=tree(world, hosts, one_process_seconds(costs.units, world)),
    )


def measure(world: Layout, units: UnitCosts, hosts: Hosts) -> Outcome:
    """Simulate a world; one of very many ranks with one trainer, and calculate the rest."""
    if world.topology.size <= MOST_RANKS:
        return simulate(world, units, hosts, _steps(world))
    return by_classes(world, units, hosts)


def one_process(config: Config, costs: Costs) -> float:
    """Samples per second of the same model in one process on one machine: a sum of its parts."""
    return config.train.batch_size / one_process_seconds(costs.units, costs.world(config))


def _last_trainer(world: Layout) -> Sequence[int]:
    """Its workers; of one alone nobody would ask whether others wait for it."""
    topology = world.topology
    stages = topology.stages if topology.trainers > 1 and topology.size <= MOST_RANKS else 0
    return range(topology.num_workers - stages, topology.num_workers)


def _steps(world: Layout) -> int:
    """Enough for all that is in flight to be steady."""
    staleness = world.config.sync.staleness + world.config.embedding.staleness
    return FEWEST_STEPS + 2 * (staleness + pipeline(world.config).most_in_flight)


def _links(world: Layout, hosts: Hosts, found: Outcome) -> dict[str, float]:
    first: dict[int, str] = {}
    for rank, host in enumerate(hosts.host):
        first.setdefault(host, world.topology.name(rank))
    return {first[host]: use for host, use in enumerate(found.link_use)}


def _bottleneck(
    cores: float,
    links: Mapping[str, float],
    threads: Mapping[str, float],
    carriers: Mapping[str, float],
) -> Bottleneck:
    uses = {f"link of {name}": use for name, use in links.items()}
    uses |= {f"thread of {name}": use for name, use in threads.items()}
    uses |= {f"network thread of {name}": use for name, use in carriers.items()}
    uses["cores"] = cores
    busiest = max(uses, key=lambda name: uses[name])
    use = uses[busiest]
    return Bottleneck(busiest if use >= BUSY else "waiting", use, busiest)


def _changes(
    units: UnitCosts, hosts: Hosts, slow: Sequence[int]
) -> Iterator[tuple[str, UnitCosts, Hosts]]:
    """What to change, one thing at a time."""
    if hosts.bytes_per_second is not None:
        yield "rate × 2", units, replace(hosts, bytes_per_second=2 * hosts.bytes_per_second)
    if hosts.latency_seconds:
        yield "latency ÷ 2", units, replace(hosts, latency_seconds=hosts.latency_seconds / 2)
    yield "cores × 2", units, replace(hosts, cores=2 * hosts.cores)
    if slow:
        yield SLOW, units, replace(hosts, slowness=dict.fromkeys(slow, SLOWER))
