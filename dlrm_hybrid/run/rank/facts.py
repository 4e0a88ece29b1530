"""What checkpoints say beside their tensors, and what a run that resumes takes from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.folder import CHECKPOINTS, SCORE
from dlrm_hybrid.checkpoint.reader import Checkpoint
from dlrm_hybrid.compress.embedding.state import LEVELS_PREFIX
from dlrm_hybrid.config.identity import (
    CONFIG_FILE,
    STALE_SCHEDULE,
    config_hash,
    differences,
    in_flight,
    same_compressors,
    same_levels,
    same_lookups,
    same_versions,
    with_value,
)
from dlrm_hybrid.config.paths import recorded
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import own_values
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.parallel.dense.mirror import SUFFIX, fresh_thresholds
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.machine import cpu_model
from dlrm_hybrid.train.patience import Course
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.saver import LEVELS, LOOKUPS, Committer
from dlrm_hybrid.types import DataError

# What MKL and oneDNN choose by themselves cannot be read; the processor stands for it.
VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
PACKAGES = ("torch", "fbgemm-gpu", "numba")


def arithmetic() -> dict[str, str]:
    """Of this process, by name; a variable that is not set is missing."""
    return {
        "threads": str(torch.get_num_threads()),
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "processor": cpu_model(),
        **{package: version(package) for package in PACKAGES},
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is no more as it was, each as `name before → now`; none where nothing was recorded."""
    if not before:
        return []
    return [
        f"{name} {before.get(name, 'not set')} → {now.get(name, 'not set')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def checkpoint_facts(
    progress: Progress, values: Mapping[str, Any], shards: Shards | None
) -> dict[str, Any]:
    """What a checkpoint says beside its tensors; of rows that a program hands over nothing."""
    rows = None if shards is None else shards.manifest
    values = values if shards is None else recorded(values, shards.folder)
    return {
        "progress": asdict(progress),
        "config": dict(values),
        "config_hash": config_hash(values),
        "rows": [] if rows is None else rows.identity,
        "arithmetic": arithmetic(),
        "vocabulary": {} if rows is None else rows.meaning,
        SCORE: asdict(progress)[SCORE] if progress.evaluated_step == progress.step else None,
    }


def committer(
    task: TrainTask, config: Config, values: Mapping[str, Any], shards: Shards | None, title: str
) -> Committer:
    """What makes the checkpoints of a run valid, in the rank with this title."""
    return Committer(
        root=Path(task.run_folder) / CHECKPOINTS,
        attempt=task.attempt,
        retention=build.retention(config),
        title=title,
        facts=lambda progress: checkpoint_facts(progress, values, shards),
    )


def changed_arithmetic(task: TrainTask) -> list[str]:
    """How this machine's arithmetic differs from that behind the checkpoint to resume from."""
    if task.resume_from is None:
        return []
    facts = checkpoint_folder.read_facts(checkpoint_folder.find(Path(task.resume_from)))
    return changes(facts.get("arithmetic", {}), arithmetic())


def resumed(task: TrainTask, facts: Mapping[str, Any], values: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint; a new run that starts from it has evaluated nothing yet.

    Args:
        task: of the rank.
        facts: of the checkpoint.
        values: the configuration of this run.

    Raises:
        DataError: it does not say so, or what it says cannot be.
    """
    source = Path(task.resume_from or "")
    progress = Progress.from_facts(facts["progress"], source)
    counts = (progress.samples, *astuple(progress.loader))
    can_be = 0 <= progress.emptied <= progress.step and all(0 <= one < 2**63 for one in counts)
    if progress.step != facts["step"] or not can_be:
        raise DataError(
            f"{source}: progress = {facts['progress']}: is none of step {facts['step']}"
        )
    if not in_flight(facts):  # of what is there nothing is; other schedules do not count it
        now = values["schedule"]["name"]
        progress = replace(progress, emptied=progress.step if now == STALE_SCHEDULE else 0)
    if task.goes_on:
        return progress
    return replace(
        progress, evaluated_step=-1, tested_step=-1, score=None, best=None, course=Course()
    )


def other_compressors(
    folder: Path, facts: Mapping[str, Any], values: Mapping[str, Any]
) -> int | None:
    """How many trainers saved a checkpoint whose compressors are not this run's; None if they are.

    Says so in the log.
    """
    if same_compressors(facts["config"], values):
        return None
    parallel: Any = facts["config"].get("parallel")
    known = cast("dict[str, Any]", parallel) if isinstance(parallel, dict) else {}
    trainers = known.get("trainers")
    if not isinstance(trainers, int) or not 0 < trainers < 2**16:
        raise DataError(f"{folder}: config.parallel.trainers = {trainers!r}: is no number of them")
    print(
        f"{folder}: saved with other compression settings; each of parallel.trainers = "
        f"{values['parallel']['trainers']} starts with the mean residual of {trainers}, where it "
        "still fits; thresholds are recomputed"
    )
    return trainers


def lookups_ahead(
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    config: Config,
    values: Mapping[str, Any],
    trainers: Sequence[int],
    num_tables: int,
) -> dict[str, Tensor]:
    """Rows that trainers had looked up before their batches, as `Tables.state_ahead` names them.

    None where other keys say how far ahead that is, which it says in the log: they are then looked
    up again. At step 0 there are none yet. Where trainers come to rest for a checkpoint there are
    only those of a cache.

    Args:
        checkpoint: to go on from.
        facts: of it.
        config: of this run.
        values: the same, as plain values.
        trainers: that look up in this process.
        num_tables: of the model.

    Raises:
        DataError: the checkpoint does not hold them.
    """
    saved = facts["config"]
    rests, keeps = server_leads(config), config.embedding.cache_rows > 0
    if not trainers or not facts["step"]:
        return {}
    if not same_lookups(saved, values):
        if saved["embedding"].get("staleness") and not rests:
            print(
                f"{checkpoint.folder}: saved with other parallel.trainers, parallel.elastic, sync "
                "or embedding; rows that were looked up ahead are looked up again, with all updates"
            )
        if saved["embedding"].get("cache_rows"):
            print(
                f"{checkpoint.folder}: saved with other parallel.trainers, parallel.elastic, sync "
                "or embedding; caches begin empty, and the gradients they held are lost"
            )
        return {}
    if config.embedding.name != "served" or (rests and not keeps):
        return {}
    if keeps:
        was_elastic = bool(saved["parallel"].get("elastic"))
        return _caches(checkpoint, trainers, may_lack=config.parallel.elastic or was_elastic)
    shape = (config.train.batch_size, num_tables, config.model.embedding_dim)
    rows = {
        f"{LOOKUPS_PREFIX}{trainer}.{ahead}": torch.empty(shape)
        for trainer in trainers
        for ahead in range(config.embedding.staleness)
    }
    checkpoint.fill(full_pieces(rows))
    return rows


def row_levels(
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    values: Mapping[str, Any],
    trainers: Sequence[int],
    tables: Collection[str],
) -> dict[str, Tensor]:
    """What ends remembered of rows that were sent as levels, as far as it fits.

    Where other keys say otherwise all rows are sent anew, which it says in the log: residuals are
    lost, less than half a step of each gradient.

    Args:
        checkpoint: to go on from.
        facts: of it.
        values: the configuration of this run.
        trainers: that look up in this process.
        tables: that this process holds, as pieces of a checkpoint are named.
    """
    names = checkpoint.names(LEVELS)
    if not names or not trainers:
        return {}
    if not same_levels(facts["config"], values):
        print(
            f"{checkpoint.folder}: saved with other trainers or options of embedding.levels; "
            "residuals of row gradients are dropped, and rows are sent anew"
        )
        return {}
    own = tuple(f"{LEVELS_PREFIX}{trainer}." for trainer in trainers)
    held = {int(name.split(".")[1]) - 1 for name in tables}
    # What a holder of tables knows of other trainers.
    of_others = (".steps", *(f".{one}.{what}" for one in held for what in ("slots", "copies")))
    return checkpoint.tensors(
        one for one in names if one.startswith(own) or one.endswith(of_others)
    )


def _caches(checkpoint: Checkpoint, trainers: Sequence[int], may_lack: bool) -> dict[str, Tensor]:
    """What trainers kept of rows, and what they held of their gradients."""
    names = checkpoint.names(LOOKUPS)
    for trainer in trainers:
        if f"{LOOKUPS_PREFIX}{trainer}.kept" not in names and not may_lack:
            raise DataError(f"{checkpoint.folder}: no rows that trainer {trainer} has kept")
    own = tuple(f"{LOOKUPS_PREFIX}{trainer}." for trainer in trainers)
    return checkpoint.tensors(name for name in names if name.startswith(own))


def check_record(record: Path, values: Mapping[str, Any]) -> None:
    """Raise DataError unless a recorded run learns what this one does."""
    try:
        saved = own_values(record / CONFIG_FILE, read_object(record, CONFIG_FILE))
    except DataError as error:
        raise DataError(f"sync.replay: {error}") from None
    played = with_value(saved, "sync.replay", values["sync"]["replay"])
    if lines := differences(played, values, new_run=False):
        changed = "\n  ".join(line.replace("the checkpoint", "the record") for line in lines)
        raise DataError(f"sync.replay: {record} is the record of another run\n  {changed}")


def dense_values(
    checkpoint: Checkpoint, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Weights, what optimizers remember of them, and the versions that workers have, by name.

    Where other keys say which versions there are, all of them begin anew, as the weights.

    Args:
        checkpoint: to go on from.
        saved: the values it was made with.
        now: the values of this run.
    """
    if same_versions(saved, now):
        return checkpoint.tensors(checkpoint.names("dense", "versions"))
    weights = checkpoint.tensors(checkpoint.names("dense"))
    ends = [f".behind{number}" for number in range(1, now["sync"]["staleness"] + 1)]
    precision, sparsity = now["pull"]["precision"], now["pull"]["sparsity"] or None
    if precision != "float32" or sparsity is not None:
        ends.append(SUFFIX)
    versions = {f"{name}{end}": weight for name, weight in weights.items() for end in ends}
    thresholds = {} if sparsity is None else fresh_thresholds(weights, sparsity)
    return weights | versions | thresholds
