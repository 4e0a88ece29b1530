"""From the configuration to the model and what trains it; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from dlrm_hybrid.arrays import Bools
from dlrm_hybrid.compress.activation.codec import ActivationCodec, DenseCodec
from dlrm_hybrid.compress.activation.methods import BoundaryContext, Dct, Dense
from dlrm_hybrid.compress.embedding.ends import RowFormats
from dlrm_hybrid.compress.embedding.memory import LevelOptions
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Loader, ReadAhead
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.layers.keep_largest import KeepLargest
from dlrm_hybrid.model.layers.products import Bfloat16, Precision, measure_bfloat16
from dlrm_hybrid.model.optimizer import LrSchedule, StalenessWarmup
from dlrm_hybrid.model.placement import HOST, Placement, set_matrix_products
from dlrm_hybrid.model.row_storage import IN_MEMORY, InFiles, RowStorage
from dlrm_hybrid.model.spec import ModelShape, Partition, StagePart, microbatch_rows
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.run.assembly.build import base
from dlrm_hybrid.telemetry.histogram import IdSample
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.train.evaluation import EvaluatedRows
from dlrm_hybrid.train.patience import Patience
from dlrm_hybrid.train.progress import Plan
from dlrm_hybrid.types import ScoredPart

LIFESPAN = 1000  # most batches that a step of levels, or a probability table, serves


def prepare_torch(config: Config) -> None:
    """Set `threads` and `tf32` in torch for this process, and keep the memory that steps free."""
    torch.set_num_threads(config.threads)
    set_matrix_products(config.device, tf32=config.tf32)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make the process's allocator keep the memory that a step frees, for the next step.

    glibc returns free memory at the heap's end to the system above a limit of twice the largest
    mapped block freed so far, 32 MiB at most. Without a large one, a step at batch 2048 returns
    20 MB and faults them in again, page by page: a fifth of its time. With other allocators it has
    no effect.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def measured_bfloat16(config: Config, shape: ModelShape) -> Bfloat16 | None:
    """Measure the speed of bfloat16 for this model on this processor; None if it is not asked."""
    if config.precision != Precision.BFLOAT16 or config.device != "cpu":
        return None
    shapes = shape.dense_shapes().values()
    layers = [(x[1], x[0]) for x in shapes if len(x) == 2]
    return measure_bfloat16(layers, config.train.batch_size)


def formats_of(config: Config, shape: ModelShape) -> RowFormats:
    """The formats of table rows on the wire."""
    keys = config.embedding
    levels = LevelOptions(
        row_error=keys.row_error,
        gradient_error=keys.gradient_error,
        copies_rows=keys.copies_rows,
        lifespan=LIFESPAN,
    )
    return row_formats(keys.comm_precision, shape.table_rows, levels if keys.levels else None)


def embeddings(config: Config, shape: ModelShape, placement: Placement = HOST) -> Embeddings:
    """Make all tables in one process, with their initial values."""
    tables = Embeddings(shape, config.embedding, placement)
    draw_embeddings(tables.weights(), config.train.seed, config.embedding.init)
    return tables


def row_storage(config: Config, run_folder: Path) -> RowStorage:
    """The storage of table servers' rows."""
    if config.embedding.storage == "memory":
        return IN_MEMORY
    return InFiles(run_folder if config.embedding.folder is None else Path(config.embedding.folder))


def embedding_schedule(config: Config, steps: int, lowered: Sequence[int] = ()) -> LrSchedule:
    """The learning rate of the tables over a run of `steps`; see `Optimizer.rates`."""
    lr = config.embedding.lr or config.optimizer.lr
    return config.optimizer.rates(lr / pushes_averaged(config), steps, lowered)


def pushes_averaged(config: Config) -> int:
    """The divisor of learning rates where pushes are applied one by one; else 1."""
    parallel = config.parallel
    return parallel.trainers * parallel.threads if config.sync.lr_scale == "trainers" else 1


def dense_schedule(
    config: Config, steps: int, stage: int = -1, lowered: Sequence[int] = ()
) -> LrSchedule:
    """The learning rate of the dense weights over a run of `steps`.

    Args:
        config: configuration of the run.
        steps: number in the whole run.
        stage: number of the stage; reports show the last one.
        lowered: see `Optimizer.rates`.
    """
    keys = config.optimizer
    whole = keys.rates(keys.lr / pushes_averaged(config), steps, lowered)
    if keys.staleness_warmup_steps is None:
        return whole
    return StalenessWarmup(
        schedule=whole, staleness=staleness(config, stage), steps=keys.staleness_warmup_steps
    )


def staleness(config: Config, stage: int) -> int:
    """Number of updates of a stage's weights between computing a gradient and applying it.

    With `sync=async` it is the mean, at any speeds, of others' pushes while one is under way.
    """
    if config.sync.name == "async":
        pushes = config.parallel.trainers * config.parallel.threads * config.sync.in_flight
        return pushes - 1
    pipeline = config.schedule.staleness
    return config.sync.staleness + (pipeline[stage] if pipeline else 0)


def loader(
    config: Config, shards: Shards, trainer: int = 0, sample: IdSample | None = None
) -> Loader:
    """Make the loader of one trainer's training batches; `sample` counts their ids."""
    result = Loader(
        shards,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        shuffle_block_rows=config.data.shuffle_block_rows,
        shuffle_read_rows=config.data.shuffle_read_rows,
        trainer=trainer,
        trainers=config.parallel.trainers,
    )
    if sample is not None:
        result.watch = sample.add
    return result


def readers(
    config: Config,
    shards: Shards | None,
    trainers: Iterable[int],
    ahead: int,
    sample: IdSample | None,
    clock: SpanClock,
) -> list[ReadAhead]:
    """Make the readers of some trainers' batches in training order; none without rows.

    Args:
        config: configuration of the run.
        shards: prepared rows; None if a program hands batches over.
        trainers: their numbers.
        ahead: number of batches read after each.
        sample: counts the ids of batches.
        clock: clock of the process.
    """
    if shards is None:
        return []
    loaders = [loader(config, shards, trainer, sample) for trainer in trainers]
    return [ReadAhead(clock.timed(Span.READ, batches.read), ahead) for batches in loaders]


def evaluated_rows(config: Config, shards: Shards | None) -> dict[ScoredPart, EvaluatedRows]:
    """The rows of each scored part, as evaluations read them; none without rows."""
    if shards is None:
        return {}
    known = _known_rows(config, shards) if shards.schema.is_progressive else None
    return {
        part: EvaluatedRows(shards, rows, config.evaluate.batch_size, known)
        for part, rows in shards.scored_rows(config.data.test_part).items()
    }


def _known_rows(config: Config, shards: Shards) -> list[Bools] | None:
    """Of each column the ids that rows are scored with before they are learned; None for all.

    Categories that came with these rows are unknown until then, if there is an id for such.
    """
    earlier = base(config)
    if earlier is None:
        return None
    is_known = [np.ones(rows, bool) for rows in shards.manifest.table_rows]
    replaced, before = shards.preprocessing.replaced(earlier), earlier.manifest
    for column, shares_id in enumerate(before.out_of_vocabulary):
        if shares_id:
            is_known[column][before.table_rows[column] :] = False
            is_known[column][replaced[column]] = False
    return is_known


def plan(config: Config, shards: Shards) -> Plan:
    """The length of the run and the periods of what it does."""
    train = config.train
    trainers = config.parallel.trainers
    epoch = shards.steps_per_epoch(train.batch_size, trainers)
    steps = train.epochs * epoch
    return Plan(
        steps=min(steps, train.steps or steps),
        samples_per_step=trainers * train.batch_size,
        report_every=config.telemetry.every,
        evaluate_every=epoch if train.evaluate_every == "epoch" else train.evaluate_every,
        checkpoint_every=config.checkpoint.every,
        checkpoint_minutes=config.checkpoint.minutes,
        patience=patience(config),
        parts=tuple(shards.scored_rows(config.data.test_part)),
        scores_first=shards.schema.is_progressive,
        monitor=train.monitor,
        keeps_best=config.checkpoint.keep_best,
    )


def patience(config: Config) -> Patience | None:
    """The rule for scores that no longer improve; None for none."""
    train, optimizer = config.train, config.optimizer
    if train.patience is None and optimizer.schedule != "plateau":
        return None
    return Patience(
        ends_after=train.patience,
        lowers_after=optimizer.plateau_patience if optimizer.schedule == "plateau" else None,
        min_delta=train.min_delta,
    )


def activations(config: Config, part: StagePart) -> dict[int, ActivationCodec]:
    """The codecs of a worker's boundaries, by boundary number."""
    method = config.activation
    if isinstance(method, Dense):
        return _dense(part, method.observe)
    microbatches = config.schedule.microbatches
    contexts = [
        BoundaryContext(
            boundary=boundary,
            sends_gradients=boundary == part.index - 1,
            width=part.input_width,
            rows=microbatch_rows(config.train.batch_size, microbatches),
            microbatches=microbatches,
            seed=config.train.seed,
        )
        for boundary in (part.index - 1, part.index)
        if 0 <= boundary < len(config.parallel.cuts)
    ]
    return {context.boundary: method.build(context) for context in contexts}


def evaluation_activations(config: Config, part: StagePart) -> dict[int, ActivationCodec]:
    """The codecs for evaluations, which send no gradients."""
    if not (config.activation.compresses_activations and config.activation.evaluate_masked):
        return _dense(part, None)
    return activations(config, part)


def evaluation_masks(config: Config, spec: ModelShape, *, rounds: bool) -> dict[str, KeepLargest]:
    """The masks of DCT-MP that evaluations apply, by the layer before; none with other methods.

    Args:
        config: configuration of a run.
        spec: its model.
        rounds: whether to round as on the wire, as evaluations do.
    """
    keys = config.activation
    if not isinstance(keys, Dct) or not keys.evaluate_masked:
        return {}
    partition = Partition.of(spec, config.parallel.cuts)
    masks: dict[str, KeepLargest] = {}
    for boundary, cut in enumerate(partition.cuts):
        k = target_k(partition.stages[boundary].output_width, keys.sparsity_at(boundary))
        bits = keys.bits_at(boundary) if rounds else None
        dtype = getattr(torch, keys.precision) if rounds and bits is None else None
        masks[cut] = KeepLargest(k, dtype, bits)
    return masks


def _dense(part: StagePart, observe: float | None) -> dict[int, ActivationCodec]:
    return {boundary: DenseCodec(observe) for boundary in (part.index - 1, part.index)}
