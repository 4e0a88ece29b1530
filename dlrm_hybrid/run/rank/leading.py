"""Leading by a server, where trainers do not wait for each other; following any leader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial

from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import ReadAhead
from dlrm_hybrid.parallel.dense.server import Handle, HandlerTable
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.serving import answer, at_end, leave_servers, order_log, timed
from dlrm_hybrid.run.rank.training import resume, train_to_the_end
from dlrm_hybrid.telemetry.events import Event
from dlrm_hybrid.telemetry.events import Kind as EventKind
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.train.asynchronous.leader import LeaderRank
from dlrm_hybrid.train.asynchronous.leases import Leases
from dlrm_hybrid.train.asynchronous.turns import Turns
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.follower import (
    Due,
    Follower,
    LeaderLink,
    Order,
    WorkerShards,
    read_lease,
    read_steps,
)
from dlrm_hybrid.train.server_rank import ServerRank
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.wire.frame import Frame, Kind


def lead(
    job: Job, channel: MeteredChannel, meter: RankMeter, report: Report, stop: StopRequest
) -> None:
    """Run server 0, which also gives out batches and keeps the record, until all have left."""
    config, layout = job.config, job.layout
    server = build_world.server(config, layout, 0, job.clock)
    meter.versions, meter.staleness = server.versions, server.staleness
    handlers: dict[Kind, Handle] = {}
    with order_log(job) as log:
        leader = LeaderRank(
            topology=layout.topology,
            server=server,
            plan=job.plan,
            after=build_model.loader(config, job.shards).after,
            schedule=build_model.dense_schedule(config, layout.steps),
            rows=build_model.evaluated_rows(config, job.shards),
            threads=config.parallel.threads,
            messenger=Messenger(
                attempt=layout.attempt,
                channel=channel,
                mailbox=Mailbox(
                    channel,
                    layout.attempt,
                    build_world.mailbox_capacity(config),
                    HandlerTable(channel, handlers),
                ),
                patience_seconds=config.network.patience_seconds,
                clock=job.clock,
            ),
            log=log,
            begin=partial(_begin, config),
            stop=stop,
            elastic=config.parallel.elastic,
            missed=partial(_report_missed, report, meter),
        )
        answering = ServerRank(
            server=server,
            collect=None,
            rank=job.task.rank,
            attempt=job.task.attempt,
            switch=ignore,  # the driver switches phases
            writer=job.make_writer(),
        )
        own = answering.handlers()

        def left(frame: Frame) -> Iterable[Outgoing]:
            return [*own[Kind.LEFT](frame), *leader.left(frame)]

        handlers |= timed(job, {**own, Kind.REPORT: leader.report, Kind.LEFT: left}, log)
        for asked in (Kind.SAVE, Kind.SHARD):  # this rank sends these
            del handlers[asked]

        def end() -> None:
            leader.end()
            leave_servers(job, channel, meter.step)
            answer(job, channel, handlers, leader.away)

        with at_end(end):
            train_to_the_end(job, leader, meter, report, stop)


def _begin(config: Config, done: tuple[int, ...]) -> Leases | Turns:
    """Start the schedule of batches, at rest after so many of each trainer."""
    if config.sync.name == "sync":
        return Turns.begin(done)
    return Leases.begin(done, config.sync.ahead)


def _report_missed(report: Report, meter: RankMeter, rank: int, incarnation: int) -> None:
    values = {"rank": rank, "incarnation": incarnation}
    report(Event(EventKind.LOST, meter.step, time.time(), values))


def follow(
    job: Job, worker: WorkerRank, meter: RankMeter, report: Report, stop: StopRequest
) -> None:
    """Run a worker that the leader keeps busy, until it is ordered to end or leaves."""
    config, layout, channel = job.config, job.layout, worker.messenger.channel
    in_lockstep = not server_leads(config)
    shards = WorkerShards(worker, job.make_writer(), meter, in_lockstep)
    shards.answer()
    if not job.task.incarnation:
        resume(job, worker, ignore)
    meter.step = worker.step
    with ExitStack() as stack:
        crew = None
        if config.parallel.threads > 1:
            crew = stack.enter_context(build_world.crew(config, layout, worker, meter))
        link = LeaderLink(
            rank=worker,
            mailbox=worker.messenger.mailbox if crew is None else crew.mailbox,
            reads=_reads(job, worker, meter),
            in_lockstep=in_lockstep,
            stop=stop,
            meter=meter,
            shards=shards,
            say=partial(print, flush=True),
            incarnation=job.task.incarnation,
        )

        def leave() -> None:
            if link.has_left:  # servers learn it from the channel, as it may rejoin
                report(Event(EventKind.LEFT, worker.step, time.time(), {}))
            else:
                leave_servers(job, channel, worker.step)

        with at_end(leave):
            # In lock-step it reads the batches of later orders itself.
            ahead = 0 if in_lockstep or worker.worker.tables is None else config.embedding.staleness
            Follower(rank=worker, link=link, meter=meter, ahead=ahead, crew=crew).run()


def _reads(job: Job, worker: WorkerRank, meter: RankMeter) -> Callable[[Order], Iterator[Due]]:
    """What reads the batches of an order to train."""
    if not server_leads(job.config):
        return partial(read_steps, reader(job, worker, meter))
    sample = None if worker.worker.tables is None else meter.sample_ids()
    loader = build_model.loader(job.config, job.shards, sample=sample)
    return partial(read_lease, job.clock.timed(Span.READ, loader.part))


def reader(job: Job, worker: WorkerRank, meter: RankMeter) -> ReadAhead:
    """Make what reads a worker's batches in lock-step."""
    holds_tables = worker.worker.tables is not None
    (read,) = build_model.readers(
        job.config,
        job.shards,
        (job.task.rank // job.layout.topology.stages,),
        job.config.embedding.staleness if holds_tables else 0,
        meter.sample_ids() if holds_tables else None,
        meter.clock,
    )
    return read
