"""What a rank of a world of processes does: a worker or a server, from start to goodbye."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.commit import clean
from dlrm_hybrid.checkpoint.folder import CHECKPOINTS
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.meeting import FolderRendezvous, Meeting, Rendezvous
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.rendezvous import Board
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import read_key_file
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.parallel.dense.server import serve
from dlrm_hybrid.parallel.topology import ServerRole
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import server as build_server
from dlrm_hybrid.run.assembly import worker as build_worker
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.worker import BuiltWorker
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.run.folder import check_checkpoint
from dlrm_hybrid.run.rank import facts as rank_facts
from dlrm_hybrid.run.rank import single as ranks
from dlrm_hybrid.run.request import CONFIG_FILE, TrainTask
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event, Kind
from dlrm_hybrid.telemetry.interface import sampled
from dlrm_hybrid.telemetry.meter import Interval
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.sinks import Fanout, Sink
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.groups import piece_groups
from dlrm_hybrid.train.loop import train
from dlrm_hybrid.train.parts import Parts, Plan, Progress
from dlrm_hybrid.train.saver import WorldCheckpointWriter
from dlrm_hybrid.train.server_rank import ServerRank
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import InterruptedRunError, PreemptedError
from dlrm_hybrid.wire.frame import Frame
from dlrm_hybrid.wire.frame import Kind as FrameKind


@contextmanager
def world_channel(
    task: TrainTask, config: Config, layout: Layout, board: Board, clock: SpanClock
) -> Generator[tuple[MeteredChannel, ZmqChannel], None, None]:
    """The rank's end of the network, and who notices there when a rank goes.

    Leaves without a goodbye if anything fails.
    """
    network = config.network
    options = ZmqOptions(
        address=build_world.address(config),
        keys=None if network.keys is None else read_key_file(Path(network.keys)),
        enclosed=network.name == "emulated",
        start_seconds=network.patience_seconds,
        close_seconds=network.patience_seconds,
        silence_seconds=network.patience_seconds,
    )
    size = layout.topology.size
    inner = open_zmq_channel(board, task.rank, size, task.attempt, options, print)
    try:
        yield MeteredChannel(inner, Counters(), clock), inner
    except (PreemptedError, InterruptedRunError):
        inner.close()  # all stop at the same step
        raise
    except BaseException:
        inner.abandon()
        raise
    inner.close()


# A server may have nothing to do while workers evaluate; the loss of one is noticed otherwise.
IDLE_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What every rank of a run knows."""

    task: TrainTask
    values: Mapping[str, Any]
    config: Config
    shards: Shards
    plan: Plan
    layout: Layout
    channel: MeteredChannel
    meeting: Meeting
    meter: RankMeter


def world_rank(argument: str, report: ranks.Report, stop: StopRequest) -> None:
    """Be the rank that the task names, until the run ends."""
    task = TrainTask(**json.loads(argument))
    text = (Path(task.run_folder) / CONFIG_FILE).read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    rendezvous = FolderRendezvous(Path(task.rendezvous), task.attempt)
    be_rank(task, values, validate(values), rendezvous, report, stop)


def be_rank(
    task: TrainTask,
    values: Mapping[str, Any],
    config: Config,
    rendezvous: Rendezvous,
    report: ranks.Report,
    stop: StopRequest,
) -> None:
    """Be the rank that the task names, until the run ends.

    Args:
        task: which rank, and where its files are.
        values: configuration of the run.
        config: the same, typed; what it says of the network is this machine's own.
        rendezvous: where it meets the others.
        report: gets events.
        stop: stop request of signals.
    """
    build_model.prepare_torch(config)
    shards = open_shards(Path(task.prepared), build.semantics(config))
    plan = build_model.plan(config, build_model.loader(config, shards).steps_per_epoch)
    layout = build_world.layout(config, shards.table_rows, plan.steps, task.attempt)
    clock = SpanClock()
    with (
        world_channel(task, config, layout, rendezvous.board, clock) as (channel, inner),
        sampled(build_world.address(config), build.link_rate(config)) as interface,
    ):
        meter = RankMeter(lambda counters: setattr(channel, "counters", counters), clock, interface)
        meter.begin(0)
        job = _Job(
            task=task,
            values=values,
            config=config,
            shards=shards,
            plan=plan,
            layout=layout,
            channel=channel,
            meeting=rendezvous.meeting(inner),
            meter=meter,
        )
        role = layout.topology.role(task.rank)
        with ranks.telling(report, meter, task.rank, role.name, inner.strangers):
            if isinstance(role, ServerRole):
                _serve(job, role.index)
            else:
                _work(job, report, stop)
        ranks.note_late_kernels(config)


def _checked(job: _Job, folder: Path) -> Mapping[str, Any]:
    """The facts of a checkpoint that the run may resume from."""
    return check_checkpoint(folder, job.values, job.shards, new_run=not job.task.goes_on)


def _serve(job: _Job, index: int) -> None:
    server = build_server.server(job.config, job.layout, index, job.meter.clock)
    job.meter.versions = server.versions
    start = 0
    if job.task.resume_from is not None:
        folder = checkpoint_folder.find(Path(job.task.resume_from))
        facts = _checked(job, folder)
        start = facts["step"]
        for outgoing in server.restart(
            start, rank_facts.dense_values(folder, facts["config"], job.values)
        ):
            job.channel.send(*outgoing)
    answering = ServerRank(
        server=server,
        collect=build_server.collectives(job.config, job.layout, index),
        rank=job.task.rank,
        attempt=job.task.attempt,
        meter=job.meter,
        start=start,
        writer=_writer(job),
    )
    workers = range(job.layout.topology.num_workers)
    handlers = {
        kind: job.meter.clock.timed(Span.APPLY, handle)
        for kind, handle in answering.handlers().items()
    }
    job.meter.step = serve(job.channel, handlers, workers, IDLE_SECONDS)


def _work(job: _Job, report: ranks.Report, stop: StopRequest) -> None:
    task = job.task
    with ExitStack() as stack:
        built = stack.enter_context(
            build_worker.worker_rank(
                job.config, job.layout, job.shards, job.channel, job.meeting, job.meter
            )
        )
        progress = _restart(job, built, report)
        job.meter.step = progress.step
        sink: Sink = Fanout([])
        if built.rank.leads:
            folder = Path(task.run_folder)
            clean(folder / CHECKPOINTS)
            ranks.rewind_events(folder / EVENTS_FILE, progress)
            sink = ranks.open_sink(folder, job.config, report, progress.samples)
            sink.write(ranks.started(task, job.config, job.shards, job.plan, progress))
        stack.enter_context(closing(sink))
        parts = _parts(job, built, sink, report, stop)
        try:
            progress = train(parts, job.plan, progress)
        except (PreemptedError, InterruptedRunError):
            _leave_servers(job, built.rank.step)
            raise
        sink.write(Event(Kind.FINISHED, progress.step, time.time(), {}))
        _leave_servers(job, progress.step)


def _leave_servers(job: _Job, step: int) -> None:
    rank, attempt = job.task.rank, job.task.attempt
    goodbye = Frame(kind=FrameKind.GOODBYE, sender=rank, attempt=attempt, number=step)
    for server in job.layout.topology.server_group:
        job.channel.send(server, goodbye, 0)


def _parts(
    job: _Job, built: BuiltWorker, sink: Sink, report: ranks.Report, stop: StopRequest
) -> Parts:
    """The functions of the loop."""
    worker, topology = built.rank, job.layout.topology
    title = f"{topology.name(job.task.rank)} (rank {job.task.rank})"
    saver = WorldCheckpointWriter(
        messenger=worker.messenger,
        leader=worker.leader,
        names={rank: topology.name(rank) for rank in range(topology.size)},
        servers=topology.server_group,
        settled=worker.client.settled,
        committer=rank_facts.committer(job.task, job.config, job.values, job.shards, title),
        writer=_writer(job),
        groups=lambda: piece_groups(built.pieces()),
    )
    live = report if worker.leads else _say_nothing
    return Parts(
        learn=worker.learn,
        meet=lambda progress, is_late: worker.meet(progress, job.plan, stop, is_late),
        evaluate=lambda: worker.evaluate(stop, ranks.evaluating(job.config, job.shards, live)),
        saver=saver,
        sink=sink,
        live=live,
        meter=job.meter,
    )


def _writer(job: _Job) -> ShardWriter:
    return ShardWriter(
        root=Path(job.task.run_folder) / CHECKPOINTS,
        rank=job.layout.topology.name(job.task.rank),
        attempt=job.task.attempt,
    )


def _say_nothing(event: Event) -> None:
    """Only the leader shows its progress."""


def _restart(job: _Job, built: BuiltWorker, report: ranks.Report) -> Progress:
    """Go on from the checkpoint of the task, if it names one."""
    if job.task.resume_from is None:
        return Progress()
    folder = checkpoint_folder.find(Path(job.task.resume_from))
    facts = _checked(job, folder)
    progress = rank_facts.resumed(job.task, facts)
    dense = rank_facts.dense_values(folder, facts["config"], job.values)
    trainers = rank_facts.other_compressors(folder, facts, job.values)
    tell = ranks.checking(report if built.rank.leads else _say_nothing)
    built.restart(progress.step, dense, folder, trainers, tell)
    # The sums of all workers are counted once.
    return progress if built.rank.leads else replace(progress, interval=Interval())
