"""The main function of a run's process, be it one rank of many or all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_hybrid.comm.group import GroupOptions
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.rendezvous import Rendezvous, share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import read_key_file
from dlrm_hybrid.comm.zmq.roster import UnknownPeers
from dlrm_hybrid.config.identity import CONFIG_FILE
from dlrm_hybrid.config.outside import load_chosen
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import ReadAhead
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.parallel.topology import ServerRole, TableServerRole
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.facts import Source, check_record
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.serving import at_end, lead, leave_servers, serve_dense, serve_tables
from dlrm_hybrid.run.rank.training import resume, train_to_the_end
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.interface import sampled
from dlrm_hybrid.telemetry.rank_meter import ANSWERED, RankMeter
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.follower import (
    Due,
    Follower,
    LeaderLink,
    Order,
    WorkerShards,
    read_lease,
    read_steps,
)
from dlrm_hybrid.train.lockstep import LockstepLeader
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank


def train_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Run the process that the task names, until the run ends."""
    task = TrainTask(**json.loads(argument))
    text = (Path(task.run_folder) / CONFIG_FILE).read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    folder = Path(task.rendezvous)
    load_chosen(values)

    def check() -> None:
        """Heed signals, except in a restarted rank: others may wait for it."""
        if not task.incarnation:
            stop.check()

    run_rank(task, values, validate(values), lambda: share_folder(folder, check), report, stop)


def run_rank(
    task: TrainTask,
    values: Mapping[str, Any],
    config: Config,
    rendezvous: Callable[[], Rendezvous],
    report: Report,
    stop: StopRequest,
) -> None:
    """Run the process that the task names, until the run ends.

    Args:
        task: number of the rank, and paths of its files.
        values: configuration of the run.
        config: the same, typed, with this machine's network keys.
        rendezvous: opens that of the ranks, if there are several.
        report: called with events.
        stop: stop request of signals.
    """
    build_model.prepare_torch(config)
    shards = open_shards(Path(task.prepared), build.semantics(config))
    plan = build_model.plan(config, shards)
    spec = build.shape_of(config, shards.manifest)
    job = Job.of(task, values, config, plan, spec, shards, report, stop)
    if build.many_processes(config):
        run_one_of_many(job, rendezvous(), partial(_train_worker, job))
        return
    if config.sync.replay is not None:
        check_record(Path(config.sync.replay), values)
    engine = build_engine.engine_of(job.layout, shards, job.storage)
    meter = RankMeter(
        engine.count,
        job.clock,
        uncounted=engine.uncounted,
        versions=engine.versions,
        staleness=engine.staleness,
        id_sample=engine.id_sample,
    )
    meter.begin(0)
    with _reporting(job, meter, None):
        train_to_the_end(job, engine, meter)


def _train_worker(job: Job, worker: WorkerRank, channel: MeteredChannel, meter: RankMeter) -> None:
    """Run a worker until the end of the run: in lock-step one of them leads the others."""
    if not worker.leads:
        _follow(job, worker, channel, meter)
        return
    leader = LockstepLeader(own=worker, plan=job.plan, read=_reader(job, worker, meter))

    def end() -> None:
        leader.end()
        leave_servers(job, channel, worker.step)

    with at_end(end):
        train_to_the_end(job, leader, meter)


def _follow(job: Job, worker: WorkerRank, channel: MeteredChannel, meter: RankMeter) -> None:
    """Run a worker that the leader keeps busy, until it is ordered to end or leaves."""
    config, in_lockstep = job.config, not server_leads(job.config)
    shards = WorkerShards(worker, job.make_writer(), meter, in_lockstep)
    shards.answer()
    if not job.task.incarnation:
        resume(job, worker, Source.of(job))
    meter.step = worker.step
    with ExitStack() as stack:
        crew = None
        if config.parallel.threads > 1:
            crew = stack.enter_context(build_world.crew(job.layout, worker, meter))
        link = LeaderLink(
            rank=worker,
            mailbox=worker.messenger.mailbox if crew is None else crew.mailbox,
            reads=_reads(job, worker, meter),
            in_lockstep=in_lockstep,
            stop=job.stop,
            meter=meter,
            shards=shards,
            say=partial(print, flush=True),
            incarnation=job.task.incarnation,
        )

        def leave() -> None:
            if link.has_left:  # servers learn it from the channel, as it may rejoin
                job.report(Event(Kind.LEFT, worker.step, time.time(), {}))
            else:
                leave_servers(job, channel, worker.step)

        with at_end(leave):
            # In lock-step the reader reads the batches of later orders itself.
            ahead = 0 if in_lockstep or worker.worker.tables is None else config.embedding.staleness
            Follower(rank=worker, link=link, meter=meter, ahead=ahead, crew=crew).run()


def _reads(job: Job, worker: WorkerRank, meter: RankMeter) -> Callable[[Order], Iterator[Due]]:
    """Make the function that reads the batches of an order to train."""
    if not server_leads(job.config):
        return partial(read_steps, _reader(job, worker, meter))
    sample = None if worker.worker.tables is None else meter.sample_ids()
    loader = build_model.loader(job.config, job.shards, sample=sample)
    return partial(read_lease, job.clock.timed(Span.READ, loader.part))


def _reader(job: Job, worker: WorkerRank, meter: RankMeter) -> ReadAhead:
    """Make the reader of a worker's batches in lock-step."""
    holds_tables = worker.worker.tables is not None
    (read,) = build_model.readers(
        job.config,
        job.shards,
        (worker.learner.trainer,),
        job.config.embedding.staleness if holds_tables else 0,
        meter.sample_ids() if holds_tables else None,
        meter.clock,
    )
    return read


def run_one_of_many(
    job: Job,
    rendezvous: Rendezvous,
    use: Callable[[WorkerRank, MeteredChannel, RankMeter], None],
) -> None:
    """Run a rank of a world of processes in its role.

    Args:
        job: job of the process.
        rendezvous: rendezvous of the ranks.
        use: a worker's work, called with the worker, its channel and its meter.
    """
    with (
        world_channel(job, rendezvous) as (channel, inner),
        sampled(build_world.address(job.config), build.link_rate(job.config)) as interface,
    ):
        meter = RankMeter(
            lambda counters: setattr(channel, "counters", counters),
            job.clock,
            interface,
            answered=ANSWERED if job.config.parallel.servers else (),
        )
        meter.begin(0)
        role = job.layout.topology.role(job.task.rank)
        with _reporting(job, meter, inner.unknown_peers):
            if isinstance(role, ServerRole):
                leads = job.task.rank == build.leader(job.config)
                (lead if leads else serve_dense)(job, role.index, channel, meter)
                return
            if isinstance(role, TableServerRole):
                serve_tables(job, role.index, channel, meter)
                return
            group = GroupOptions(
                rendezvous=rendezvous,
                lost_peer=inner.lost_peer,
                address=build_world.address(job.config),
                deadline_seconds=job.config.network.patience_seconds,
            )
            with build_world.worker_rank(job.layout, job.prepared, channel, group, meter) as worker:
                use(worker, channel, meter)


@contextmanager
def world_channel(
    job: Job, rendezvous: Rendezvous
) -> Generator[tuple[MeteredChannel, ZmqChannel], None, None]:
    """Open the rank's channel to the world: metered, and the ZeroMQ channel beneath it.

    On failure it leaves without a goodbye; after a signal all stop at the same step.
    """
    network, task = job.config.network, job.task
    options = ZmqOptions(
        address=build_world.address(job.config),
        keys=None if network.keys is None else read_key_file(Path(network.keys)),
        enclosed=network.name == "emulated",
        start_seconds=network.patience_seconds,
        close_seconds=network.patience_seconds,
        silence_seconds=network.patience_seconds,
    )
    inner = open_zmq_channel(
        rendezvous,
        task.rank,
        len(job.names),
        task.attempt,
        options,
        print,
        build_world.membership(job.config, task.rank, task.incarnation),
    )
    try:
        with at_end(inner.close):
            yield MeteredChannel(inner, Counters(), job.clock), inner
    except BaseException:
        inner.abandon()
        raise


def _reporting(
    job: Job, meter: RankMeter, unknown: UnknownPeers | None
) -> AbstractContextManager[None]:
    """Report the process's counters at the end."""

    def tell() -> None:
        strangers = unknown and {
            "foreign_messages": unknown.foreign_messages,
            "refused_connections": unknown.refused_connections,
        }
        values = {"rank": job.task.rank, "role": job.role, **meter.values(), "strangers": strangers}
        job.report(Event(Kind.RANK, meter.step, time.time(), values))

    return at_end(tell)
