"""The process that scores a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.compress.gradient.methods.none import NoCompression
from dlrm_hybrid.config.choices import Hybrid, Parallel, SyncLockstep
from dlrm_hybrid.config.outside import Unloaded, load_chosen
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.tensors import in_groups
from dlrm_hybrid.parallel.schedule import Sequential
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.request import EvaluateTask
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.recorder import reporting
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import DataError, Group

TRAINS: Mapping[str, Any] = MappingProxyType(
    {"gradient": NoCompression(), "schedule": Sequential(), "sync": SyncLockstep()}
)
"""Choices that no score depends on, in place of those from outside, which are data here."""


def evaluate_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Load a checkpoint, score it, and report the scores."""
    task = EvaluateTask(**json.loads(argument))
    folder = Path(task.checkpoint)
    load_chosen(task.values, ["model"])  # typed by the user; a checkpoint's others stay data
    config = validate(task.values)
    build_model.prepare_torch(config)
    shards = open_shards(Path(task.prepared), build.semantics(config))
    if list(task.rows) != shards.manifest.identity:
        raise DataError(f"{task.prepared}: the rows changed after the run started")
    unloaded = {name for name in TRAINS if isinstance(getattr(config, name), Unloaded)}
    config = replace(config, **{name: TRAINS[name] for name in unloaded})
    sync = config.sync.having(replay=None)
    # The checkpoint knows all that it has learned, its newest categories too.
    data = config.data.having(base=None)
    scored = replace(config, parallel=_small_world(config.parallel), sync=sync, data=data)
    storage = build_model.row_storage(config, Path())
    engine = build_engine.engine(scored, shards, 1, storage)
    pieces = engine.pieces()
    checkpoint = open_checkpoint(folder, reporting(report, "checkpoint", "bytes"))
    checkpoint.fill(in_groups(pieces, Group.DENSE, Group.EMBEDDINGS))
    statistics.fill_with_mean(checkpoint, in_groups(pieces, Group.STATISTICS))
    # The part of data.test_part comes last.
    part, _ = shards.scored_rows(config.data.test_part).popitem()
    scores = engine.evaluate(part, stop, reporting(report, "evaluate", "rows"))
    report(Event(Kind.EVALUATED, checkpoint.manifest.step, time.time(), scores.values))


def _small_world(parallel: Parallel) -> Parallel:
    """A one-process world that scores as the run's, with the sparsity and rounding of its wire."""
    if not isinstance(parallel, Hybrid):
        return parallel
    # Two trainers exchange rows of tables; a third one changes nothing.
    trainers, servers = min(parallel.trainers, 2), min(parallel.servers, 1)
    table_servers = min(parallel.table_servers, 1)
    return replace(
        parallel,
        trainers=trainers,
        servers=servers,
        table_servers=table_servers,
        world="in_process",
    )
