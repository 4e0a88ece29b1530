"""Speed of a world of very many trainers that are all alike, from that of one: no simulation.

A trainer's step is what it takes alone (Z), and its turns at what trainers share: each server's
link, in and out, its main and its network thread, and cores where all ranks share a machine. A turn
takes D seconds.

    async     mean value analysis of a closed queue: what a turn has to wait for grows with how many
              others there are on average (Reiser and Lavenberg, J. ACM 27, 1980)
    bounded   max(Z, T D) of the fullest, and Z without what is waited for at table servers
    sync      Z + the time in which the busiest server takes what all have pushed and answers them,
              stage after stage: a stage is answered while others still push (a flow shop of two
              machines; Johnson, Naval Research Logistics 1, 1954)

The simulation of a few trainers is what this was held against; of thousands it would take hours.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlrm_hybrid.parallel.topology import ServerRole, TableServerRole
from dlrm_hybrid.plan.costs import UnitCosts
from dlrm_hybrid.plan.frames import Frames, bytes_by_class, frames
from dlrm_hybrid.plan.layout import Layout, layout
from dlrm_hybrid.plan.simulation.machine import LINE_SHARE, Hosts
from dlrm_hybrid.plan.simulation.world import Outcome, simulate

Demands = Mapping[str, float]
"""Seconds that a step of one trainer takes of what all share, by its name."""


def by_classes(world: Layout, units: UnitCosts, hosts: Hosts) -> Outcome:
    """Simulate one trainer with all servers, and calculate the others."""
    config, trainers = world.config, world.topology.trainers
    one_trainer = replace(config, parallel=replace(config.parallel, trainers=1))
    few = replace(layout(one_trainer, 1, world.densities), ids=world.ids, spec=world.spec)
    # Trainer 0 and the servers, as they were.
    kept = [*range(few.topology.num_workers), *world.topology.all_servers]
    there = replace(
        hosts,
        machine=_renumbered([hosts.machine[rank] for rank in kept]),
        host=_renumbered([hosts.host[rank] for rank in kept]),
    )
    alone = simulate(few, units, there)
    queues = _queues(world, units, hosts)
    if len(set(hosts.machine)) == 1:
        queues = replace(queues, cores=alone.core_use[0] * alone.seconds_per_step)
    steps = throughput(trainers, alone.seconds_per_step, queues, config.sync.name)
    shared = queues.demands()
    slower = trainers / steps / alone.seconds_per_step
    uses = {name: min(1.0, steps * seconds) for name, seconds in shared.items()}
    names = [world.topology.name(rank) for rank in world.topology.all_servers]

    def of_ranks(alone_use: Sequence[float], thread: str) -> tuple[float, ...]:
        mine = [use / slower for use in alone_use[: few.topology.num_workers]]
        return (*mine * trainers, *(uses[f"{thread} of {name}"] for name in names))

    workers = [one / slower for one in alone.link_use[: len(alone.link_use) - len(names)]]
    links = [
        min(1.0, uses.get(f"link of {name}", 0.0) + uses.get(f"link into {name}", 0.0))
        for name in names
    ]
    return Outcome(
        samples_per_second=steps * config.train.batch_size,
        seconds_per_step=trainers / steps,
        core_use=(uses.get("cores", max(alone.core_use) / slower),),
        link_use=tuple(workers * trainers + links),
        rank_use=of_ranks(alone.rank_use, "thread"),
        network_use=of_ranks(alone.network_use, "network thread"),
        bytes_per_step=bytes_by_class(world, frames(world)),
    )


def _renumbered(numbers: Sequence[int]) -> tuple[int, ...]:
    order = list(dict.fromkeys(numbers))
    return tuple(order.index(one) for one in numbers)


def tree(world: Layout, hosts: Hosts, one_seconds: float) -> float | None:
    """Samples per second of data parallelism whose gradients go through a tree of all machines.

    The performance model of TernGrad (Wen et al., NIPS 2017), weak scaling: T = T1 + (latency +
    bytes / rate) log2 n. It knows neither servers nor that anything overlaps.

    Args:
        world: its trainers and the larger of push and pull.
        hosts: their links.
        one_seconds: T1, a step on one machine.
    """
    trainers, sizes = world.topology.trainers, frames(world)
    if hosts.bytes_per_second is None or world.topology.stages > 1:
        return None
    sent = max(sum(sizes.push.values()), sum(sizes.version.values()))
    way = hosts.latency_seconds + sent / hosts.bytes_per_second
    seconds = one_seconds + way * math.log2(trainers)
    return trainers * world.config.train.batch_size / seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """What one trainer takes of a server, for a stage: seconds by what is shared.

    Attributes:
        push: until the server has it.
        answer: from then on.
    """

    push: Demands
    answer: Demands


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """All that trainers have to wait for each other at.

    Attributes:
        servers: turns at each parameter server, in the order in which stages push.
        lookups: at each table server: rows are asked for and sent.
        updates: of them, while trainers push and are answered.
        cores: seconds of those that all ranks share; 0 if they share none.
        exchange: seconds of a trainer's link for rows of the others, who ask all at once.
    """

    servers: Sequence[Sequence[Turn]]
    lookups: Sequence[Demands]
    updates: Sequence[Demands]
    cores: float = 0.0
    exchange: float = 0.0

    def demands(self) -> Demands:
        """Seconds of a step of one trainer, by what is shared."""
        turns = [one for turns in self.servers for one in turns]
        parts = [part for one in turns for part in (one.push, one.answer)]
        found: dict[str, float] = defaultdict(float)
        for part in (*parts, *self.lookups, *self.updates):
            for name, seconds in part.items():
                found[name] += seconds
        if self.cores:
            found["cores"] = self.cores
        return dict(found)

    def together(self, trainers: int, sync: str) -> float:
        """Seconds until all trainers of a step have had the turns that they wait for."""
        servers = self.servers if sync == "sync" else ()
        pushing = [_flow(turns, trainers) for turns in servers]
        updating = [trainers * _fullest(one) for one in self.updates]
        asking = [trainers * _fullest(one) for one in self.lookups]
        return max((*pushing, *updating), default=0.0) + max(asking, default=0.0)


def _flow(turns: Sequence[Turn], trainers: int) -> float:
    """Seconds until a server has answered all trainers, stage after stage."""
    pushed = answered = 0.0
    for one in turns:
        pushed += trainers * _fullest(one.push)
        answered = max(pushed, answered) + trainers * _fullest(one.answer)
    return answered


def _fullest(demands: Demands) -> float:
    return max(demands.values(), default=0.0)


def throughput(trainers: int, alone_seconds: float, queues: Queues, sync: str) -> float:
    """Steps per second of all trainers together.

    Args:
        trainers: T.
        alone_seconds: of a step of one trainer alone, its turns included.
        queues: where trainers wait for each other.
        sync: sync, bounded or async.
    """
    shared = queues.demands()
    if sync != "async":
        beside = max(alone_seconds - queues.together(1, sync), 0.0) + queues.exchange
        return trainers / max(beside + queues.together(trainers, sync), trainers * _fullest(shared))
    beside = max(alone_seconds - sum(shared.values()), 0.0) + queues.exchange
    waits = dict.fromkeys(shared, 0.0)
    rate = 0.0
    for present in range(1, trainers + 1):
        times = {name: one * (1 + waits[name]) for name, one in shared.items()}
        rate = present / (beside + sum(times.values()))
        waits = {name: rate * time for name, time in times.items()}
    return rate


def _queues(world: Layout, units: UnitCosts, hosts: Hosts) -> Queues:
    """Turns of one trainer of a world with all its trainers."""
    sizes, topology = frames(world), world.topology
    servers: list[list[Turn]] = []
    lookups: list[Demands] = []
    updates: list[Demands] = []
    for rank in topology.all_servers:
        role, name = topology.role(rank), topology.name(rank)
        if isinstance(role, ServerRole):
            keys = sorted(key for key in sizes.push if key[1] == role.index)
            stages = reversed(keys)  # as backward reaches them
            servers.append([_turn(world, sizes, units, hosts, key, name) for key in stages])
        else:
            assert isinstance(role, TableServerRole)
            serving = units.serve * world.config.train.batch_size / topology.table_servers
            looking_up = _carried(sizes.lookup, units, hosts, "link into", name)
            sending = _carried(sizes.rows, units, hosts, "link of", name)
            thread, network = f"thread of {name}", f"network thread of {name}"
            carried = looking_up[network] + sending[network]
            sent = serving + units.messages.send
            lookups.append({**looking_up, **sending, network: carried, thread: sent})
            updates.append(
                {**_carried(sizes.update, units, hosts, "link into", name), thread: serving}
            )
    exchange = 0.0
    if hosts.bytes_per_second is not None:
        sent = sum(sizes.exchange) * (topology.trainers - 1)
        exchange = sent * LINE_SHARE / hosts.bytes_per_second
    return Queues(servers=servers, lookups=lookups, updates=updates, exchange=exchange)


def _turn(
    world: Layout, sizes: Frames, units: UnitCosts, hosts: Hosts, key: tuple[int, int], name: str
) -> Turn:
    """Of a bucket, at the parameter server of this name."""
    elements = sum(one.count for one in world.bucket(*key))
    come, sent = sizes.push[key], sizes.version[key]
    encoded = 1.0 if world.config.sync.name == "async" else 1 / world.topology.trainers
    taking = elements * (units.server_decode + units.server_apply)
    giving = elements * encoded * units.server_encode
    giving += units.messages.send + units.messages.send_byte * sent
    return Turn(
        {f"thread of {name}": taking, **_carried(come, units, hosts, "link into", name)},
        {f"thread of {name}": giving, **_carried(sent, units, hosts, "link of", name)},
    )


def _carried(
    num_bytes: float, units: UnitCosts, hosts: Hosts, link: str, name: str
) -> dict[str, float]:
    """Of one message: seconds of a link one way, and of the network's thread."""
    messages = units.messages
    found = {f"network thread of {name}": messages.carry + messages.carry_byte * num_bytes}
    if hosts.bytes_per_second is not None:
        found[f"{link} {name}"] = num_bytes * LINE_SHARE / hosts.bytes_per_second
    return found
