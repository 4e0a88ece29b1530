"""Search for the fastest worlds of up to `plan.search` ranks: all are estimated, few simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, product
from typing import Any, NamedTuple, final

from dlrm_hybrid.config.keys import as_choice
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import all_faults, validate
from dlrm_hybrid.parallel.topology import place
from dlrm_hybrid.plan.costs import UnitCosts, compute_seconds
from dlrm_hybrid.plan.counting import FEW_STEPS, FLOAT_BYTES, LARGER, SMALL, Counter, grown, smaller
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.machine import LINE_SHARE, Hosts
from dlrm_hybrid.plan.prediction import Costs
from dlrm_hybrid.plan.worlds import Planned, Values, changed, links
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.wire.frame import Kind

CUTS: Sequence[tuple[str, ...]] = ((), ("bottom.2",), ("bottom.2", "top.2"))
CUTS_WITHOUT_BOTTOM: Sequence[tuple[str, ...]] = ((), ("top.2",))
SIMULATED = 12  # worlds for each kind of links
ALIKE = 0.02  # relative difference of estimated speeds below which the smaller world comes first


class Shape(NamedTuple):
    """Cuts of a world, and its numbers of trainers, servers and table servers."""

    cuts: tuple[str, ...]
    trainers: int
    servers: int
    tables: int

    @property
    def ranks(self) -> int:
        """Number of ranks of all kinds."""
        return self.trainers * (len(self.cuts) + 1) + self.servers + self.tables


def searched(request: Request, costs: Costs, counter: Counter) -> list[tuple[Planned, Layout]]:
    """The worlds that may be the fastest, for every kind of links, with what they send.

    Numbers of trainers, stages (at the usual cuts), servers and table servers are varied. Worlds
    with table servers have served tables; worlds without cuts do not compress activations.

    Args:
        request: the request of the command line.
        costs: costs of a run.
        counter: counts what worlds send.
    """
    config, values, ranks = request.config, request.values, request.config.plan.search
    assert ranks is not None
    all_cuts = CUTS if config.model.bottom else CUTS_WITHOUT_BOTTOM
    bases = {cuts: base for cuts in all_cuts if (base := _pair(config, values, cuts, counter))}
    shapes = [
        shape
        for cuts, base in bases.items()
        for shape in _shapes(cuts, ranks, len(base[0].tensors))
    ]
    found: list[tuple[Planned, Layout]] = []
    for rate, latency in links(config):
        cores = config.plan.cores or costs.calibration.cores
        hosts = Planned(config, rate, latency).hosts(cores)
        estimates = {cuts: _Estimate(*base, costs.units, hosts) for cuts, base in bases.items()}
        ranked = sorted((estimates[shape.cuts].rank(shape), shape) for shape in shapes)
        # Of worlds with equal estimates, cuts and trainers, keep the one with the fewest servers.
        alike = {(speed, *shape[:2]): shape for (speed, _), shape in reversed(ranked)}
        tried = (changed(values, _changes(config, alike[one])) for one in sorted(alike))
        possible = (validate(one) for one in tried if not all_faults(one))
        found += [
            (Planned(one, rate, latency), counter.layout(one, exactly=False))
            for one in islice(possible, SIMULATED)
        ]
    return found


def _shapes(cuts: tuple[str, ...], ranks: int, tensors: int) -> Iterator[Shape]:
    stages = len(cuts) + 1
    numbers = product(range(1, ranks // stages + 1), range(1, min(ranks, tensors + 1)))
    for trainers, servers in numbers:
        for tables in range(ranks - trainers * stages - servers + 1):
            yield Shape(cuts, trainers, servers, tables)


def _pair(
    config: Config, values: Values, cuts: tuple[str, ...], counter: Counter
) -> tuple[Layout, Layout] | None:
    """Two worlds of few trainers with these cuts, to extrapolate from; None if none is valid."""
    kinds = [Shape(cuts, 2, 1, tables) for tables in (0, 1)]
    tried = (changed(values, _changes(config, shape)) for shape in kinds)
    valid = next((validate(one) for one in tried if not all_faults(one)), None)
    if valid is None:
        return None
    # In FEW_STEPS, like the worlds that larger ones are extrapolated from: both are counted once.
    few, more = (
        counter.layout(smaller(valid, trainers), most_steps=FEW_STEPS)
        for trainers in (SMALL, LARGER)
    )
    return few, more


def _changes(config: Config, shape: Shape) -> dict[str, Any]:
    embedding = "served" if shape.tables else "fused"
    return {
        "embedding": as_choice("embedding", embedding, config.embedding.settings()),
        **({} if shape.cuts else {"activation": as_choice("activation", "none")}),
        "parallel.cuts": list(shape.cuts),
        "parallel.trainers": shape.trainers,
        "parallel.servers": shape.servers,
        "parallel.table_servers": shape.tables,
    }


@final
class _Estimate:
    """Estimates speeds of worlds with given cuts: no link and no thread can be more than busy.

    If trainers wait for each other, a step is also as long as its chain of dependent work.
    """

    def __init__(self, small: Layout, base: Layout, units: UnitCosts, hosts: Hosts) -> None:
        config, stages = base.config, range(base.topology.stages)
        self._units, self._hosts, self._rows = units, hosts, config.train.batch_size
        self._waits = config.sync.name == "sync"
        self._bytes_seconds = 0.0
        if hosts.bytes_per_second is not None:
            self._bytes_seconds = LINE_SHARE / hosts.bytes_per_second
        self._elements = sum(base.elements(stage) for stage in stages)
        self._stages = len(stages)
        own = units.encode_gradient + units.take_version
        self._computing = [
            compute_seconds(units, base, stage) + own * base.elements(stage) + units.loop
            for stage in stages
        ]
        self._exchanged = sum(base.exchange) * LARGER  # by a trainer, with all others
        self._sent = [
            (_total(small, kind), _total(base, kind)) for kind in (Kind.PUSH, Kind.PARAMETERS)
        ]
        sizes = {tensor.name: tensor.count for tensor in base.tensors}

        @cache
        def largest_part(servers: int) -> float:
            parts = dict.fromkeys(range(servers), 0)
            for name, owner in place(sizes, servers).items():
                parts[owner] += sizes[name]
            return max(parts.values()) / self._elements

        self._largest_part = largest_part

    def rank(self, shape: Shape) -> tuple[int, int]:
        """Sort key: the fastest shapes first, and of equally fast ones the smallest."""
        return -round(math.log(self.speed(shape)) / ALIKE), shape.ranks

    def speed(self, shape: Shape) -> float:
        """Estimate samples per second."""
        units, trainers = self._units, shape.trainers
        carry, others = units.send + 2 * units.carry, max(trainers - 1, 0)
        part = self._largest_part(shape.servers)
        taken = (units.server_decode + units.server_apply) * self._elements * part
        serving = trainers * (taken + self._stages * carry)
        serving += units.server_encode * self._elements * part
        most = FLOAT_BYTES * self._elements
        moved = max(grown(few, more, most, trainers) for few, more in self._sent)
        link = trainers * part * moved * self._bytes_seconds
        unit = units.own_lookup if trainers == 1 else units.lookup
        asked, exchanged, tables = unit * self._rows, 0.0, 0.0
        if shape.tables:
            asked = units.ask * self._rows + 2 * shape.tables * carry
            tables = trainers * (2 * units.serve * self._rows / shape.tables + 3 * carry)
            link = max(link, trainers * self._exchanged / 2 * self._bytes_seconds / shape.tables)
        elif others:
            asked += 3 * others * carry
            exchanged = others / trainers * self._exchanged * self._bytes_seconds
        threads = max(*self._computing, asked + min(self._computing))
        seconds = max(serving, tables, threads, link, exchanged)
        if len(set(self._hosts.machine)) == 1:
            alike = trainers * (sum(self._computing) + asked) + shape.servers * serving
            seconds = max(seconds, (alike + shape.tables * tables) / self._hosts.cores)
        if self._waits:
            ways = 4 + 2 * (self._stages - 1) + (2 if shape.tables else 6 * (others > 0))
            chain = sum(self._computing) + asked + serving / trainers
            chain += 2 * link + exchanged + ways * self._hosts.latency_seconds
            seconds = max(seconds, chain)
        return trainers * self._rows / seconds


def _total(world: Layout, kind: Kind) -> float:
    return sum(one.num_bytes for way, one in world.sent.items() if way.kind is kind)
