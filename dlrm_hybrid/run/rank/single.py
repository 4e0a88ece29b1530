"""What a rank does: read the run's configuration, build its parts, run them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint import reader as checkpoint
from dlrm_hybrid.checkpoint.commit import clean
from dlrm_hybrid.checkpoint.folder import CHECKPOINTS
from dlrm_hybrid.checkpoint.reshard import remembered
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.zmq.strangers import Strangers
from dlrm_hybrid.config.schema import Config, ParallelConfig
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.kernels.jit import unforeseen
from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.parallel.dense.master import copy_into
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.folder import check_checkpoint, write_whole
from dlrm_hybrid.run.rank.facts import (
    changed_arithmetic,
    committer,
    dense_values,
    other_compressors,
    resumed,
)
from dlrm_hybrid.run.request import CONFIG_FILE, EvaluateTask, TrainTask
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event, Kind
from dlrm_hybrid.telemetry.meter import Interval
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.sinks import Call, Fanout, JsonLines, Sink, TensorBoard
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.groups import COMPRESSOR, VERSIONS, checkpoint_groups, piece_groups
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.train.loop import train
from dlrm_hybrid.train.parts import Decision, Parts, Plan, Progress, working
from dlrm_hybrid.train.saver import LocalCheckpointWriter
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import DataError, InterruptedRunError, PreemptedError

Report = Callable[[Event], None]
RANK_NAME = "worker-0"  # of the only process of a run


def train_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Train from the start, or from a checkpoint, to the end."""
    task = TrainTask(**json.loads(argument))
    folder = Path(task.run_folder)
    values: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config = validate(values)
    build_model.prepare_torch(config)
    shards = open_shards(Path(task.prepared), build.semantics(config))
    plan = build_model.plan(config, build_model.loader(config, shards).steps_per_epoch)
    clock = SpanClock()
    engine = build_engine.engine(config, shards, plan.steps, clock)
    meter = RankMeter(engine.count, clock, uncounted=engine.uncounted, versions=engine.versions)
    progress = _resume(task, values, engine, shards, report)
    root = folder / CHECKPOINTS
    clean(root)
    rewind_events(folder / EVENTS_FILE, progress)
    with ExitStack() as stack:
        sink = stack.enter_context(closing(open_sink(folder, config, report, progress.samples)))
        sink.write(started(task, config, shards, plan, progress))
        parts = Parts(
            learn=engine.learn,
            meet=lambda progress, is_late: _meet(progress, plan, engine, stop, is_late),
            evaluate=lambda: engine.evaluate(evaluating(config, shards, report, stop)),
            saver=LocalCheckpointWriter(
                committer=committer(task, config, values, shards, f"{RANK_NAME} (rank 0)"),
                writer=ShardWriter(root=root, rank=RANK_NAME, attempt=task.attempt),
                groups=lambda: piece_groups(full_pieces(engine.tensors())),
            ),
            sink=sink,
            live=report,
            meter=meter,
        )
        meter.begin(progress.step)
        with telling(report, meter, 0, "worker", None):
            progress = train(parts, plan, progress)
        note_late_kernels(config)
        sink.write(Event(Kind.FINISHED, progress.step, time.time(), {}))


def note_late_kernels(config: Config) -> None:
    """Put in the log of this rank which kernels it may have had to compile while others waited."""
    if late := unforeseen(build.kernel_files(config, trains=True)):
        print(f"kernels that are not compiled ahead: {', '.join(late)}", file=sys.stderr)


@contextmanager
def telling(
    report: Report, meter: RankMeter, rank: int, role: str, strangers: Strangers | None
) -> Generator[None, None, None]:
    """Tell at the end what the rank has counted, also where a signal ends it between two steps."""

    def tell() -> None:
        seen = None if strangers is None else strangers.values()
        told = {"rank": rank, "role": role, **meter.values(), "strangers": seen}
        report(Event(Kind.RANK, meter.step, time.time(), told))

    try:
        yield
    except (PreemptedError, InterruptedRunError):
        tell()
        raise
    tell()


def evaluate_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Load a checkpoint, score it, report the scores."""
    task = EvaluateTask(**json.loads(argument))
    folder = Path(task.checkpoint)
    config = validate(task.values)
    build_model.prepare_torch(config)
    shards = open_shards(Path(task.prepared), build.semantics(config))
    if list(task.rows) != shards.manifest.identity:
        raise DataError(f"{task.prepared}: the rows changed after the run started")
    scored = replace(config, parallel=_small_world(config.parallel))
    engine = build_engine.engine(scored, shards, 1, SpanClock())
    groups = checkpoint_groups(engine.tensors())
    needed = {name: groups[name] for name in ("dense", "embeddings")}
    checkpoint.load(folder, needed, checking(report))
    scores = engine.evaluate(evaluating(config, shards, report, stop))
    step = checkpoint_folder.read_facts(folder)["step"]
    report(Event(Kind.EVALUATED, step, time.time(), asdict(scores)))


def _small_world(parallel: ParallelConfig) -> ParallelConfig:
    """One process that scores as the run's world: what travels there is cut and rounded."""
    if parallel.name == "single":
        return parallel
    # Between two trainers rows of tables travel; a third one changes nothing.
    trainers, servers = min(parallel.trainers, 2), min(parallel.servers, 1)
    return replace(parallel, trainers=trainers, servers=servers, world="in_process")


def checking(report: Report) -> Callable[[int, int], None]:
    """Shows a person how far the check of a checkpoint's files is."""
    return working(report, "checkpoint", "bytes")


def evaluating(
    config: Config, shards: Shards, report: Report, stop: StopRequest | None = None
) -> Callable[[int], None]:
    """Shows a person how far an evaluation is.

    Args:
        config: of the run.
        shards: its rows.
        report: gets events.
        stop: the request that ends it; None where somebody else looks after that.
    """
    total = len(shards.test_rows(config.data.test_part))
    tell = working(report, "evaluate", "rows")

    def check(done: int) -> None:
        if stop is not None:
            stop.check()
        tell(done, total)

    return check


def _resume(
    task: TrainTask,
    values: Mapping[str, Any],
    engine: InProcessEngine,
    shards: Shards,
    report: Report,
) -> Progress:
    """Load the checkpoint to go on from, if there is one."""
    if task.resume_from is None:
        return Progress()
    folder = checkpoint_folder.find(Path(task.resume_from))
    facts = check_checkpoint(folder, values, shards, new_run=not task.goes_on)
    groups = checkpoint_groups(engine.tensors())
    compressor, versions = groups.pop(COMPRESSOR, {}), groups.pop(VERSIONS, {})
    checkpoint.load(folder, groups, checking(report))
    copy_into(versions, dense_values(folder, facts["config"], values))
    trainers = other_compressors(folder, facts, values)
    copy_into(compressor, remembered(folder, compressor, trainers))
    progress = resumed(task, facts)
    engine.restart(progress.step)
    return progress


def rewind_events(path: Path, progress: Progress) -> None:
    """Drop the events that will be lived through again."""
    record = events.read(path) if path.exists() else ()
    kept = events.until(record, progress.step, progress.evaluated_step)
    write_whole(path, "".join(f"{event.to_json()}\n" for event in kept))


def open_sink(folder: Path, config: Config, report: Report, first_samples: int) -> Sink:
    """Where the events on record go."""
    sinks: list[Sink] = [JsonLines(folder / EVENTS_FILE), Call(report)]
    if config.telemetry.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", first_samples))
    return Fanout(sinks)


def _meet(
    progress: Progress, plan: Plan, engine: InProcessEngine, stop: StopRequest, is_late: bool
) -> tuple[Progress, Decision]:
    """See `Parts.meet`; nobody else is there."""
    severity = stop.severity
    if severity or is_late or plan.anything_due(progress.step):
        progress = progress.plus(Interval(compression=engine.compression()))
    return progress, Decision(severity, is_late)


def started(
    task: TrainTask, config: Config, shards: Shards, plan: Plan, progress: Progress
) -> Event:
    """The first event of an attempt."""
    measured = build_model.measured_bfloat16(config, shards.table_rows)
    values = {
        "attempt": task.attempt,
        "rank": 0,
        "role": "worker",
        "pid": os.getpid(),
        "steps_total": plan.steps,
        "samples": progress.samples,
        "samples_per_step": plan.samples_per_step,
        "changed_arithmetic": changed_arithmetic(task),
        "bfloat16_speed": None if measured is None else measured.speed,
        "bfloat16_repeats": None if measured is None else measured.repeats,
        "train_rows": len(shards.train_rows),
        "test_rows": len(shards.test_rows(config.data.test_part)),
    }
    return Event(Kind.STARTED, progress.step, time.time(), values)
