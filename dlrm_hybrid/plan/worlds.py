"""The worlds that `plan` compares: the configured one with other numbers in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from dlrm_hybrid.comm.netem.plan import bits_per_second, seconds
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import all_faults, faults_text, validate
from dlrm_hybrid.plan.simulation.machine import Hosts
from dlrm_hybrid.run.assembly.build import host as host_of
from dlrm_hybrid.run.assembly.build import model_spec, topology
from dlrm_hybrid.types import ConfigError

Values = Mapping[str, Any]

CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
PICTURES = (".png", ".svg", ".pdf")  # as of reports, whose libraries are not needed yet

CUTS: Sequence[Sequence[str]] = ((), ("bottom.2",), ("bottom.2", "top.2"))
CUTS_WITHOUT_BOTTOM: Sequence[Sequence[str]] = ((), ("top.2",))


@dataclass(frozen=True, slots=True)
class Planned:
    """A world that is predicted.

    Attributes:
        config: of the run.
        rate: of links, such as `100mbit`; None where ranks are not bound by links.
        latency: of links, such as `20ms`; None for none.
    """

    config: Config
    rate: str | None = None
    latency: str | None = None

    @property
    def name(self) -> str:
        """Trainers × stages + servers + table servers."""
        parallel = self.config.parallel
        tables = f" + {parallel.table_servers}" if parallel.table_servers else ""
        return f"{parallel.trainers} × {len(parallel.cuts) + 1} + {parallel.servers}{tables}"

    def hosts(self, cores: float) -> Hosts:
        """Where its ranks are, and what they share.

        Args:
            cores: of each machine.
        """
        ranks = range(topology(self.config).size)
        emulated, each = self.config.network.name == "emulated", self.config.plan.hosts == "each"
        links = emulated or each or self.rate is not None or self.latency is not None
        host = tuple(host_of(self.config, rank) if emulated else rank for rank in ranks)
        return Hosts(
            machine=host if each else (0,) * len(ranks),
            host=host if links else (0,) * len(ranks),
            cores=cores,
            bytes_per_second=None if self.rate is None else bits_per_second(self.rate) / 8,
            latency_seconds=0.0 if self.latency is None else seconds(self.latency),
            paces=congestion_control() == "bbr",
        )


@cache
def congestion_control() -> str:
    """How TCP finds its rate on this machine; on one that does not say so, as most do."""
    try:
        return CONGESTION_CONTROL.read_text(encoding="ascii").strip()
    except OSError:
        return "cubic"


def as_configured(config: Config) -> Planned:
    """The world of a configuration on the links that `train` would give it."""
    network = config.network
    has_links = network.name == "emulated" or config.plan.hosts == "each"
    return Planned(config, network.rate if has_links else None, network.latency)


def compared(
    config: Config, values: Values, show: Callable[[int, int], object] = lambda done, total: None
) -> list[Planned]:
    """The configured world for every value of the lists of `plan`; or those of a search.

    Args:
        config: of the command line.
        values: the same as plain values.
        show: told how many are checked, of how many.

    Raises:
        ConfigError: a world of these values is impossible; one line for each fault.
    """
    plan, own = config.plan, as_configured(config)
    if plan.search is not None:
        changes = list(_searched(config, plan.search))
    else:
        sizes = product(
            _choices("parallel.trainers", plan.trainers), _choices("parallel.servers", plan.servers)
        )
        changes = [{**one, **other} for one, other in sizes]
    configs: list[Config] = []
    for number, changed in enumerate(changes, 1):
        tried = _with(values, changed)
        if plan.search is None or not all_faults(tried):
            configs.append(validate(tried))
        show(number, len(changes))
    links = product(plan.rates or (own.rate,), plan.latencies or (own.latency,))
    return [Planned(one, rate, latency) for (rate, latency), one in product(links, configs)]


def _searched(config: Config, ranks: int) -> Iterator[dict[str, Any]]:
    """What makes every world of up to so many ranks; the rest of the configuration may forbid it.

    Trainers, stages (at the usual cuts), servers and table servers are tried; tables are served
    where there are table servers. What compresses activations is left out where there are none.
    """
    layers = _layers(config)
    plain = flat({"activation": compose.values_of(())["activation"]})
    for cuts in CUTS if config.model.bottom else CUTS_WITHOUT_BOTTOM:
        if any(cut not in layers for cut in cuts):
            continue
        stages = len(cuts) + 1
        for trainers, servers, tables in product(
            range(1, ranks // stages + 1), range(1, ranks), range(ranks)
        ):
            if trainers * stages + servers + tables > ranks:
                continue
            yield {
                **({} if cuts else plain),
                "parallel.cuts": list(cuts),
                "parallel.trainers": trainers,
                "parallel.servers": servers,
                "parallel.table_servers": tables,
                "embedding.name": "served" if tables else "fused",
                "embedding.deduplicate": bool(tables) or config.embedding.deduplicate,
                "embedding.staleness": config.embedding.staleness if tables else 0,
            }


def _layers(config: Config) -> tuple[str, ...]:
    return model_spec(config, table_rows=(1, 1)).layer_names[:-1]


def _choices(key: str, given: Sequence[Any] | None) -> list[dict[str, Any]]:
    return [{}] if given is None else [{key: value} for value in given]


def _with(values: Values, changed: Values) -> dict[str, Any]:
    """Plain values with others at some keys."""
    after = dict(values)
    for key, value in changed.items():
        group, _, name = key.partition(".")
        after[group] = {**after[group], name: value}
    return after


def check(config: Config) -> None:
    """Refuse what is not predicted.

    Raises:
        ConfigError: one line for each fault.
    """
    faults: list[str] = []
    if config.parallel.name != "hybrid":
        faults.append(
            "plan: parallel=single is what every prediction is compared with; add parallel=hybrid"
        )
    if config.parallel.threads > 1:
        faults.append(
            f"parallel.threads = {config.parallel.threads}: `plan` knows workers of one thread only"
        )
    if config.embedding.cache_rows:
        faults.append(
            f"embedding.cache_rows = {config.embedding.cache_rows}: `plan` does not know how often "
            "a cache has a row; predict with 0, which sends more"
        )
    if config.plan.search is not None and (config.plan.trainers or config.plan.servers):
        faults.append(
            f"plan.search = {config.plan.search}: tries all numbers of trainers and servers; leave "
            "out plan.trainers and plan.servers"
        )
    if config.plan.search is not None and config.plan.count_steps is not None:
        faults.append(
            f"plan.count_steps = {config.plan.count_steps}: would train every world that "
            "plan.search tries; count those that it finds"
        )
    picture = config.plan.picture
    if picture is not None and Path(picture).suffix not in PICTURES:
        faults.append(f"plan.picture = {picture}: must end in {', '.join(PICTURES)}")
    faults += _link_faults(config)
    if faults:
        raise ConfigError(faults_text(faults))


def _link_faults(config: Config) -> Iterator[str]:
    plan = config.plan
    for key, parse, given in (
        ("rates", bits_per_second, plan.rates),
        ("latencies", seconds, plan.latencies),
    ):
        for text in given or ():
            try:
                parse(text)
            except ValueError as error:
                yield f"plan.{key} = {text}: {error}"
    if plan.hosts == "each" and not plan.rates and config.network.rate is None:
        yield "plan.hosts = each: how fast are the links? Set plan.rates or network.rate"
