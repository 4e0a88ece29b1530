"""Worlds for tests of predictions: those of docs/results/plan.md, and one of every kind."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_hybrid.config import compose
from dlrm_hybrid.config.model import spec_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.model.spec import DataShape
from dlrm_hybrid.plan.costs import UnitCosts
from dlrm_hybrid.plan.layout import Layout, Sent, Way
from dlrm_hybrid.plan.machine import Hosts
from dlrm_hybrid.plan.simulation import Outcome, simulate
from dlrm_hybrid.plan.worlds import Planned, as_configured
from dlrm_hybrid.wire.frame import Kind

RECORD = json.loads((Path(__file__).parent / "worlds.json").read_text(encoding="utf-8"))
UNITS = UnitCosts(**RECORD["units"])
CORES = 2  # of the machine on which they were measured
SERVED = ("embedding=served", "parallel.table_servers=1")
WORLDS = {
    "sync": (),
    "compressed": ("gradient=dct", "activation=dct", "pull.precision=bfloat16"),
    "levels": ("gradient=dct", "gradient.precision=levels", "pull.precision=levels"),
    "bounded": ("sync=bounded", "sync.staleness=2"),
    "two servers": ("parallel.servers=2", "parallel.cuts=[bottom.2]"),
    "served": SERVED,
    "served ahead": (*SERVED, "parallel.table_servers=2", "embedding.staleness=3"),
    "async": ("sync=async", *SERVED),
    "elastic": ("parallel.elastic=true", *SERVED),
    "deft": ("gradient=deft", "parallel.trainers=3"),
    "terngrad": ("gradient=terngrad",),
    "deduplicated": ("embedding.deduplicate=true", "parallel.trainers=3"),
    "gpipe": ("schedule=gpipe", "schedule.microbatches=4"),
    "one_f_one_b": ("schedule=one_f_one_b", "schedule.microbatches=4"),
    "dsp": ("schedule=dsp",),
    "one trainer": ("parallel.trainers=1", "parallel.servers=0"),
    "no servers": ("parallel.trainers=3", "parallel.servers=0", "gradient=dct"),
}


class Measured(NamedTuple):
    """A world of docs/results/plan.md: what it is, what was measured, and what it sends."""

    name: str
    links: str
    samples_per_second: float
    bytes_per_sample: float
    layout: Layout

    def predicted(self) -> float:
        """Samples per second, with the costs of that machine."""
        hosts = as_configured(self.layout.config).hosts(CORES)
        return simulate(self.layout, UNITS, hosts).samples_per_second


def measured_worlds() -> list[Measured]:
    """The 24 of them."""
    return [
        Measured(one["name"], one["links"], one["measured"], one["bytes_per_sample"], _layout(one))
        for one in RECORD["worlds"]
    ]


def _layout(one: dict[str, Any]) -> Layout:
    config = validate(compose.values_of(one["words"]))
    return Layout(
        config=config,
        spec=spec_of(config.model, DataShape(table_rows=tuple(RECORD["table_rows"]))),
        sent={Way(Kind[kind], *way[:3]): Sent(*way[3:]) for kind, *way in one["sent"]},
        exchange=tuple(one["exchange"]),
    )


def values(*overrides: str) -> dict:
    return dict(compose.values_of(["parallel=hybrid", *overrides]))


def config(*overrides: str) -> Config:
    return validate(values(*overrides))


def dense(*overrides: str) -> Layout:
    """A world that sends all of its weights and gradients, and 1 kB wherever else it sends."""
    of_world = config(*overrides)
    plain = Layout(
        config=of_world, spec=spec_of(of_world.model, DataShape(table_rows=(1000,) * 26)), sent={}
    )
    topology, trainers = plain.topology, plain.topology.trainers
    sent: dict[Way, Sent] = {}
    for stage in range(topology.stages):
        for server in range(topology.servers):
            size = 4.0 * plain.elements(stage, server)
            for kind in (Kind.PUSH, Kind.PARAMETERS) if size else ():
                sent[Way(kind, stage, server)] = Sent(trainers, size)
        if not topology.servers and trainers > 1:
            sent[Way(Kind.PUSH, stage)] = Sent(
                trainers * (trainers - 1), 4.0 * plain.elements(stage)
            )
        for cut in range(topology.stages - 1):
            sent[Way(Kind.ACTIVATION, cut, 0, cut)] = Sent(trainers, 1e3)
            sent[Way(Kind.ACTIVATION_GRADIENT, cut + 1, 0, cut)] = Sent(trainers, 1e3)
    for server in range(topology.table_servers):
        for kind in (Kind.LOOKUP, Kind.ROWS, Kind.UPDATE):
            sent[Way(kind, topology.interaction_stage, server)] = Sent(trainers, 1e3)
    shared = not topology.table_servers and trainers > 1
    return Layout(
        config=plain.config,
        spec=plain.spec,
        sent=sent,
        exchange=(1e3,) * 3 if shared else (),
    )


def outcome(
    world: Layout, rate: str | None = "1gbit", latency: str | None = None, cores: float = CORES
) -> Outcome:
    """Of a world on such links."""
    hosts: Hosts = Planned(world.config, rate, latency).hosts(cores)
    return simulate(world, UNITS, hosts)
