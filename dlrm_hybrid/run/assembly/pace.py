"""From the configuration to the pace of asynchronous trainers in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.parallel.dense.server import Handle
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.telemetry.histogram import IdSample
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.train.asynchronous.order_log import TAKEN, Gate, order_file, read_order
from dlrm_hybrid.train.asynchronous.pace import Pace, SimulatedPace, Trainers
from dlrm_hybrid.train.asynchronous.replay import RecordedPace
from dlrm_hybrid.train.in_process import Ranks
from dlrm_hybrid.wire.frame import Kind

Server = tuple[Channel, Handle]


def gates(config: Config, topology: Topology, servers: Sequence[Server]) -> list[Gate]:
    """Gates that keep the order of `sync.replay` at each server; none without it.

    Raises:
        DataError: a server's record is missing.
    """
    if config.sync.replay is None:
        return []
    record = [
        read_order(order_file(Path(config.sync.replay), topology.name(channel.rank)))
        for channel, _ in servers
    ]
    return [
        Gate(handle, iter([one for one in order if one.kind in TAKEN]))
        for (_, handle), order in zip(servers, record, strict=True)
    ]


def pace(
    config: Config,
    shards: Shards,
    ranks: Ranks,
    runner: InProcessRunner,
    gates: Sequence[Gate],
    clock: SpanClock,
    sample: IdSample,
) -> Pace | None:
    """The pace of asynchronous trainers; None in lockstep.

    Args:
        config: that of the run.
        shards: prepared rows.
        ranks: those of the world.
        runner: that of their programs.
        gates: those of the servers, for a replay.
        clock: that of the process.
        sample: counts the ids of batches.
    """
    if config.sync.name != "async":
        return None
    topology, loader = build.topology(config), build_model.loader(config, shards, sample=sample)
    trainers = Trainers(
        workers=[
            [ranks.workers[topology.worker(trainer, stage)] for stage in range(topology.stages)]
            for trainer in range(topology.trainers)
        ],
        clients=dict(enumerate(ranks.clients)),
        runner=runner,
        part=clock.timed(Span.READ, loader.part),
        after=loader.after,
    )
    plan = build_model.plan(config, shards)
    if config.sync.replay is None:
        return SimulatedPace(
            trainers=trainers, plan=plan, seed=config.train.seed, ahead=config.sync.ahead
        )
    leader = topology.name(build.leader(config))
    order = read_order(order_file(Path(config.sync.replay), leader))
    return RecordedPace(
        trainers=trainers,
        plan=plan,
        rests_on_record=deque(one.number for one in order if one.kind is Kind.SAVE),
        leases=deque(one for one in order if one.kind is Kind.DECISION),
        ahead=config.embedding.staleness,
        gates=gates,
        source=config.sync.replay,
    )
