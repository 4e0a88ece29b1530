"""The embedding tables of all trainers, sharded over them by TorchRec.

Shapes: B batch, F tables, D embedding dimension, T trainers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.types import ShardingEnv

from dlrm_hybrid.comm.counted_group import CountedGroup
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.exchange import DistinctExchange, IdCheck, IdExchange, routes
from dlrm_hybrid.model.sharding import (
    Shard,
    ShardingOptions,
    casts,
    make_plan,
    make_sharder,
    shardings_of,
    shards_of,
    torchrec_name,
    unsharded_tables,
)
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tensors import Piece, draw_embeddings

CPU = torch.device("cpu")
Kernel = SplitTableBatchedEmbeddingBagsCodegen


@final
class ShardedEmbeddings:
    """All tables of a model, one id per bag, shared by the trainers of a group.

    A row learns in backward from the rows of all trainers, at the rate last set. Gradients are
    added, not averaged: the caller divides them by T. Then table-wise sharding gives, bit for bit,
    what one unsharded table gives that sees the batches of all trainers in their order.

    Every trainer makes it, calls it and runs backward as often as every other. Making one switches
    TorchRec's division of gradients off for the whole process.

    Args:
        spec: the tables; weights are not initialised.
        options: how they learn.
        sharding: how they are shared.
        group: of the trainers; a trainer's rank in it is its number.

    Attributes:
        shards: of all trainers, by table.
        pieces: what this trainer holds of weights and optimizer states, named as `Embeddings` does.

    Raises:
        ConfigError: the tables cannot be shared so.
    """

    def __init__(
        self,
        spec: ModelSpec,
        options: EmbeddingOptions,
        sharding: ShardingOptions,
        group: CountedGroup,
    ) -> None:
        self._trainer, self._trainers = group.rank(), group.size()
        sharding.check(
            optimizer=options.optimizer,
            trainers=self._trainers,
            embedding_dim=spec.embedding_dim,
        )
        self._spec = spec
        self._group = group
        _quiet()
        set_gradient_division(False)
        sharder = make_sharder(options, sharding.comm_precision)
        unsharded = unsharded_tables(spec)
        plan = make_plan(unsharded, sharder, sharding, self._trainers)
        self.shards = shards_of(plan, spec)
        environment = ShardingEnv(self._trainers, self._trainer, None)
        environment.process_group = group
        shardings = shardings_of(unsharded, plan, sharder, environment)
        tables = [local_tables(one) for one in shardings]
        self._kernels = [None if one is None else one.emb_module for one in tables]
        self.pieces: Sequence[Piece] = pieces_of(
            [one for one in tables if one is not None], self.shards, spec, options, self._trainer
        )
        self._send_rows = [one.create_output_dist(device=CPU) for one in shardings]
        paths = routes(shardings, self.shards, spec, group)
        self._check = IdCheck(spec.table_rows)
        self._ids = IdExchange(paths, group)
        self._distinct = (
            DistinctExchange(paths.wanted_T, spec, casts(sharding.comm_precision), group)
            if sharding.deduplicate
            else None
        )
        names = [name for one in shardings for name in one.embedding_names()]
        self._order = torch.tensor([names.index(name) for name in spec.table_names])
        self._inverse = torch.argsort(self._order)

    def __call__(self, ids_FB: Tensor, rows_T: Sequence[int] | None = None) -> Tensor:
        """Look up ids_FB, int64 → float32 (B, F, D), in the order of the spec's tables.

        Args:
            ids_FB: of this trainer's batch, which may be empty.
            rows_T: rows of every trainer's batch, the same for all; None: they ask each other,
                which costs one more collective. Distinct ids need no such answer.

        Raises:
            RuntimeError: an id is not a row of its table.
            PeerLostError: a trainer is gone; also in backward.
            DeadlineError: a trainer did not come in time; also in backward.
        """
        self._check(ids_FB)
        if self._distinct is not None:
            return self._look_up_distinct(self._distinct, ids_FB)
        num_rows = ids_FB.shape[1]
        if rows_T is None:
            rows_T = self._rows_of_all(num_rows)
        lookups = self._ids(ids_FB, rows_T)
        looked_up = [
            _looked_up(kernel, bags.ids, bags.offsets, bags.num_rows)
            for kernel, bags in zip(self._kernels, lookups, strict=True)
        ]
        # All are sent before the first is waited for.
        on_their_way: list[Any] = [
            send_rows(pooled, EmbeddingShardingContext(batch_size_per_rank=list(rows_T)))
            for send_rows, pooled in zip(self._send_rows, looked_up, strict=True)
        ]
        parts_BN: list[Tensor] = [part_BN.wait() for part_BN in on_their_way]
        pooled_BN = parts_BN[0] if len(parts_BN) == 1 else torch.cat(parts_BN, 1)
        pooled_BFD = pooled_BN.view(num_rows, len(self._order), self._spec.embedding_dim)
        return cast(Tensor, _Reorder.apply(pooled_BFD, self._order, self._inverse))

    def _look_up_distinct(self, exchange: DistinctExchange, ids_FB: Tensor) -> Tensor:
        asked = exchange.ask(ids_FB)
        (kernel,) = self._kernels
        pooled_NW = _looked_up(kernel, asked.bags.ids_K, asked.bags.offsets, 0)
        return exchange.answer(pooled_NW, asked)

    def set_lr(self, lr: float) -> None:
        """The rate at which the rows of the next lookups learn; the same for all trainers."""
        for kernel in self._kernels:
            if kernel is not None:
                kernel.set_learning_rate(lr)

    def initialise(self, seed: int) -> None:
        """Give every table the values it has unsharded."""
        name, table = "", torch.empty(0)
        for piece in self.pieces:
            if not piece.name.endswith(".weight"):
                continue
            if piece.name != name:
                name, table = piece.name, torch.empty(piece.shape)
                draw_embeddings({name: table}, seed)
            (row, column), (rows, columns) = piece.begin, piece.view.shape
            piece.view.copy_(table[row : row + rows, column : column + columns])

    def _rows_of_all(self, num_rows: int) -> list[int]:
        once_T = [1] * self._trainers
        mine_T = torch.tensor([num_rows] * self._trainers)
        return [int(rows) for rows in self._group.exchange(mine_T, once_T, once_T)]


@final
class _Reorder(torch.autograd.Function):
    """Index the second dimension by a permutation; backward by its inverse."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, order_F: Tensor, inverse_F: Tensor) -> Tensor:
        ctx.inverse_F = inverse_F
        return given.index_select(1, order_F)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].index_select(1, ctx.inverse_F), None, None


def _quiet() -> None:
    """Keep this process from warning of how TorchRec 1.8 uses torch 2.13; nobody can act on it."""
    # Of old names of collectives, from row-wise tables.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed"
    )
    # Of a function that is called with every promise.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _looked_up(kernel: Kernel | None, ids: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """Pooled rows of this trainer's tables; `num_rows` of no width where it holds none.

    TorchRec's own lookup wraps ids to unwrap them: a tenth of a step.
    """
    if kernel is None:
        return torch.empty(num_rows, 0, requires_grad=True)
    return cast(Tensor, kernel(ids, offsets))


def local_tables(sharding: Any) -> BatchedFusedEmbeddingBag | None:
    """The tables of one kind of sharding that this trainer holds; None if there are none."""
    lookup: torch.nn.Module = sharding.create_lookup()
    tables = [one for one in lookup.modules() if isinstance(one, BatchedFusedEmbeddingBag)]
    assert len(tables) <= 1, "tables of one width and type share one kernel"
    return tables[0] if tables else None


def pieces_of(
    local: Sequence[BatchedFusedEmbeddingBag],
    shards: Mapping[str, Sequence[Shard]],
    spec: ModelSpec,
    options: EmbeddingOptions,
    trainer: int,
) -> list[Piece]:
    """What a trainer holds of the weights, then of the optimizer states, of sharded tables.

    Args:
        local: tables that the trainer holds.
        shards: of all trainers, by table.
        spec: the tables.
        options: how they learn.
        trainer: its number.
    """
    weights: dict[tuple[Any, ...], Tensor] = {}
    sums: dict[tuple[Any, ...], Tensor] = {}
    for tables in local:
        views: list[Tensor] = tables.emb_module.split_embedding_weights()
        states: list[list[Tensor]] = tables.emb_module.split_optimizer_states()
        states = states or [[] for _ in views]
        described: list[Any] = tables.config.embedding_tables
        for table, view, state in zip(described, views, states, strict=True):
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
