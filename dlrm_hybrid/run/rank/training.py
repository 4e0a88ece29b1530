"""Training in one process of a run: resume, train to the end, and record events meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.commit import clean
from dlrm_hybrid.checkpoint.reader import open_checkpoint, remembered
from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.folder import write_whole
from dlrm_hybrid.run.rank.evaluate import checking, evaluating
from dlrm_hybrid.run.rank.facts import (
    changed_arithmetic,
    committer,
    dense_values,
    lookups_ahead,
    other_compressors,
    resumed,
    row_levels,
)
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event, Kind
from dlrm_hybrid.telemetry.rank_meter import Interval, RankMeter
from dlrm_hybrid.telemetry.sinks import Call, Fanout, JsonLines, Sink, TensorBoard
from dlrm_hybrid.telemetry.trackers import open_trackers
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.asynchronous.leader import LeaderRank
from dlrm_hybrid.train.asynchronous.roll import Roll
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.train.loop import Parts, train
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.saver import COMPRESSOR, FLIGHT, CheckpointWriter, piece_groups
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank

Trainer = InProcessEngine | WorkerRank | LeaderRank
"""The engine of a training process: all ranks of a world, one worker, or the leading server."""


def train_to_the_end(
    job: Job, trainer: Trainer, meter: RankMeter, report: Report, stop: StopRequest
) -> None:
    """Train to the end; only the leader records events and shows progress."""
    live = report if trainer.leads else say_nothing
    progress = resume(job, trainer, live)
    meter.step = progress.step
    if not isinstance(trainer, LeaderRank):
        trainer.lowered[:] = progress.course.lowered
    sink: Sink = Fanout([])
    if trainer.leads:
        clean(job.checkpoints)
        sink = _open_sink(job, report, progress)
    with closing(sink):
        if trainer.leads:
            sink.write(_started(job, progress))
        topology = job.layout.topology
        roll = (
            trainer.roll
            if isinstance(trainer, LeaderRank)
            else Roll(topology.trainers, topology.stages)
        )
        rows = job.shards.scored_rows(job.config.data.test_part)
        parts = Parts(
            make_step=trainer.make_step,
            meet=lambda progress, is_late: trainer.meet(progress, job.plan, stop, is_late),
            evaluate=lambda part: trainer.evaluate(part, stop, evaluating(len(rows[part]), live)),
            agree=trainer.agree if isinstance(trainer, WorkerRank) else _alone,
            schedule=trainer.schedule,
            saver=checkpoint_writer(job, trainer, roll),
            sink=sink,
            live=live,
            meter=meter,
            lower=say_nothing if isinstance(trainer, LeaderRank) else trainer.lower,
            drain=None if isinstance(trainer, LeaderRank) or not _is_stale(job) else trainer.drain,
        )
        progress = train(parts, job.plan, progress)
        # Of this attempt only: a restarted one begins from a checkpoint with all trainers.
        lost = {}
        if isinstance(trainer, LeaderRank):
            lost = {
                "lost_trainers": roll.lost,
                "left_trainers": roll.left,
                "redone_batches": roll.redone,
            }
        sink.write(Event(Kind.FINISHED, progress.step, time.time(), lost))


def _alone(step: int, is_best: bool) -> bool:
    """Decide alone, in a process that has all scores."""
    return is_best


def checkpoint_writer(job: Job, trainer: Trainer, roll: Roll) -> CheckpointWriter:
    """Make the writer of the run's checkpoints, in a process that trains.

    Args:
        job: that of this process.
        trainer: what the process trains with.
        roll: attendance of the trainers.
    """
    task = job.task
    title = f"{job.names[task.rank]} (rank {task.rank})"
    return CheckpointWriter(
        messenger=trainer.messenger,
        leader=trainer.leader,
        names=job.names,
        asked=_asked(job, trainer),
        settled=trainer.settled,
        committer=committer(task, job.config, job.values, job.rows.shards, title),
        writer=job.writer,
        groups=lambda: piece_groups(trainer.pieces()),
        away=roll.away_workers,
        losses=roll.losses,
        pushed=_pushed(job, trainer),
    )


def _asked(job: Job, trainer: Trainer) -> Sequence[int]:
    """The ranks that copy their tensors for a checkpoint on request."""
    if isinstance(trainer, LeaderRank):
        return [rank for rank in job.names if rank != trainer.leader]
    return job.layout.topology.all_servers if len(job.names) > 1 else ()


def _is_stale(job: Job) -> bool:
    """Whether steps leave batches in flight."""
    return build.pipeline(job.config).most_in_flight > 0


def _pushed(job: Job, trainer: Trainer) -> Callable[[], Sequence[int]] | None:
    """Pushes per stage so far, if stages differ, else None."""
    if not isinstance(trainer, WorkerRank) or not _is_stale(job):
        return None
    pipeline, stages = build.pipeline(job.config), range(job.layout.topology.stages)
    return lambda: [pipeline.pushed(stage, trainer.step, trainer.emptied) for stage in stages]


def say_nothing(event: object) -> None:
    """Do nothing: only the leader shows progress, and a leading server lowers no rates."""


def resume(job: Job, trainer: Trainer, live: Report) -> Progress:
    """Resume from the checkpoint of the task, if it names one."""
    if job.task.resume_from is None:
        return Progress()
    folder = checkpoint_folder.find(Path(job.task.resume_from))
    facts = job.facts(folder)
    progress = resumed(job.task, facts, job.values)
    if not server_leads(job.config) or len(progress.batches) != job.config.parallel.trainers:
        progress = replace(progress, batches=())  # all have done the same number
    saved = open_checkpoint(folder, checking(live))
    held = piece_groups(trainer.pieces())
    dense = dense_values(saved, facts["config"], job.values)
    compressors = {piece.name: piece.view for piece in held.get(COMPRESSOR, [])}
    trainers = other_compressors(folder, facts, job.values)
    tables = len(job.layout.spec.table_rows)
    ahead = lookups_ahead(saved, facts, job.config, job.values, trainer.looking_up, tables)
    names = [piece.name for piece in held.get("embeddings", [])]
    levels = row_levels(saved, facts, job.values, trainer.looking_up, names)
    kept = remembered(saved, compressors, trainers)
    was_elastic = facts["config"]["parallel"].get("elastic", False)
    if job.config.parallel.elastic or was_elastic:  # trainers that were away have none
        kept = {**compressors, **kept}
    flying = saved.tensors(saved.names(FLIGHT)) if progress.emptied < progress.step else {}
    statistics.resume(saved, held.get(statistics.GROUP, []), job.config.parallel.trainers)
    saved.fill(held.get("embeddings", []))  # before batches in flight look up rows to update
    trainer.restart(progress, {**dense, **kept, **ahead, **levels, **flying})
    # The sums of all workers are counted once.
    return progress if trainer.leads else replace(progress, interval=Interval())


def _open_sink(job: Job, report: Report, progress: Progress) -> Sink:
    """Open the sinks of recorded events, without the events that will be repeated."""
    folder = Path(job.task.run_folder)
    path = folder / EVENTS_FILE
    record = events.read(path) if path.exists() else ()
    kept = events.until(record, progress.step, progress.evaluated_step, progress.tested_step)
    write_whole(path, "".join(f"{event.to_json()}\n" for event in kept))
    sinks: list[Sink] = [JsonLines(path), Call(report)]
    if job.config.telemetry.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", progress.samples))
    name, chosen = job.config.name, job.config.telemetry.trackers
    sinks += open_trackers(folder, chosen, flat(job.values), name, _log)
    return Fanout(sinks)


def _log(text: str) -> None:
    print(text, flush=True)


def _started(job: Job, progress: Progress) -> Event:
    config, shards = job.config, job.shards
    measured = build_model.measured_bfloat16(config, shards.table_rows)
    scored = shards.scored_rows(config.data.test_part)
    values = {
        "attempt": job.task.attempt,
        "rank": job.task.rank,
        "role": job.role,
        "pid": os.getpid(),
        "steps_total": job.plan.steps,
        "samples": progress.samples,
        "batches": progress.batches,
        "samples_per_step": job.plan.samples_per_step,
        "changed_arithmetic": changed_arithmetic(job.task),
        "bfloat16_speed": None if measured is None else measured.speed,
        "bfloat16_repeats": None if measured is None else measured.repeats,
        "train_rows": len(shards.train_rows),
        **{f"{part}_rows": len(rows) for part, rows in scored.items()},
    }
    return Event(Kind.STARTED, progress.step, time.time(), values)
