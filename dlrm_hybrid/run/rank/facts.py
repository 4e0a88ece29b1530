"""Facts of checkpoints beside their tensors, and what a resumed run takes from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.folder import CHECKPOINTS, SCORE
from dlrm_hybrid.checkpoint.reader import Checkpoint
from dlrm_hybrid.compress.embedding.trainer import LEVELS_PREFIX
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
from dlrm_hybrid.parallel.dense.published import SUFFIX, fresh_thresholds
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.machine import cpu_model, version_of
from dlrm_hybrid.train.patience import Course
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.saver import LEVELS, LOOKUPS, Committer
from dlrm_hybrid.types import DataError

# What MKL and oneDNN choose themselves cannot be read; the processor stands for it.
VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
PACKAGES = ("torch", "fbgemm-gpu", "numba")


def arithmetic() -> dict[str, str]:
    """Settings that decide this process's arithmetic, by name; without unset variables."""
    return {
        "threads": str(torch.get_num_threads()),
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "processor": cpu_model(),
        **{package: one for package in PACKAGES if (one := version_of(package))},
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
        **({"GPU": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}),
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Differences in arithmetic, each as `name before → now`; none if nothing was recorded."""
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
    """Collect the facts of a checkpoint beside its tensors; none of rows without `shards`."""
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
    """Make the committer of a run's checkpoints, in the rank with this title."""
    return Committer(
        root=Path(task.run_folder) / CHECKPOINTS,
        attempt=task.attempt,
        retention=build.retention(config),
        title=title,
        facts=lambda progress: checkpoint_facts(progress, values, shards),
    )


def changed_arithmetic(job: Job) -> list[str]:
    """Differences of this machine's arithmetic from that of the checkpoint whose steps go on."""
    if job.task.resume_from is None:
        return []
    facts = checkpoint_folder.read_facts(checkpoint_folder.find(Path(job.task.resume_from)))
    return [] if job.begins_anew(facts) else changes(facts.get("arithmetic", {}), arithmetic())


def resumed(task: TrainTask, facts: Mapping[str, Any], values: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint; without evaluations if a new run starts from it.

    Args:
        task: that of the rank.
        facts: those of the checkpoint.
        values: configuration of this run.

    Raises:
        DataError: the progress is missing or impossible.
    """
    source = Path(task.resume_from or "")
    progress = Progress.from_facts(facts["progress"], source)
    counts = (progress.samples, *astuple(progress.loader))
    can_be = 0 <= progress.emptied <= progress.step and all(0 <= one < 2**63 for one in counts)
    if progress.step != facts["step"] or not can_be:
        raise DataError(
            f"{source}: progress = {facts['progress']}: is none of step {facts['step']}"
        )
    if not in_flight(facts):  # nothing is in flight; other schedules do not count it
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
    """Number of trainers of a checkpoint with other compressors than this run's, else None.

    Logs the difference.
    """
    if same_compressors(facts["config"], values):
        return None
    parallel: Any = facts["config"].get("parallel")
    known = cast("dict[str, Any]", parallel) if isinstance(parallel, dict) else {}
    trainers = known.get("trainers", 1) if known else None
    if not isinstance(trainers, int) or not 0 < trainers < 2**16:
        raise DataError(f"{folder}: config.parallel.trainers = {trainers!r}: is no number of them")
    now = values["parallel"].get("trainers", 1)
    print(
        f"{folder}: saved with other compression settings; each of parallel.trainers = "
        f"{now} starts with the mean residual of {trainers}, where it "
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
    anew: bool = False,
) -> dict[str, Tensor]:
    """Rows that trainers had looked up ahead, named as by `Tables.state_ahead`.

    Empty if the keys that decide how far ahead have changed, which it logs: they are then looked
    up again; and if the batches to come are others. At step 0 there are none yet. If trainers come
    to rest for a checkpoint there are only those of a cache.

    Args:
        checkpoint: the one to resume from.
        facts: those of the checkpoint.
        config: that of this run.
        values: the same, as plain values.
        trainers: those that look up in this process.
        num_tables: number in the model.
        anew: whether the run has other rows than the checkpoint.

    Raises:
        DataError: the checkpoint lacks them.
    """
    saved = facts["config"]
    rests, keeps = server_leads(config), config.embedding.cache_rows > 0
    if not trainers or not facts["step"]:
        return {}
    if anew or not same_lookups(saved, values):
        others = "rows" if anew else "parallel.trainers, parallel.elastic, sync or embedding"
        if saved["embedding"].get("staleness") and not rests and not anew:
            print(
                f"{checkpoint.folder}: saved with other {others}; rows that were looked up ahead "
                "are looked up again, with all updates"
            )
        if saved["embedding"].get("cache_rows"):
            print(
                f"{checkpoint.folder}: saved with other {others}; caches begin empty, and the "
                "gradients they held are lost"
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
    anew: bool = False,
) -> dict[str, Tensor]:
    """State of rows sent as levels, as far as it fits this run.

    If rows or the keys that decide it have changed, which it logs, all rows are sent anew, and
    residuals are lost: less than half a step of each gradient.

    Args:
        checkpoint: the one to resume from.
        facts: those of the checkpoint.
        values: configuration of this run.
        trainers: those that look up in this process.
        tables: those held by this process, named as pieces of a checkpoint.
        anew: whether the run has other rows than the checkpoint.
    """
    names = checkpoint.names(LEVELS)
    if not names or not trainers:
        return {}
    if anew or not same_levels(facts["config"], values):
        others = "rows" if anew else "trainers or options of embedding.levels"
        print(
            f"{checkpoint.folder}: saved with other {others}; "
            "residuals of row gradients are dropped, and rows are sent anew"
        )
        return {}
    own = tuple(f"{LEVELS_PREFIX}{trainer}." for trainer in trainers)
    held = {int(name.split(".")[1]) - 1 for name in tables}
    # A holder of tables also needs state about other trainers.
    of_others = (".steps", *(f".{one}.{what}" for one in held for what in ("slots", "copies")))
    return checkpoint.tensors(
        one for one in names if one.startswith(own) or one.endswith(of_others)
    )


def _caches(checkpoint: Checkpoint, trainers: Sequence[int], may_lack: bool) -> dict[str, Tensor]:
    """Rows that trainers cached, and the sums of gradients they held."""
    names = checkpoint.names(LOOKUPS)
    for trainer in trainers:
        if f"{LOOKUPS_PREFIX}{trainer}.kept" not in names and not may_lack:
            raise DataError(f"{checkpoint.folder}: no rows that trainer {trainer} has kept")
    own = tuple(f"{LOOKUPS_PREFIX}{trainer}." for trainer in trainers)
    return checkpoint.tensors(name for name in names if name.startswith(own))


def check_record(record: Path, values: Mapping[str, Any]) -> None:
    """Raise DataError unless a recorded run trains as this one does."""
    try:
        saved = own_values(record / CONFIG_FILE, read_object(record, CONFIG_FILE))
    except DataError as error:
        raise DataError(f"sync.replay: {error}") from None
    played = with_value(saved, "sync.replay", values["sync"]["replay"])
    if lines := differences(played, values, new_run=False):
        changed = "\n  ".join(line.replace("the checkpoint", "the record") for line in lines)
        raise DataError(f"sync.replay: {record} is the record of another run\n  {changed}")


def dense_values(
    checkpoint: Checkpoint, saved: Mapping[str, Any], now: Mapping[str, Any], anew: bool
) -> dict[str, Tensor]:
    """Weights, their optimizers' state, and the versions that workers hold, by name.

    If the keys that decide the versions have changed, or steps are counted anew, all versions start
    as the weights.

    Args:
        checkpoint: the one to resume from.
        saved: configuration it was made with.
        now: configuration of this run.
        anew: whether steps are counted from 0.
    """
    if not anew and same_versions(saved, now):
        return checkpoint.tensors(checkpoint.names("dense", "versions"))
    weights = checkpoint.tensors(checkpoint.names("dense"))
    ends = [f".behind{number}" for number in range(1, now["sync"].get("staleness", 0) + 1)]
    precision, sparsity = now["pull"]["precision"], now["pull"]["sparsity"] or None
    if precision != "float32" or sparsity is not None:
        ends.append(SUFFIX)
    versions = {f"{name}{end}": weight for name, weight in weights.items() for end in ends}
    thresholds = {} if sparsity is None else fresh_thresholds(weights, sparsity)
    return weights | versions | thresholds
