"""Whole tables from the parts that trainers hold, and back: one table in memory at a time.

Shapes: D embedding dimension, T trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dlrm_hybrid.comm.counted_group import CountedGroup, split
from dlrm_hybrid.model.embedding_plan import Shard, torchrec_name
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """What this trainer holds of one tensor.

    Attributes:
        shard: where it lies in the whole tensor.
        view: (rows, columns) of a table or of its elementwise state, (rows,) of a row state.
    """

    shard: Shard
    view: Tensor


@final
class PartedTensors:
    """Weights and optimizer states by name, each in parts over the trainers.

    Args:
        shards: all parts of every tensor, the same for all trainers.
        parts: those of this trainer, in the same order.
        shapes: of the whole tensors: (rows, D) or (rows,).
        group: of the trainers.
    """

    def __init__(
        self,
        shards: Mapping[str, Sequence[Shard]],
        parts: Mapping[str, Sequence[Part]],
        shapes: Mapping[str, tuple[int, ...]],
        group: CountedGroup,
    ) -> None:
        self._shards = shards
        self._parts = parts
        self.shapes = shapes
        self._group = group

    def gather(self, root: int) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor by name, whole at trainer `root`, None elsewhere; all trainers exhaust it.

        What it yields is new memory.
        """
        for name in self.shapes:
            yield name, self._gathered(name, root)

    def load(self, names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> None:
        """Take over this trainer's parts; `tensor_of` gives the whole tensor of a name."""
        for name in names:
            if self._parts[name]:
                whole = tensor_of(name)
                for part in self._parts[name]:
                    part.view.copy_(part.shard.of(whole))

    def _gathered(self, name: str, root: int) -> Tensor | None:
        me, size = self._group.rank(), self._group.size()
        shape, shards = self.shapes[name], self._shards[name]
        given = torch.cat([torch.empty(0), *(part.view.reshape(-1) for part in self._parts[name])])
        given_T = [len(given) if trainer == root else 0 for trainer in range(size)]
        elements = [_elements(shard, shape) for shard in shards]
        taken_T = [
            sum(count for shard, count in zip(shards, elements, strict=True) if shard.trainer == t)
            if me == root
            else 0
            for t in range(size)
        ]
        taken = self._group.exchange(given, given_T, taken_T)
        if me != root:
            return None
        whole = taken.new_empty(shape)
        order = sorted(range(len(shards)), key=lambda index: shards[index].trainer)
        pieces = split(taken, [elements[index] for index in order])
        for index, piece in zip(order, pieces, strict=True):
            place = shards[index].of(whole)
            place.copy_(piece.view(place.shape))
        return whole


def _elements(shard: Shard, shape: tuple[int, ...]) -> int:
    rows = shard.rows[1] - shard.rows[0]
    return rows if len(shape) == 1 else rows * (shard.columns[1] - shard.columns[0])


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


def parted_tensors(
    collection: ShardedEmbeddingBagCollection,
    shards: Mapping[str, Sequence[Shard]],
    spec: ModelSpec,
    options: EmbeddingOptions,
    group: CountedGroup,
) -> PartedTensors:
    """The weights, then the optimizer states, of sharded tables."""
    weights: dict[tuple[Any, ...], Tensor] = {}
    sums: dict[tuple[Any, ...], Tensor] = {}
    for config, kernel in _local_tables(collection):
        views: list[Tensor] = kernel.split_embedding_weights()
        states: list[list[Tensor]] = kernel.split_optimizer_states() or [[]] * len(views)
        for table, view, state in zip(config.embedding_tables, views, states, strict=True):
            corner = (table.name, *table.local_metadata.shard_offsets)
            weights[corner] = view
            sums.update((corner, accumulator) for accumulator in state)
    tables = dict(zip(spec.table_names, spec.table_rows, strict=True))
    width = (spec.embedding_dim,)
    kinds: list[tuple[str, dict[tuple[Any, ...], Tensor], tuple[int, ...]]]
    kinds = [("weight", weights, width)]
    if options.optimizer is not EmbeddingOptimizer.SGD:
        by_row = options.optimizer is EmbeddingOptimizer.ROWWISE_ADAGRAD
        kinds.append(("sum", sums, () if by_row else width))
    all_shards: dict[str, Sequence[Shard]] = {}
    parts: dict[str, list[Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, views_by_corner, width in kinds:
        for table, rows in tables.items():
            name = f"{table}.{kind}"
            shapes[name] = (rows, *width)
            all_shards[name] = shards[table]
            parts[name] = [
                Part(shard, views_by_corner[torchrec_name(table), shard.rows[0], shard.columns[0]])
                for shard in shards[table]
                if shard.trainer == group.rank()
            ]
    return PartedTensors(all_shards, parts, shapes, group)
