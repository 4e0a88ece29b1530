"""What a process of a run does, be it one rank of many or all of them: from start to goodbye."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.commit import clean
from dlrm_hybrid.checkpoint.reader import open_checkpoint, remembered
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.process_group import GroupOptions
from dlrm_hybrid.comm.rendezvous import Rendezvous, share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import read_key_file
from dlrm_hybrid.comm.zmq.roster import UnknownPeers
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.kernels.jit import unforeseen
from dlrm_hybrid.parallel.topology import ServerRole, TableServerRole
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import worker as build_worker
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.folder import write_whole
from dlrm_hybrid.run.rank.evaluate import checking, evaluating
from dlrm_hybrid.run.rank.facts import (
    changed_arithmetic,
    committer,
    dense_values,
    lookups_ahead,
    other_compressors,
    resumed,
)
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.serving import leave_servers, serve_dense, serve_tables
from dlrm_hybrid.run.request import CONFIG_FILE, TrainTask
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event, Kind
from dlrm_hybrid.telemetry.interface import sampled
from dlrm_hybrid.telemetry.rank_meter import Interval, RankMeter
from dlrm_hybrid.telemetry.sinks import Call, Fanout, JsonLines, Sink, TensorBoard
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.train.loop import Parts, train
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.saver import COMPRESSOR, CheckpointWriter, piece_groups
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import InterruptedRunError, PreemptedError

Trainer = InProcessEngine | WorkerRank
"""What a process trains with: all ranks of a world, or one of its workers."""


def train_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Be the process of a run that the task names, until the run ends."""
    task = TrainTask(**json.loads(argument))
    text = (Path(task.run_folder) / CONFIG_FILE).read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    folder = Path(task.rendezvous)
    be_rank(task, values, validate(values), lambda: share_folder(folder, stop.check), report, stop)


def be_rank(
    task: TrainTask,
    values: Mapping[str, Any],
    config: Config,
    rendezvous: Callable[[], Rendezvous],
    report: Report,
    stop: StopRequest,
) -> None:
    """Be the process of a run that the task names, until the run ends.

    Args:
        task: which one, and where its files are.
        values: configuration of the run.
        config: the same, typed; what it says of the network is this machine's own.
        rendezvous: opens that with the others, if there are any.
        report: gets events.
        stop: stop request of signals.
    """
    build_model.prepare_torch(config)
    shards = open_shards(Path(task.prepared), build.semantics(config))
    plan = build_model.plan(config, build_model.loader(config, shards).steps_per_epoch)
    job = Job(
        task=task,
        values=values,
        config=config,
        shards=shards,
        plan=plan,
        layout=build_world.layout(config, shards.table_rows, plan.steps, task.attempt),
        clock=SpanClock(),
        names=dict(enumerate(build.rank_names(config))),
        storage=build_model.row_storage(config, Path(task.run_folder)),
    )
    if build.many_processes(config):
        _be_one_of_many(job, rendezvous(), report, stop)
    else:
        engine = build_engine.engine(config, shards, plan.steps, job.storage, job.clock)
        meter = RankMeter(
            engine.count, job.clock, uncounted=engine.uncounted, versions=engine.versions
        )
        meter.begin(0)
        with _telling(job, report, meter, None):
            _train(job, engine, meter, report, stop)
    if late := unforeseen(build.kernel_files(config, trains=True)):
        print(f"kernels that are not compiled ahead: {', '.join(late)}", file=sys.stderr)


def _be_one_of_many(job: Job, rendezvous: Rendezvous, report: Report, stop: StopRequest) -> None:
    with (
        _world_channel(job, rendezvous) as (channel, inner),
        sampled(build_world.address(job.config), build.link_rate(job.config)) as interface,
    ):
        meter = RankMeter(
            lambda counters: setattr(channel, "counters", counters), job.clock, interface
        )
        meter.begin(0)
        role = job.layout.topology.role(job.task.rank)
        with _telling(job, report, meter, inner.unknown_peers):
            if isinstance(role, ServerRole):
                serve_dense(job, role.index, channel, meter)
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
            with (
                build_worker.worker_rank(
                    job.config, job.layout, job.shards, channel, group, meter
                ) as worker,
                _at_end(lambda: leave_servers(job, channel, worker.step)),
            ):
                _train(job, worker, meter, report, stop)


@contextmanager
def _at_end(act: Callable[[], None]) -> Generator[None, None, None]:
    """Do it once what is within is done, also where a signal has ended that between two steps."""
    try:
        yield
    except (PreemptedError, InterruptedRunError):
        act()
        raise
    act()


@contextmanager
def _world_channel(
    job: Job, rendezvous: Rendezvous
) -> Generator[tuple[MeteredChannel, ZmqChannel], None, None]:
    """The rank's end of the network, and who notices there when a rank goes.

    Leaves without a goodbye if anything fails; after a signal all stop at the same step.
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
    inner = open_zmq_channel(rendezvous, task.rank, len(job.names), task.attempt, options, print)
    try:
        with _at_end(inner.close):
            yield MeteredChannel(inner, Counters(), job.clock), inner
    except BaseException:
        inner.abandon()
        raise


def _telling(
    job: Job, report: Report, meter: RankMeter, unknown: UnknownPeers | None
) -> AbstractContextManager[None]:
    """Tell at the end what the process has counted."""
    rank = job.task.rank
    role = job.layout.topology.role(rank).name if len(job.names) > 1 else "worker"

    def tell() -> None:
        seen = unknown and {
            "foreign_messages": unknown.foreign_messages,
            "refused_connections": unknown.refused_connections,
        }
        told = {"rank": rank, "role": role, **meter.values(), "strangers": seen}
        report(Event(Kind.RANK, meter.step, time.time(), told))

    return _at_end(tell)


def _train(job: Job, trainer: Trainer, meter: RankMeter, report: Report, stop: StopRequest) -> None:
    """Train to the end; only the leader records, and shows its progress."""
    live = report if trainer.leads else _say_nothing
    progress = _resume(job, trainer, live)
    meter.step = progress.step
    sink: Sink = Fanout([])
    if trainer.leads:
        clean(job.checkpoints)
        sink = _open_sink(job, report, progress)
    with closing(sink):
        if trainer.leads:
            sink.write(_started(job, progress))
        topology, task = job.layout.topology, job.task
        title = f"{job.names[task.rank]} (rank {task.rank})"
        parts = Parts(
            make_step=trainer.make_step,
            meet=lambda progress, is_late: trainer.meet(progress, job.plan, stop, is_late),
            evaluate=lambda: trainer.evaluate(stop, evaluating(job.config, job.shards, live)),
            schedule=trainer.schedule,
            saver=CheckpointWriter(
                messenger=trainer.messenger,
                leader=trainer.leader,
                names=job.names,
                servers=topology.all_servers if len(job.names) > 1 else (),
                settled=trainer.settled,
                committer=committer(task, job.config, job.values, job.shards, title),
                writer=job.writer,
                groups=lambda: piece_groups(trainer.pieces()),
            ),
            sink=sink,
            live=live,
            meter=meter,
        )
        progress = train(parts, job.plan, progress)
        sink.write(Event(Kind.FINISHED, progress.step, time.time(), {}))


def _say_nothing(event: Event) -> None:
    """Only the leader shows its progress."""


def _resume(job: Job, trainer: Trainer, live: Report) -> Progress:
    """Go on from the checkpoint of the task, if it names one."""
    if job.task.resume_from is None:
        return Progress()
    folder = checkpoint_folder.find(Path(job.task.resume_from))
    facts = job.facts(folder)
    progress = resumed(job.task, facts)
    saved = open_checkpoint(folder, checking(live))
    held = piece_groups(trainer.pieces())
    dense = dense_values(saved, facts["config"], job.values)
    compressors = {piece.name: piece.view for piece in held.get(COMPRESSOR, [])}
    trainers = other_compressors(folder, facts, job.values)
    ahead = lookups_ahead(saved, facts, job.config, job.values, trainer.looking_up)
    trainer.restart(progress.step, {**dense, **remembered(saved, compressors, trainers), **ahead})
    saved.fill(held.get("embeddings", []))
    # The sums of all workers are counted once.
    return progress if trainer.leads else replace(progress, interval=Interval())


def _open_sink(job: Job, report: Report, progress: Progress) -> Sink:
    """Where the events on record go, after those that will be lived through again are dropped."""
    folder = Path(job.task.run_folder)
    path = folder / EVENTS_FILE
    record = events.read(path) if path.exists() else ()
    kept = events.until(record, progress.step, progress.evaluated_step)
    write_whole(path, "".join(f"{event.to_json()}\n" for event in kept))
    sinks: list[Sink] = [JsonLines(path), Call(report)]
    if job.config.telemetry.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", progress.samples))
    return Fanout(sinks)


def _started(job: Job, progress: Progress) -> Event:
    """The first event of an attempt."""
    config, shards = job.config, job.shards
    measured = build_model.measured_bfloat16(config, shards.table_rows)
    values = {
        "attempt": job.task.attempt,
        "rank": 0,
        "role": "worker",
        "pid": os.getpid(),
        "steps_total": job.plan.steps,
        "samples": progress.samples,
        "samples_per_step": job.plan.samples_per_step,
        "changed_arithmetic": changed_arithmetic(job.task),
        "bfloat16_speed": None if measured is None else measured.speed,
        "bfloat16_repeats": None if measured is None else measured.repeats,
        "train_rows": len(shards.train_rows),
        "test_rows": len(shards.test_rows(config.data.test_part)),
    }
    return Event(Kind.STARTED, progress.step, time.time(), values)
