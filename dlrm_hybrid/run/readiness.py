"""Readiness: whether a run can begin, and what may slow it, checked before anything is written.

Free of torch: faults are reported at once, and no run folder remains.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.config.schema import Config, Model, OwnModelConfig
from dlrm_hybrid.data.arrays import first_label
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.spec import Partition
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.run.folder import begun_anew, check_checkpoint, has_rows
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.telemetry.trackers import require
from dlrm_hybrid.types import ConfigError, ResourceError

FLOAT_BYTES = 4
BLOCK_ROWS = 1 << 16  # looked at together for labels that are all the same
BUSY_SHARE = 0.25  # of the cores; above it threads wait for others at every product


@contextmanager
def no_empty_folder(folder: Path) -> Generator[None, None, None]:
    """Make a run folder; folders of its path made here are removed after the `with` if empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def ready_rows(request: Request, resume_from: Path | None, display: Display) -> Path:
    """Check that a run can begin; returns its folder of prepared rows.

    Args:
        request: the run.
        resume_from: a run folder or checkpoint to resume from, or None.
        display: for progress.

    Raises:
        ConfigError: there are too few rows for one step.
        DataError: there are no rows, they are damaged, or the checkpoint is of another run.
        ResourceError: the device is not there.
    """
    config = request.config
    is_new = resume_from != request.folder
    if resume_from is not None:  # rows may take minutes: refuse first what needs none
        checkpoint = checkpoint_folder.find(resume_from)
        check_checkpoint(checkpoint, request.values, None, is_new)
    require(config.telemetry.trackers)
    if config.device != "cpu":
        from dlrm_hybrid.model.placement import cuda_devices  # torch takes a second

        cuda_devices(config.device)
    rows = prepared_rows(config, display, Command("train", request.overrides))
    shards = open_shards(rows, build.semantics(config))
    if faults := [*_other_columns(config.model, shards)] or [*_other_widths(config, shards)]:
        raise ConfigError("\n".join(faults))
    if shards.schema.loss_weights and isinstance(config.model, OwnModelConfig):
        # Refuses one without a logit for each label.
        Partition.of(build.shape_of(config, shards.manifest), config.parallel.cuts)
    _require_monitor(config, shards)
    shards.steps_per_epoch(config.train.batch_size, config.parallel.trainers)
    if resume_from is not None:
        checkpoint = checkpoint_folder.find(resume_from)
        facts = check_checkpoint(checkpoint, request.values, shards, is_new)
        # `follow` always has others, and tells of what else has changed.
        same_rows = bool(request.again) or has_rows(facts, shards.manifest)
        if not same_rows:
            display.line(
                f"the rows are others than those of {checkpoint}: its weights and optimizers go "
                "on; steps, rates and best scores begin anew"
            )
        if line := begun_anew(checkpoint, facts, request.values, same_rows=same_rows):
            display.line(line)
    for line in label_remarks(shards):
        display.line(line)
    return rows


def label_remarks(shards: Shards) -> Iterator[str]:
    """A line for each label that is the same in all training rows."""
    schema, rows, sums_L = shards.schema, len(shards.train_rows), 0
    for first in range(0, rows, BLOCK_ROWS):
        label_RL = shards.rows.label_R[first : min(first + BLOCK_ROWS, rows)]
        sums_L = sums_L + label_RL.reshape(-1, len(schema.labels)).sum(0, dtype=np.int64)
        if ((sums_L > 0) & (sums_L < first + len(label_RL))).all():
            return
    for label, ones in zip(schema.labels, np.atleast_1d(sums_L).tolist(), strict=True):
        if ones in (0, rows):
            name, value = label.name or label.column, int(ones > 0)
            yield f"label {name!r} is {value} in all {rows:,} training rows: it cannot be learned"


def _other_columns(model: Model, shards: Shards) -> Iterator[str]:
    """Faults of columns that a model reads and these rows do not have."""
    dense, tables = shards.schema.num_dense, len(shards.schema.categorical)
    takes = "null there takes as many as data.schema has"
    of_rows = f"the rows of {shards.folder} have"
    if isinstance(model, OwnModelConfig):
        if model.dense != dense:
            yield f"model.dense = {model.dense}: {of_rows} {dense or 'no'} dense columns; {takes}"
        if model.tables != tables:
            yield f"model.tables = {model.tables}: {of_rows} {tables} categorical ones; {takes}"
        return
    width = model.bottom[0] if model.bottom else 0
    if width != dense:
        setting = f"model.bottom[0] = {width}" if width else "model.bottom = []"
        advice = takes if dense else "model.bottom=[] is none"
        yield f"{setting}: {of_rows} {dense or 'no'} dense columns; {advice}"
    dims = [one.embedding_dim or model.embedding_dim for one in shards.schema.categorical]
    if model.table_dims is None and {*dims} != {model.embedding_dim}:
        yield f"model.table_dims = null: {of_rows} columns of widths {dims}; name their data.schema"
    elif model.table_dims is not None and len(model.table_dims) != len(shards.table_rows):
        setting = f"model.table_dims: {len(model.table_dims)} widths"
        yield f"{setting}; {of_rows} {len(shards.table_rows)} tables"


def _other_widths(config: Config, shards: Shards) -> Iterator[str]:
    """Vectors that rows should begin with, and that are not as wide."""
    model, schema = config.model, shards.schema
    dims = model.table_dims or (model.embedding_dim,) * len(shards.table_rows)
    tables = schema.table_of_column or range(len(dims))
    for vectors in shards.manifest.vectors:
        column, (_, width) = schema.categorical[vectors.column], vectors.values.shape
        dim = dims[tables[vectors.column]]
        if width != dim:
            key = "embedding_dim" if column.embedding_dim else "model.embedding_dim"
            yield (
                f"data.schema.categorical[{vectors.column}].vectors = {column.vectors}: vectors of "
                f"{width} numbers for rows of {dim} ({key})"
            )


def _require_monitor(config: Config, shards: Shards) -> None:
    """Check that evaluations of these rows give the deciding score.

    Raises:
        ConfigError: all rows, or those of each group, have the same label, and so no AUC.
    """
    part, rows = next(iter(shards.scored_rows(config.data.test_part).items()))
    if config.train.monitor == "log_loss":
        return
    batch = shards.read(rows)
    counts_R = slice(None) if batch.weight_R is None else batch.weight_R > 0
    label_R = first_label(batch.label_R[counts_R])
    clicks = int(np.count_nonzero(label_R))
    if clicks in (0, len(label_R)):
        raise ConfigError(
            f"train.monitor = {config.train.monitor}: of the {len(label_R):,} rows of the {part} "
            f"part of {shards.folder} {clicks:,} are clicks, and AUC needs rows of both labels; "
            "train.monitor=log_loss does not"
        )
    if config.train.monitor != "gauc":
        return
    if batch.group_R is None:
        raise ConfigError(
            f"train.monitor = gauc: {shards.folder} was prepared without a column of groups (group "
            "of data.schema); train.monitor=auc needs none"
        )
    group_R = batch.group_R[counts_R]
    if not np.intersect1d(group_R[label_R == 1], group_R[label_R == 0]).any():
        raise ConfigError(
            f"train.monitor = gauc: no group of {shards.schema.group!r} in the {part} part of "
            f"{shards.folder} has rows of both labels; train.monitor=auc needs none"
        )


def require_memory(config: Config, table_rows: Sequence[int]) -> None:
    """Check that the embedding tables fit into this machine's memory, if all of them are here.

    Args:
        config: configuration of the run.
        table_rows: number in each table.

    Raises:
        ResourceError: they do not fit.
    """
    dim = config.model.embedding_dim
    if config.embedding.storage == "mmap":
        return  # they are on the disk, with space reserved
    dims = config.model.table_dims or (dim,) * len(table_rows)
    needed_bytes = sum(rows * own for rows, own in zip(table_rows, dims, strict=True)) * FLOAT_BYTES
    total_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    if needed_bytes > total_bytes:
        raise ResourceError(
            f"model.embedding_dim = {dim}: embedding tables of {sum(table_rows):,} rows need "
            f"{needed_bytes / 1e9:,.1f} GB, this machine has {total_bytes / 1e9:,.1f} GB of memory "
            "and swap (fewer rows: data.min_count, data.max_ind_range; embedding.storage=mmap)"
        )


def thread_remark(config: Config, cores: int, load: float) -> str | None:
    """A remark on why `threads` will slow this run down; None if it will not.

    Args:
        config: configuration of the run.
        cores: number that this process may use.
        load: mean number of running threads on the machine in the last minute.
    """
    ranks = build.topology(config).size if build.many_processes(config) else 1
    running = ranks * config.threads
    if config.threads == 1 or (running <= cores and load < BUSY_SHARE * cores):
        return None
    each = f"{ranks} ranks of {config.threads} threads" if ranks > 1 else f"{running} threads"
    reason = f"on {cores} cores" if running > cores else f"while others use {load:.1f} of them"
    return (
        f"threads={config.threads}: {each} {reason} wait for each other at every matrix product, "
        "which has slowed training up to 19 times; threads=1 is safe"
    )
