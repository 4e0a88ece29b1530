"""The fastest world on some number of machines: the worlds worth trying, and their opponent."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.validate import all_faults, faults_text, validate
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.machine import LINE_SHARE, Hosts
from dlrm_hybrid.plan.worlds import Planned, Values, changed, links
from dlrm_hybrid.run.launch.rules import start_command
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError

EXPERIMENTS = ("dp_levels", "dp_bfloat16", "dct_hybrid")
TRAINERS_EACH = (1, 2)
DECIDED = tuple(f"parallel.{key}" for key in ("machines", "trainers", "servers", "table_servers"))
NO_SERVERS = "parallel.servers=0"
BFLOAT16_BYTES, ID_BYTES = 2, 4
# Time of a step of DDP + TorchRec in bfloat16, over one process at its batch size, and for each
# parameter that is reduced: `scripts/benchmarks/practitioner.py speed` on loopback, Xeon.
DDP_TIMES, DDP_PARAMETER_SECONDS = 1.36, 16e-9
DDP_EXCHANGES = 3  # of ids, pooled rows and their gradients
ONE_WAY_SHARE = 0.6
"""Share of a pair's bytes over gloo that go one way only after the other way's: the second rank
finds the first one ready, and its own word that it is ready goes behind its rows. Other pairs fill
the gap. Measured with two trainers: 0.3 to 0.85."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of world: the overrides that lead to it, and all values."""

    overrides: tuple[str, ...]
    values: Values

    @property
    def has_servers(self) -> bool:
        """Whether servers own its dense weights."""
        return self.values["parallel"]["servers"] != 0


def kinds(request: Request) -> list[Kind]:
    """The experiment on the command line, or those to choose from where there is none.

    Each with servers, and without where its trainers need none.

    Raises:
        ConfigError: none goes with the other overrides, or these decide numbers of ranks.
    """
    typed = request.overrides
    if decided := [text for text in typed if head_of(text) in DECIDED]:
        why = "plan.machines decides numbers of trainers and servers; leave it out"
        raise ConfigError(faults_text([f"{text}: {why}" for text in decided]))
    chosen = any(text.startswith("+experiment=") for text in typed)
    fitting: list[Kind] = []
    faults: list[ConfigError] = []
    for words in [()] if chosen else [(f"+experiment={name}",) for name in EXPERIMENTS]:
        overrides = (*words, *typed)
        try:
            for each in (overrides, (*overrides, NO_SERVERS)):
                fitting.append(Kind(each, compose.values_of(each)))
        except ConfigError as error:  # such as stages of a model that has no such layers
            faults.append(error)
    if not fitting:
        raise faults[0]
    return fitting


def worlds_on(kinds: Sequence[Kind], machines: int) -> list[Planned]:
    """Worlds of some kinds that can be started on `machines` machines, on all links to compare.

    Raises:
        ConfigError: there is none; has the faults of the smallest of the first kind.
    """
    planned: list[Planned] = []
    faults: list[str] = []
    for kind, each in product(kinds, TRAINERS_EACH):
        size = {"parallel.machines": machines, "parallel.trainers": machines * each}
        if kind.has_servers:
            size["parallel.servers"] = machines
        if kind.values["embedding"]["name"] == "served":
            size["parallel.table_servers"] = machines
        if wrong := all_faults(values := changed(kind.values, size)):
            faults = faults or wrong
            continue
        config = validate(values)
        # The rest follows from the number of machines, if no file of an experiment says it.
        keys = {"parallel.machines", *compose.given_keys(kind.overrides)}
        if each > 1:
            keys.add("parallel.trainers")
        if kind.has_servers:  # few machines would have none
            keys.add("parallel.servers")
        sizes = [f"{key}={number}" for key, number in size.items() if key in keys]
        planned += [
            Planned(config, rate, latency, (*kind.overrides, *sizes))
            for rate, latency in links(config)
        ]
    if not planned:
        raise ConfigError(faults_text([f"plan.machines = {machines}: {fault}" for fault in faults]))
    return planned


def command(world: Planned) -> str:
    """The command that starts a world: on each of its machines, or here where they are emulated."""
    words = [text for text in world.overrides if not head_of(text).startswith("plan.")]
    if world.config.network.name != "emulated":
        return start_command(world.config, words)
    links = {"network.rate": world.rate, "network.latency": world.latency}
    words = [text for text in words if head_of(text) not in links]
    words += [f"{key}={value}" for key, value in links.items() if value is not None]
    return shlex.join(("python", "-m", "dlrm_hybrid", "train", *words))


def ddp_seconds(world: Layout, hosts: Hosts, alone_seconds: float) -> float:
    """Seconds of a step of DDP + TorchRec in bfloat16 with the trainers of a world, where they are.

    Gradients go round a ring, ids, pooled rows and their gradients all-to-all.
    """
    config, trainers, machines = world.config, world.topology.trainers, len(set(hosts.host))
    parameters = sum(prod(shape) for shape in world.spec.dense_shapes().values())
    crowd = max(1.0, trainers / len(set(hosts.machine)) / hosts.cores)
    seconds = crowd * (DDP_TIMES * alone_seconds + DDP_PARAMETER_SECONDS * parameters)
    rows = config.train.batch_size * trainers / machines
    exchanged = rows * pooled_bytes(world.spec, machines, BFLOAT16_BYTES)
    exchanged *= 1 + ONE_WAY_SHARE / (trainers - 1)
    if hosts.bytes_per_second is not None:
        reduced = ring_bytes(parameters, trainers, BFLOAT16_BYTES)
        seconds += (reduced + exchanged) * LINE_SHARE / hosts.bytes_per_second
    ways = 2 * (trainers - 1) + 2 * DDP_EXCHANGES
    return seconds + ways * hosts.latency_seconds


def ring_bytes(elements: int, members: int, width: int) -> float:
    """Bytes that each member of a ring sends to reduce `elements` elements of `width` bytes."""
    return 2 * (members - 1) / members * elements * width


def pooled_bytes(spec: ModelShape, members: int, width: int) -> float:
    """Bytes of a sample, if tables are spread: ids, pooled rows of `width` and their gradients."""
    dims = [spec.widths.dims[table] for table in spec.columns]
    return (members - 1) / members * (ID_BYTES * len(dims) + 2 * sum(dims) * width)
