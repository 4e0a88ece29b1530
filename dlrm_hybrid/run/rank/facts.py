"""Facts of checkpoints beside their tensors, and what a resumed run takes from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.folder import SCORE
from dlrm_hybrid.checkpoint.reader import Checkpoint, open_checkpoint
from dlrm_hybrid.compress.embedding.trainer import suffixes_of_copies
from dlrm_hybrid.config.identity import (
    CONFIG_FILE,
    config_hash,
    differences,
    kept_groups,
    with_value,
)
from dlrm_hybrid.config.paths import recorded
from dlrm_hybrid.config.validate import own_values
from dlrm_hybrid.data.preprocessing import read_kept
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.model.tensors import Piece, in_groups
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.parallel.tables.lookups import ahead_of
from dlrm_hybrid.run.folder import check_checkpoint, check_weights, has_rows
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.machine import cpu_model, version_of
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.patience import Course
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.recorder import reporting
from dlrm_hybrid.types import DataError, Group

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


def resumed(task: TrainTask, facts: Mapping[str, Any], kept: Collection[Group]) -> Progress:
    """The progress of a checkpoint; without evaluations if a new run starts from it.

    Args:
        task: task of the rank.
        facts: facts of the checkpoint.
        kept: groups of its tensors that go on.

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
    if Group.FLIGHT not in kept:
        progress = replace(progress, emptied=progress.step)
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
        kept: groups of its tensors that go on.
        begins_anew: whether the run has other rows; steps, rates and scores then begin anew.
        progress: where the run goes on.
    """

    checkpoint: Checkpoint
    facts: Mapping[str, Any]
    kept: frozenset[Group]
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
        kept = kept_groups(facts["config"], job.values, same_rows=not anew)
        progress = Progress() if anew else resumed(job.task, facts, kept)
        job.layout.lowered[:] = progress.course.lowered
        show = reporting(live, "checkpoint", "bytes")
        return cls(
            checkpoint=open_checkpoint(folder, show, fresh=_fresh(job, folder) if anew else None),
            facts=facts,
            kept=kept,
            begins_anew=anew,
            progress=progress,
        )

    def changed_arithmetic(self) -> list[str]:
        """Differences of this machine's arithmetic from that of the steps that go on."""
        if self.begins_anew:
            return []
        return changes(self.facts.get("arithmetic", {}), arithmetic())

    def dense(self) -> dict[str, Tensor]:
        """Weights, their optimizers' state, and the versions that workers hold, by name."""
        groups = self.kept & {Group.DENSE, Group.VERSIONS}
        return self.checkpoint.tensors(self.checkpoint.names(*groups))

    def state(self, trainers: Sequence[int], pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """The state of this process, beside its tables and `dense`, that goes on.

        Args:
            trainers: those that look up in this process.
            pieces: what a checkpoint would hold of this process.
        """
        own = {piece.name for piece in pieces}
        tables = in_groups(pieces, Group.EMBEDDINGS)
        # A holder of tables also needs what it remembers of other trainers.
        ends = suffixes_of_copies({int(piece.name.split(".")[1]) - 1 for piece in tables})
        heads = tuple(f"{LOOKUPS_PREFIX}{trainer}." for trainer in trainers)
        kept = self.kept & {Group.COMPRESSOR, Group.LEVELS}
        names = self.checkpoint.names(*self.kept & {Group.FLIGHT})
        names += [x for x in self.checkpoint.names(*kept) if x in own or x.endswith(ends)]
        kept = self.kept & {Group.LOOKUPS}
        names += [x for x in self.checkpoint.names(*kept) if x.startswith(heads)]
        ends = (name.rpartition(".")[2] for name in names if name.startswith(heads))
        if any(end.isdecimal() or end == "fetched" for end in ends):
            print(f"{self.checkpoint.folder}: of an earlier version; rows are looked up ahead anew")
        return self.checkpoint.tensors(names)

    def of_table_server(
        self, server: int, tables: Collection[int], trainers: int
    ) -> dict[str, Tensor]:
        """The state of trainers that goes on, as far as a table server remembers it.

        Args:
            server: its index.
            tables: numbers of the server's tables in that state.
            trainers: number of trainers.
        """
        kept, ends = self.kept & {Group.LEVELS}, suffixes_of_copies(tables)
        names = [x for x in self.checkpoint.names(*kept) if x.endswith(ends)]
        kept = self.kept & {Group.LOOKUPS} if names else ()
        heads = tuple(ahead_of(trainer, server) for trainer in range(trainers))
        names += [x for x in self.checkpoint.names(*kept) if x.startswith(heads)]
        return self.checkpoint.tensors(names)


def _fresh(job: Job, folder: Path) -> dict[str, Tensor]:
    """Rows, by table, that new categories have taken over: they begin anew."""
    replaced = job.shards.preprocessing.replaced(read_kept(folder))
    by_table = job.shards.schema.by_table(replaced)
    tables = zip(job.layout.spec.table_names, by_table, strict=True)
    return {name: torch.from_numpy(ids_K) for name, ids_K in tables}
