"""Speed of a world of very many trainers that are all alike, from that of one: no simulation.

A trainer's step is what it takes alone (Z), and its turns at what trainers share: each server's
link, in and out, its thread, and cores where all ranks share a machine. A turn takes D seconds.

    async     mean value analysis of a closed queue: what a turn has to wait for grows with how many
              others there are on average (Reiser and Lavenberg, J. ACM 27, 1980)
    bounded   max(Z, T D) of the fullest
    sync      Z + T D of the busiest server: all push, then all are answered

The simulation of a few trainers is what this was held against; of thousands it would take hours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
    ranks = range(few.topology.size)
    # Trainer 0 and the servers, as they were.
    kept = [*range(few.topology.num_workers), *world.topology.all_servers]
    there = replace(
        hosts,
        machine=_renumbered([hosts.machine[rank] for rank in kept]),
        host=_renumbered([hosts.host[rank] for rank in kept]),
    )
    alone = simulate(few, units, there)
    shared = _demands(world, units, hosts, alone)
    beside = alone.seconds_per_step - sum(shared.values()) + _exchange_seconds(world, hosts)
    steps = throughput(trainers, max(beside, 0.0), shared, config.sync.name)
    slower = trainers / steps / alone.seconds_per_step
    uses = {name: min(1.0, steps * seconds) for name, seconds in shared.items()}
    threads = [alone.rank_use[rank] / slower for rank in ranks[: few.topology.num_workers]]
    names = [world.topology.name(rank) for rank in world.topology.all_servers]
    servers = [uses[f"thread of {name}"] for name in names]
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
        rank_use=tuple(threads * trainers + servers),
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


def _demands(world: Layout, units: UnitCosts, hosts: Hosts, alone: Outcome) -> dict[str, float]:
    """Of each server's link, each way, of its thread, and of shared cores.

    Args:
        world: with all its trainers.
        units: CPU seconds.
        hosts: where its ranks are.
        alone: the same world with one trainer.
    """
    sizes, topology = frames(world), world.topology
    found: dict[str, float] = {}
    for rank in topology.all_servers:
        role, name = topology.role(rank), topology.name(rank)
        if isinstance(role, ServerRole):
            come, sent, thread = _server(world, sizes, units, role.index)
        else:
            assert isinstance(role, TableServerRole)
            come, sent = sizes.lookup + sizes.update, sizes.rows
            rows = world.config.train.batch_size / topology.table_servers
            thread = 2 * units.serve * rows + units.messages.send
        found[f"thread of {name}"] = thread
        if hosts.bytes_per_second is not None:
            rate = hosts.bytes_per_second / LINE_SHARE
            found[f"link into {name}"], found[f"link of {name}"] = come / rate, sent / rate
    if len(set(hosts.machine)) == 1:
        found["cores"] = alone.core_use[0] * alone.seconds_per_step
    return found


def throughput(trainers: int, alone_seconds: float, shared: Demands, sync: str) -> float:
    """Steps per second of all trainers together.

    Args:
        trainers: T.
        alone_seconds: Z, what a step takes beside its turns.
        shared: D of all that trainers share.
        sync: sync, bounded or async.
    """
    if sync != "async":
        fullest = trainers * max(shared.values(), default=0.0)
        if sync == "bounded":
            return trainers / max(alone_seconds, fullest)
        servers = {name.rpartition(" ")[2] for name in shared}
        busiest = max(
            (
                sum(one for name, one in shared.items() if name.rpartition(" ")[2] == server)
                for server in servers
            ),
            default=0.0,
        )
        return trainers / (alone_seconds + trainers * busiest)
    waiting = dict.fromkeys(shared, 0.0)
    rate = 0.0
    for present in range(1, trainers + 1):
        times = {name: one * (1 + waiting[name]) for name, one in shared.items()}
        rate = present / (alone_seconds + sum(times.values()))
        waiting = {name: rate * time for name, time in times.items()}
    return rate


def _exchange_seconds(world: Layout, hosts: Hosts) -> float:
    """Of a trainer's link, for rows that trainers exchange; they do so all at once."""
    if hosts.bytes_per_second is None:
        return 0.0
    sent = sum(frames(world).exchange) * (world.topology.trainers - 1)
    return sent * LINE_SHARE / hosts.bytes_per_second


def _server(
    world: Layout, sizes: Frames, units: UnitCosts, server: int
) -> tuple[float, float, float]:
    """Bytes into and out of a server, and seconds of its thread, for a step of one trainer."""
    keys = [key for key in sizes.push if key[1] == server]
    elements = sum(one.count for one in world.tensors if one.server == server)
    each = units.server_decode + units.server_apply
    encoded = 1.0 if world.config.sync.name == "async" else 1 / world.topology.trainers
    sent = sum(sizes.version[key] for key in keys)
    seconds = elements * (each + encoded * units.server_encode)
    seconds += len(keys) * units.messages.send + sent * units.messages.send_byte
    return sum(sizes.push[key] for key in keys), sent, seconds
