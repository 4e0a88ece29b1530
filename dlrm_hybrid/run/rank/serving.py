"""Server processes of a run, from start to goodbye."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.disk import RUN_FOLDER_KEY, writing
from dlrm_hybrid.parallel.dense.server import (
    IDLE_SECONDS,
    Handle,
    HandlerTable,
    ParameterServer,
    serve,
)
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.facts import Source
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.training import begin_with_vectors, train_to_the_end
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.asynchronous.leader import LeaderRank
from dlrm_hybrid.train.asynchronous.leases import InTurns, OwnPace
from dlrm_hybrid.train.asynchronous.order_log import OrderLog, order_file
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.server_rank import ServerRank
from dlrm_hybrid.types import InterruptedRunError, PreemptedError
from dlrm_hybrid.wire.frame import Frame
from dlrm_hybrid.wire.frame import Kind as FrameKind


@contextmanager
def at_end(act: Callable[[], None]) -> Generator[None, None, None]:
    """Call a function at the end of a `with`, also if a signal has ended it between two steps."""
    try:
        yield
    except (PreemptedError, InterruptedRunError):
        act()
        raise
    act()


def serve_dense(job: Job, index: int, channel: MeteredChannel, meter: RankMeter) -> None:
    """Run the server with this index until all workers have left."""
    server = build_world.server(job.layout, index)
    meter.versions, meter.staleness = server.versions, server.staleness
    if (source := Source.of(job)) is not None:
        pushed = build_world.pushes(job.config, source.progress)
        for outgoing in server.restart(pushed, source.dense()):
            channel.send(*outgoing)
    del source  # with its open files
    collect = build_world.collectives(job.layout, index)
    _serve(job, _server_rank(job, server, meter.switch, collect), channel, meter)


def serve_tables(job: Job, index: int, channel: MeteredChannel, meter: RankMeter) -> None:
    """Run the table server with this index until all workers have left."""
    server = build_world.table_server(job.layout, index, job.storage)
    source = Source.of(job)
    if source is None or source.begins_anew:
        begin_with_vectors(job, server.pieces())
    if source is not None:
        source.checkpoint.fill(server.pieces())
        values = source.of_table_server(index, server.held.tables, job.layout.topology.trainers)
        server.restart(server.version_at(source.progress.step), values)
    del source  # with its open files
    _serve(job, _server_rank(job, server, meter.switch), channel, meter)


def _server_rank(
    job: Job,
    server: ParameterServer | TableServer,
    switch: Callable[[Phase], None],
    collect: Handle | None = None,
) -> ServerRank:
    return ServerRank(
        server=server,
        rank=job.task.rank,
        switch=switch,
        writer=job.make_writer(),
        collect=collect,
        ahead=job.config.embedding.staleness,
        elastic=job.config.parallel.elastic,
        lowered=job.layout.lowered,
    )


def _serve(job: Job, rank: ServerRank, channel: MeteredChannel, meter: RankMeter) -> None:
    with order_log(job) as log:
        meter.step = answer(job, channel, timed(job, rank.handlers(), log))


def lead(job: Job, index: int, channel: MeteredChannel, meter: RankMeter) -> None:
    """Run server 0, which also deals batches and keeps the record, until all workers have left."""
    config, layout = job.config, job.layout
    server = build_world.server(layout, index)
    meter.versions, meter.staleness = server.versions, server.staleness
    handlers: dict[FrameKind, Handle] = {}
    with order_log(job) as log:
        leader = LeaderRank(
            topology=layout.topology,
            server=server,
            plan=job.plan,
            after=build_model.loader(config, job.shards).after,
            schedule=build_model.dense_schedule(config, layout.steps),
            rows=build_model.evaluated_rows(config, job.shards),
            threads=config.parallel.threads,
            messenger=build_world.messenger_of(layout, channel, HandlerTable(channel, handlers)),
            log=log,
            rule=InTurns() if config.sync.name == "sync" else OwnPace(config.sync.ahead),
            stop=job.stop,
            elastic=config.parallel.elastic,
            missed=partial(_report_missed, job, meter),
        )
        base = _server_rank(job, server, ignore).handlers()  # the driver switches phases

        def left(frame: Frame) -> Iterable[Outgoing]:
            return [*base[FrameKind.LEFT](frame), *leader.left(frame)]

        handlers |= timed(job, {**base, FrameKind.REPORT: leader.report, FrameKind.LEFT: left}, log)
        for kind in (FrameKind.SAVE, FrameKind.SHARD):  # this rank sends these
            del handlers[kind]

        def end() -> None:
            leader.end()
            leave_servers(job, channel, meter.step)
            answer(job, channel, handlers, leader.away)

        with at_end(end):
            train_to_the_end(job, leader, meter)


def _report_missed(job: Job, meter: RankMeter, rank: int, incarnation: int) -> None:
    values = {"rank": rank, "incarnation": incarnation}
    job.report(Event(Kind.LOST, meter.step, time.time(), values))


@contextmanager
def order_log(job: Job) -> Generator[OrderLog | None, None, None]:
    """Open the log of the order in which a server takes messages; None if not configured."""
    if not job.config.sync.record:
        yield None
        return
    path = order_file(Path(job.task.run_folder), job.names[job.task.rank])
    with writing(path, RUN_FOLDER_KEY):
        stream = path.open("wb", buffering=0)
    with stream:
        yield OrderLog(path, stream)


def timed(
    job: Job, handlers: Mapping[FrameKind, Handle], log: OrderLog | None
) -> dict[FrameKind, Handle]:
    """Wrap handlers so that their time is measured and their order logged."""
    logged = handlers if log is None else log.around(handlers)
    return {kind: job.clock.timed(Span.APPLY, handle) for kind, handle in logged.items()}


def answer(
    job: Job,
    channel: Channel,
    handlers: Mapping[FrameKind, Handle],
    gone: Collection[int] = (),
) -> int:
    """Handle frames until all clients of this server have left; returns their number of ticks.

    Args:
        job: job of this rank.
        channel: channel of this rank.
        handlers: one per frame kind.
        gone: ranks that have left and may rejoin.
    """
    asking = {*range(job.layout.topology.num_workers), build.leader(job.config)}
    return serve(channel, handlers, asking - {channel.rank}, IDLE_SECONDS, gone)


def leave_servers(job: Job, channel: Channel, step: int) -> None:
    """Say goodbye to all servers after `step` ticks."""
    rank, attempt = job.task.rank, job.task.attempt
    goodbye = Frame(kind=FrameKind.GOODBYE, sender=rank, attempt=attempt, number=step)
    for server in job.layout.topology.all_servers:
        if server != rank:
            channel.send(server, goodbye, 0)
