"""Training in one process of a run: resume, train to the end, and record events meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from dlrm_hybrid.checkpoint.commit import clean
from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.model.tensors import Piece, in_groups
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.folder import write_whole
from dlrm_hybrid.run.rank.facts import Source, checkpoint_facts
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event, Kind
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.sinks import JsonLines, Sink, TensorBoard
from dlrm_hybrid.telemetry.trackers import open_trackers
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.driver import Driver
from dlrm_hybrid.train.engine import Engine, Holder
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.recorder import Recorder
from dlrm_hybrid.train.saver import CheckpointWriter
from dlrm_hybrid.types import Group


def train_to_the_end(job: Job, engine: Engine, meter: RankMeter) -> None:
    """Resume, then train to the end, record events and show progress."""
    source = Source.of(job, job.report)
    progress = resume(job, engine.holder, source)
    changed = [] if source is None else source.changed_arithmetic()
    del source  # with its open files
    meter.step = progress.step
    clean(job.checkpoints)
    with _recording(job, progress) as record:
        record(_started(job, progress, changed))
        recorder = Recorder(
            plan=job.plan, schedule=engine.schedule, meter=meter, record=record, live=job.report
        )
        saver = checkpoint_writer(job, engine.holder)
        driver = Driver(
            engine, job.plan, progress, saver=saver, recorder=recorder, meter=meter, stop=job.stop
        )
        progress = driver.run()
        record(Event(Kind.FINISHED, progress.step, time.time(), engine.departures()))


def checkpoint_writer(job: Job, holder: Holder) -> CheckpointWriter:
    """Make the writer of the run's checkpoints."""
    return CheckpointWriter(
        holder=holder,
        names=job.names,
        writer=job.make_writer(),
        retention=build.retention(job.config),
        facts=lambda progress: checkpoint_facts(progress, job.values, job.prepared),
    )


def resume(job: Job, holder: Holder, source: Source | None) -> Progress:
    """Resume from a checkpoint, if there is one to resume from; returns the progress there."""
    if source is None or source.begins_anew:
        begin_with_vectors(job, holder.pieces())
    if source is None:
        return Progress()
    progress, saved = source.progress, source.checkpoint
    if not server_leads(job.config) or len(progress.batches) != job.config.parallel.trainers:
        progress = replace(progress, batches=())  # all have done the same number
    pieces = holder.pieces()
    values = source.dense() | source.state(holder.looking_up, pieces)
    means = in_groups(pieces, Group.STATISTICS)
    statistics.resume(saved, means, job.config.parallel.trainers)
    saved.fill(in_groups(pieces, Group.EMBEDDINGS))  # before batches in flight look up rows
    holder.restart(progress, values)
    return progress


def begin_with_vectors(job: Job, pieces: Iterable[Piece]) -> None:
    """Begin the rows held in this process with the vectors of their categories, if any have such.

    Args:
        job: job of the process.
        pieces: the pieces that it holds.

    Raises:
        DataError: the vectors beside the prepared rows are damaged.
    """
    held, shards, spec = [*pieces], job.prepared, job.layout.spec
    if shards is None:
        return
    for vectors in shards.manifest.vectors:
        name = f"{spec.table_names[spec.columns[vectors.column]]}.weight"
        found = [piece for piece in held if piece.name == name]
        for ids_K, values_KD in shards.vectors(vectors) if found else ():
            for piece in found:
                rows_K, off_K = divmod(ids_K - piece.begin[0], piece.every)
                here_K = (off_K == 0) & (rows_K >= 0) & (rows_K < len(piece.view))
                columns = slice(piece.begin[1], piece.begin[1] + piece.view.shape[1])
                values = torch.from_numpy(values_KD[here_K, columns]).to(piece.view.device)
                piece.view[torch.from_numpy(rows_K[here_K]).long()] = values


@contextmanager
def _recording(job: Job, progress: Progress) -> Generator[Report, None, None]:
    """Open the sinks of recorded events, without the events that will be repeated."""
    folder = Path(job.task.run_folder)
    path = folder / EVENTS_FILE
    recorded = events.read(path) if path.exists() else ()
    past = events.until(recorded, progress.step, progress.evaluated_step, progress.tested_step)
    write_whole(path, "".join(f"{event.to_json()}\n" for event in past))
    name, chosen = job.config.name, job.config.telemetry.trackers
    sinks: list[Sink] = [JsonLines(path)]

    def record(event: Event) -> None:
        for sink in sinks:
            sink.write(event)
        job.report(event)

    try:
        if job.config.telemetry.tensorboard:
            sinks.append(TensorBoard(folder / "tensorboard", progress.samples))
        for tracker in open_trackers(folder, chosen, flat(job.values), name, _log):
            sinks.append(tracker)  # one by one: those before one that cannot start are closed
        yield record
    finally:
        with ExitStack() as stack:
            for sink in reversed(sinks):  # the first is closed first
                stack.callback(sink.close)


def _log(text: str) -> None:
    print(text, flush=True)


def _started(job: Job, progress: Progress, changed_arithmetic: Sequence[str]) -> Event:
    config, shards = job.config, job.shards
    measured = build_model.measured_bfloat16(config, job.layout.spec)
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
        "changed_arithmetic": changed_arithmetic,
        "bfloat16_speed": None if measured is None else measured.speed,
        "bfloat16_repeats": None if measured is None else measured.repeats,
        "train_rows": len(shards.train_rows),
        **{f"{part}_rows": len(rows) for part, rows in scored.items()},
    }
    return Event(Kind.STARTED, progress.step, time.time(), values)
