"""The worlds that `plan` compares: variations of the configured one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dlrm_hybrid.comm.netem.plan import bits_per_second, seconds
from dlrm_hybrid.config.keys import shown
from dlrm_hybrid.config.schema import Config, OwnModelConfig
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.parallel.dense.pulls import Pulls
from dlrm_hybrid.plan.machine import Hosts
from dlrm_hybrid.plan.simulation import simulated
from dlrm_hybrid.run.assembly.build import host as host_of
from dlrm_hybrid.run.assembly.build import topology
from dlrm_hybrid.types import ConfigError

Values = Mapping[str, Any]

PICTURES = (".png", ".svg", ".pdf")  # like reports, whose libraries are not imported here


@dataclass(frozen=True, slots=True)
class Planned:
    """A world to predict, on links of a rate and latency.

    Attributes:
        config: configuration of the run.
        rate: rate of links, such as `100mbit`; None if links are no limit.
        latency: latency of links, such as `20ms`; None for none.
        overrides: its overrides, if it was chosen for its machines.
    """

    config: Config
    rate: str | None = None
    latency: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the world's shape: trainers × stages + servers + table servers."""
        parallel = self.config.parallel
        tables = f" + {parallel.table_servers}" if parallel.table_servers else ""
        kind = f"{self.config.name}: " if self.overrides else ""
        return f"{kind}{parallel.trainers} × {len(parallel.cuts) + 1} + {parallel.servers}{tables}"

    @property
    def links(self) -> str:
        """Rate and latency in words; empty without."""
        return " ".join(text for text in (self.rate, self.latency) if text)

    def hosts(self, cores: float) -> Hosts:
        """Placement of the ranks that are simulated, on machines with this many cores.

        Links are between machines, unless one machine emulates them; without links all share it.
        """
        config = simulated(self.config)
        host = tuple(host_of(config, rank) for rank in range(topology(config).size))
        here = (0,) * len(host)
        links = config.parallel.machines or self.rate is not None or self.latency is not None
        emulated = config.network.name == "emulated"
        return Hosts(
            machine=host if links and not emulated else here,
            host=host if links or emulated else here,
            cores=cores,
            bytes_per_second=None if self.rate is None else bits_per_second(self.rate) / 8,
            latency_seconds=0.0 if self.latency is None else seconds(self.latency),
        )


def as_configured(config: Config) -> Planned:
    """The world of a configuration, on the links that `train` would give it."""
    network = config.network
    has_links = network.name == "emulated" or config.parallel.machines is not None
    return Planned(config, network.rate if has_links else None, network.latency)


def compared(config: Config, values: Values) -> list[Planned]:
    """The configured world with every combination of the lists in section `plan`.

    Raises:
        ConfigError: a combination is invalid; a line for each fault.
    """
    parallel = config.parallel
    sizes = product(
        config.plan.trainers or (parallel.trainers,), config.plan.servers or (parallel.servers,)
    )
    base = {"parallel.trainers": parallel.trainers, "parallel.servers": parallel.servers}
    changes = [dict(dict(zip(base, size, strict=True)).items() - base.items()) for size in sizes]
    configs = [validate(changed(values, _without_pulls(change))) for change in changes]
    return [Planned(x, rate, latency) for (rate, latency), x in product(links(config), configs)]


def _without_pulls(change: Values) -> Values:
    """The change; where it takes all servers away, how pulls travel, too."""
    return change if change.get("parallel.servers") != 0 else {**change, "pull": asdict(Pulls())}


def links(config: Config) -> list[tuple[str | None, str | None]]:
    """Pairs of rate and latency to compare."""
    cfg = as_configured(config)
    return list(product(config.plan.rates or (cfg.rate,), config.plan.latencies or (cfg.latency,)))


def changed(values: Values, changes: Values) -> dict[str, Any]:
    """Replace plain values at dotted keys, or whole sections, in a copy."""
    after = dict(values)
    for key, value in changes.items():
        group, _, name = key.partition(".")
        after[group] = {**after[group], name: value} if name else value
    return after


def check(config: Config) -> None:
    """Raise ConfigError, with a line for each fault, if a configuration cannot be predicted."""
    faults: list[str] = []
    if config.parallel.name != "hybrid" and not config.plan.machines:
        faults.append(
            "plan: parallel=single is what every prediction is compared with; add "
            "parallel=hybrid, or plan.machines=2 for the best world on two machines"
        )
    if isinstance(config.model, OwnModelConfig):
        faults.append(
            f"model = {config.model.name!r}: `plan` knows what the layers of a DLRM cost, and not "
            "what a model of your own does; train it on few machines and read its report"
        )
    if config.device != "cpu":
        faults.append(f"device = {config.device}: `plan` knows worlds of CPUs only; leave it out")
    if config.parallel.threads > 1:
        faults.append(
            f"parallel.threads = {config.parallel.threads}: `plan` knows workers of one thread only"
        )
    if config.embedding.cache_rows:
        faults.append(
            f"embedding.cache_rows = {config.embedding.cache_rows}: `plan` does not know how often "
            "a cache has a row; predict with 0, which sends more"
        )
    if config.plan.machines and (config.plan.trainers or config.plan.servers):
        faults.append(
            f"plan.machines = {shown(config.plan.machines)}: decides numbers of trainers and "
            "servers; leave out plan.trainers and plan.servers"
        )
    picture = config.plan.picture
    if picture is not None and Path(picture).suffix not in PICTURES:
        faults.append(f"plan.picture = {picture}: must end in {', '.join(PICTURES)}")
    faults += _link_faults(config)
    if faults:
        raise ConfigError(faults_text(faults))


def _link_faults(config: Config) -> Iterator[str]:
    if config.plan.rates or config.network.rate is not None:
        return
    for section in ("plan", "parallel"):
        if machines := getattr(config, section).machines:
            yield (
                f"{section}.machines = {shown(machines)}: how fast are the links? Set plan.rates "
                "or network.rate"
            )
