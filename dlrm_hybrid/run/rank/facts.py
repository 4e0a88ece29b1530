"""Facts of checkpoints beside their tensors, and what a resumed run takes from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.folder import SCORE
from dlrm_hybrid.checkpoint.reader import Checkpoint, open_checkpoint, remembered
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
from dlrm_hybrid.data.preprocessing import read_kept
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.parallel.dense.published import SUFFIX, fresh_thresholds
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.run.folder import check_checkpoint, check_weights, has_rows
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.machine import cpu_model, version_of
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.patience import Course
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.recorder import reporting
from dlrm_hybrid.train.saver import LEVELS, LOOKUPS
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
        **{package: version for package in PACKAGES if (version := version_of(package))},
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
        **({"GPU": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}),
        **({"TF32": "on"} if torch.backends.cuda.matmul.fp32_precision == "tf32" else {}),
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


def resumed(task: TrainTask, facts: Mapping[str, Any], values: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint; without evaluations if a new run starts from it.

    Args:
        task: task of the rank.
        facts: facts of the checkpoint.
        values: configuration of this run.

    Raises:
        DataError: the progress is missing or impossible.
    """
    source = Path(task.resume_from or "")
    progress = Progress.from_facts(facts["progress"], source)
    counts = (progress.samples, *astuple(progress.loader))
    can_be = 0 <= progress.emptied <= progress.step and all(0 <= count < 2**63 for count in counts)
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The checkpoint that a run resumes from, and what this process takes of it.

    Attributes:
        checkpoint: its tensors.
        facts: the facts beside its tensors.
        config: configuration of this run.
        values: the same, as plain values.
        begins_anew: whether the run takes only what the checkpoint has learned, as it has other
            rows; steps, rates and scores then begin anew.
        progress: where the run goes on.
    """

    checkpoint: Checkpoint
    facts: Mapping[str, Any]
    config: Config
    values: Mapping[str, Any]
    begins_anew: bool = False
    progress: Progress = Progress()

    @classmethod
    def of(cls, job: Job, live: Report = ignore) -> Source | None:
        """Open the checkpoint that the task names, if any; lowers rates as it has them.

        Args:
            job: job of the process.
            live: called while tensors are read.

        Raises:
            DataError: there is none, it is damaged, or the run cannot go on from it.
        """
        if job.task.resume_from is None:
            return None
        folder = checkpoint_folder.find(Path(job.task.resume_from))
        new_run, rows = not job.task.goes_on, job.prepared
        if rows is None:
            facts, anew = check_weights(folder, job.values, new_run), False
        else:
            facts = check_checkpoint(folder, job.values, rows, new_run)
            anew = not has_rows(facts, rows.manifest)
        progress = Progress() if anew else resumed(job.task, facts, job.values)
        job.layout.lowered[:] = progress.course.lowered
        show = reporting(live, "checkpoint", "bytes")
        return cls(
            checkpoint=open_checkpoint(folder, show, fresh=_fresh(job, folder) if anew else None),
            facts=facts,
            config=job.config,
            values=job.values,
            begins_anew=anew,
            progress=progress,
        )

    @property
    def saved(self) -> Mapping[str, Any]:
        """The configuration that the checkpoint was made with."""
        return self.facts["config"]

    def changed_arithmetic(self) -> list[str]:
        """Differences of this machine's arithmetic from that of the steps that go on."""
        if self.begins_anew:
            return []
        return changes(self.facts.get("arithmetic", {}), arithmetic())

    def dense(self) -> dict[str, Tensor]:
        """Weights, their optimizers' state, and the versions that workers hold, by name.

        If the keys that decide the versions have changed, or steps are counted anew, all versions
        start as the weights.
        """
        checkpoint, now = self.checkpoint, self.values
        if not self.begins_anew and same_versions(self.saved, now):
            return checkpoint.tensors(checkpoint.names("dense", "versions"))
        weights = checkpoint.tensors(checkpoint.names("dense"))
        ends = [f".behind{number}" for number in range(1, now["sync"].get("staleness", 0) + 1)]
        precision, sparsity = now["pull"]["precision"], now["pull"]["sparsity"] or None
        if precision != "float32" or sparsity is not None:
            ends.append(SUFFIX)
        versions = {f"{name}{end}": weight for name, weight in weights.items() for end in ends}
        thresholds = {} if sparsity is None else fresh_thresholds(weights, sparsity)
        return weights | versions | thresholds

    def compressors(self, fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State of compressors: the checkpoint's in place of `fresh`, where it fits this run."""
        state = remembered(self.checkpoint, fresh, self._other_trainers())
        if self.config.parallel.elastic or self.saved["parallel"].get("elastic", False):
            return {**fresh, **state}  # trainers that were away have none
        return state

    def _other_trainers(self) -> int | None:
        """Number of trainers of a checkpoint with other compressors than this run's, else None.

        Logs the difference.
        """
        if same_compressors(self.saved, self.values):
            return None
        folder = self.checkpoint.folder
        parallel: Any = self.saved.get("parallel")
        world = cast("dict[str, Any]", parallel) if isinstance(parallel, dict) else {}
        trainers = world.get("trainers", 1) if world else None
        if not isinstance(trainers, int) or not 0 < trainers < 2**16:
            raise DataError(
                f"{folder}: config.parallel.trainers = {trainers!r}: is no number of them"
            )
        print(
            f"{folder}: saved with other compression settings; each of parallel.trainers = "
            f"{self.values['parallel'].get('trainers', 1)} starts with the mean residual of "
            f"{trainers}, where it still fits; thresholds are recomputed"
        )
        return trainers

    def lookups_ahead(self, trainers: Sequence[int], spec: ModelShape) -> dict[str, Tensor]:
        """Rows that trainers had looked up ahead, named as by `Tables.state_ahead`.

        Empty at step 0, and if the batches to come are others; also if the keys that decide how
        far ahead have changed, which it logs: rows are then looked up again. If trainers come to
        rest for a checkpoint there are only the rows of a cache.

        Args:
            trainers: those that look up in this process.
            spec: that of the model.

        Raises:
            DataError: the checkpoint lacks them.
        """
        config, saved, anew = self.config, self.saved, self.begins_anew
        rests, keeps = server_leads(config), config.embedding.cache_rows > 0
        if not trainers or not self.facts["step"]:
            return {}
        if anew or not same_lookups(saved, self.values):
            changed = "rows" if anew else "parallel.trainers, parallel.elastic, sync or embedding"
            text = f"{self.checkpoint.folder}: saved with other {changed}"
            if saved["embedding"].get("staleness") and not rests and not anew:
                print(
                    f"{text}; rows that were looked up ahead are looked up again, with all updates"
                )
            if saved["embedding"].get("cache_rows"):
                print(f"{text}; caches begin empty, and the gradients they held are lost")
            return {}
        if config.embedding.name != "served" or (rests and not keeps):
            return {}
        if keeps:
            was_elastic = bool(saved["parallel"].get("elastic"))
            return self._caches(trainers, may_lack=config.parallel.elastic or was_elastic)
        columns = ColumnBags.of(spec)
        bags = config.train.batch_size * (1 if columns is None else columns.most)
        shape = (bags, len(spec.table_rows), spec.widths.widest)
        rows = {
            f"{LOOKUPS_PREFIX}{trainer}.{ahead}": torch.empty(shape)
            for trainer in trainers
            for ahead in range(config.embedding.staleness)
        }
        self.checkpoint.fill(full_pieces(rows))
        return rows

    def _caches(self, trainers: Sequence[int], may_lack: bool) -> dict[str, Tensor]:
        """Rows that trainers cached, and the sums of gradients they held."""
        names = self.checkpoint.names(LOOKUPS)
        for trainer in trainers:
            if f"{LOOKUPS_PREFIX}{trainer}.kept" not in names and not may_lack:
                raise DataError(
                    f"{self.checkpoint.folder}: no rows that trainer {trainer} has kept"
                )
        prefixes = tuple(f"{LOOKUPS_PREFIX}{trainer}." for trainer in trainers)
        return self.checkpoint.tensors(name for name in names if name.startswith(prefixes))

    def row_levels(self, trainers: Sequence[int], tables: Collection[str]) -> dict[str, Tensor]:
        """State of rows sent as levels, as far as it fits this run.

        If rows or the keys that decide it have changed, which it logs, all rows are sent anew, and
        residuals are lost: less than half a step of each gradient.

        Args:
            trainers: those that look up in this process.
            tables: those held by this process, named as pieces of a checkpoint.
        """
        names = self.checkpoint.names(LEVELS)
        if not names or not trainers:
            return {}
        if self.begins_anew or not same_levels(self.saved, self.values):
            difference = "rows" if self.begins_anew else "trainers or options of embedding.levels"
            print(
                f"{self.checkpoint.folder}: saved with other {difference}; "
                "residuals of row gradients are dropped, and rows are sent anew"
            )
            return {}
        prefixes = tuple(f"{LEVELS_PREFIX}{trainer}." for trainer in trainers)
        parts = {int(name.split(".")[1]) - 1 for name in tables}
        # A holder of tables also needs state about other trainers.
        suffixes = (".steps", *(f".{p}.{what}" for p in parts for what in ("slots", "copies")))
        return self.checkpoint.tensors(
            name for name in names if name.startswith(prefixes) or name.endswith(suffixes)
        )


def _fresh(job: Job, folder: Path) -> dict[str, Tensor]:
    """Rows, by table, that new categories have taken over: they begin anew."""
    replaced = job.shards.preprocessing.replaced(read_kept(folder))
    by_table = job.shards.schema.by_table(replaced)
    tables = zip(job.layout.spec.table_names, by_table, strict=True)
    return {name: torch.from_numpy(ids_K) for name, ids_K in tables}
