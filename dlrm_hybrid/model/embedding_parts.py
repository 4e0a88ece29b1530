"""What each trainer holds of sharded tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dlrm_hybrid.model.embedding_plan import Shard, torchrec_name
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.pieces import Piece
from dlrm_hybrid.model.spec import ModelSpec


def kernels_of(
    collection: ShardedEmbeddingBagCollection,
) -> list[SplitTableBatchedEmbeddingBagsCodegen | None]:
    """Of every lookup of this trainer, the kernel that holds its tables; None where it has none."""
    kernels: list[SplitTableBatchedEmbeddingBagsCodegen | None] = []
    for lookup in cast(Any, collection)._lookups:
        modules = list(lookup._emb_modules)
        assert len(modules) <= 1, "tables of one width and type share one kernel"
        kernels.append(modules[0].emb_module if modules else None)
    return kernels


def _local_tables(collection: ShardedEmbeddingBagCollection) -> Iterator[tuple[Any, Any]]:
    """Of every kernel of this trainer, TorchRec's description of its tables and itself."""
    for lookup, kernel in zip(cast(Any, collection)._lookups, kernels_of(collection), strict=True):
        if kernel is not None:
            yield lookup._emb_modules[0].config, kernel


def pieces_of(
    collection: ShardedEmbeddingBagCollection,
    shards: Mapping[str, Sequence[Shard]],
    spec: ModelSpec,
    options: EmbeddingOptions,
    trainer: int,
) -> list[Piece]:
    """What a trainer holds of the weights, then of the optimizer states, of sharded tables.

    Args:
        collection: of the trainer.
        shards: of all trainers, by table.
        spec: the tables.
        options: how they learn.
        trainer: its number.
    """
    weights: dict[tuple[Any, ...], Tensor] = {}
    sums: dict[tuple[Any, ...], Tensor] = {}
    for config, kernel in _local_tables(collection):
        views: list[Tensor] = kernel.split_embedding_weights()
        states: list[list[Tensor]] = kernel.split_optimizer_states() or [[]] * len(views)
        for table, view, state in zip(config.embedding_tables, views, states, strict=True):
            corner = (table.name, *table.local_metadata.shard_offsets)
            weights[corner] = view
            sums.update((corner, accumulator) for accumulator in state)
    width = (spec.embedding_dim,)
    kinds: list[tuple[str, dict[tuple[Any, ...], Tensor], tuple[int, ...]]]
    kinds = [("weight", weights, width)]
    if options.optimizer is not EmbeddingOptimizer.SGD:
        by_row = options.optimizer is EmbeddingOptimizer.ROWWISE_ADAGRAD
        kinds.append(("sum", sums, () if by_row else width))
    return [
        Piece(
            name=f"{table}.{kind}",
            shape=(rows, *width),
            begin=(shard.rows[0], shard.columns[0])[: 1 + len(width)],
            view=views_by_corner[torchrec_name(table), shard.rows[0], shard.columns[0]],
        )
        for kind, views_by_corner, width in kinds
        for table, rows in zip(spec.table_names, spec.table_rows, strict=True)
        for shard in shards[table]
        if shard.trainer == trainer
    ]
