"""The embedding tables of all trainers, sharded over them by TorchRec.

Shapes: B batch, F tables, D embedding dimension, T trainers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    ParameterConstraints,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import (
    CommOp,
    EmbeddingModuleShardingPlan,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.counted_group import CountedGroup
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.exchange import DistinctExchange, IdExchange, check_ids
from dlrm_hybrid.model.sharding import (
    CommPrecision,
    ShardingKind,
    ShardingOptions,
    casts,
    columns_of_a_shard,
    routes,
)
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tensors import Piece, draw_embeddings

CPU = torch.device("cpu")
Kernel = SplitTableBatchedEmbeddingBagsCodegen
_CHOICES = (ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE, ShardingKind.COLUMN_WISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rectangle of a table and the trainer that holds it.

    Attributes:
        trainer: that holds it.
        rows: first and one past the last.
        columns: first and one past the last.
    """

    trainer: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@final
class ShardedEmbeddings:
    """All tables of a model, one id per bag, shared by the trainers of a group.

    Backward updates a row from the rows of all trainers, at the rate last set. Gradients are
    added, not averaged: the caller divides them by T. Then table-wise sharding gives, bit for bit,
    what one unsharded table gives that sees the batches of all trainers in their order.

    Every trainer makes it, calls it and runs backward as often as every other. Making one switches
    TorchRec's division of gradients off for the whole process.

    Args:
        spec: the tables; weights are not initialised.
        options: their optimizer.
        sharding: how they are divided among trainers.
        group: of the trainers; a trainer's rank in it is its number.

    Attributes:
        shards: of all trainers, by table.
        pieces: what this trainer holds of weights and optimizer states, named as `Embeddings` does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        options: EmbeddingOptions,
        sharding: ShardingOptions,
        group: CountedGroup,
    ) -> None:
        self._trainer, self._trainers = group.rank(), group.size()
        self._spec = spec
        self._group = group
        _quiet()
        set_gradient_division(False)
        sharder = CpuSharder(
            fused_params=options.fbgemm(),
            qcomm_codecs_registry=_codec_registry(sharding.comm_precision),
        )
        unsharded = _unsharded_tables(spec)
        plan = _make_plan(unsharded, sharder, options, sharding, self._trainers)
        self.shards = _shards_of(plan, spec)
        environment = ShardingEnv(self._trainers, self._trainer, None)
        environment.process_group = group
        shardings = _make_shardings(unsharded, plan, sharder, environment)
        tables = [_local_tables(one) for one in shardings.values()]
        self._kernels = [None if one is None else one.emb_module for one in tables]
        self.pieces: Sequence[Piece] = _pieces_of([one for one in tables if one is not None], spec)
        self._send_rows = [one.create_output_dist(device=CPU) for one in shardings.values()]
        blocks = {
            name: shard.rows
            for name, shards in self.shards.items()
            for shard in shards
            if shard.trainer == self._trainer
        }
        paths = routes(shardings, blocks, spec, group)
        self._table_rows_F1 = torch.tensor(spec.table_rows).unsqueeze(1)
        self._ids = IdExchange(paths, group)
        self._distinct = (
            DistinctExchange(paths.wanted_T, spec, casts(sharding.comm_precision), group)
            if sharding.deduplicate
            else None
        )
        names = [name for one in shardings.values() for name in one.embedding_names()]
        self._order = torch.tensor([names.index(name) for name in spec.table_names])
        self._inverse = torch.argsort(self._order)

    def __call__(self, bags: Bags[Tensor], rows_T: Sequence[int] | None = None) -> Tensor:
        """Look up the ids of a batch → float32 (B, F, D), in the order of the spec's tables.

        Args:
            bags: of this trainer's batch, which may be empty.
            rows_T: rows of every trainer's batch, the same for all; None: they ask each other,
                which costs one more collective. Distinct ids need no such answer.

        Raises:
            RuntimeError: an id is not a row of its table.
            ValueError: the ids are on another device.
            PeerLostError: a trainer is gone; also in backward.
            DeadlineError: a trainer did not come in time; also in backward.
        """
        check_ids(bags, self._table_rows_F1)
        if self._distinct is not None:
            return self._look_up_distinct(self._distinct, bags)
        num_rows = bags.rows
        if rows_T is None:
            rows_T = self._rows_of_all(num_rows)
        lookups = self._ids(bags, rows_T)
        looked_up = [
            _looked_up(kernel, *asked, sum(rows_T))
            for kernel, asked in zip(self._kernels, lookups, strict=True)
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

    def _look_up_distinct(self, exchange: DistinctExchange, bags: Bags[Tensor]) -> Tensor:
        asked = exchange.ask(bags)
        (kernel,) = self._kernels
        pooled_NW = _looked_up(kernel, asked.bags.ids_K, asked.bags.offsets, 0)
        return exchange.answer(pooled_NW, asked)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for the rows of the next lookups; the same for all trainers."""
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
    """Silence warnings about how TorchRec 1.8 uses torch 2.13: users cannot act on them."""
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


def _local_tables(sharding: Any) -> BatchedFusedEmbeddingBag | None:
    """The tables of one kind of sharding that this trainer holds; None if there are none."""
    lookup: torch.nn.Module = sharding.create_lookup()
    tables = [one for one in lookup.modules() if isinstance(one, BatchedFusedEmbeddingBag)]
    assert len(tables) <= 1, "tables of one width and type share one kernel"
    return tables[0] if tables else None


def _pieces_of(local: Sequence[BatchedFusedEmbeddingBag], spec: ModelSpec) -> list[Piece]:
    """What a trainer holds of the weights, then of the optimizer states, of sharded tables."""
    table_of = {_torchrec_name(name): table for table, name in enumerate(spec.table_names)}
    found: list[tuple[str, int, tuple[int, ...], Tensor]] = []
    for tables in local:
        views: list[Tensor] = tables.emb_module.split_embedding_weights()
        states: list[list[Tensor]] = tables.emb_module.split_optimizer_states()
        states = states or [[] for _ in views]
        described: list[Any] = tables.config.embedding_tables
        for table, view, state in zip(described, views, states, strict=True):
            begin = tuple(table.local_metadata.shard_offsets)
            found.append(("weight", table_of[table.name], begin, view))
            found += [("sum", table_of[table.name], begin, accumulator) for accumulator in state]
    return [
        Piece(
            name=f"{spec.table_names[table]}.{kind}",
            shape=(spec.table_rows[table], spec.embedding_dim)[: view.dim()],
            begin=begin[: view.dim()],
            view=view,
        )
        for kind, table, begin, view in sorted(found, key=lambda x: (x[0] == "sum", *x[1:3]))
    ]


@final
class CpuSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which offers no row-wise tables on a CPU though they work there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """What the planner may choose from; its constraints narrow it down."""
        return [kind.value for kind in _CHOICES]


def _torchrec_name(table: str) -> str:
    """What TorchRec calls a table: it takes dots for the separators of modules."""
    return table.replace(".", "_")


def _unsharded_tables(spec: ModelSpec) -> EmbeddingBagCollection:
    """The unsharded tables, without memory."""
    tables = [
        EmbeddingBagConfig(
            name=_torchrec_name(name),
            embedding_dim=spec.embedding_dim,
            num_embeddings=rows,
            feature_names=[name],
            pooling=PoolingType.SUM,
            init_fn=lambda table: table,  # draw nothing: it would be overwritten
        )
        for name, rows in zip(spec.table_names, spec.table_rows, strict=True)
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def _make_plan(
    tables: EmbeddingBagCollection,
    sharder: CpuSharder,
    options: EmbeddingOptions,
    sharding: ShardingOptions,
    trainers: int,
) -> EmbeddingModuleShardingPlan:
    """TorchRec's plan: the same for the same arguments, so every trainer makes its own.

    It balances the lookups of table-wise trainers and looks at the rows second. What `auto` makes
    it choose follows from TorchRec's own guesses at the speed of machines and networks.
    """
    kinds = _CHOICES if sharding.kind is ShardingKind.AUTO else (sharding.kind,)
    if options.optimizer is EmbeddingOptimizer.ROWWISE_ADAGRAD:
        # One accumulator for a full row: it cannot be cut by columns.
        kinds = tuple(kind for kind in kinds if kind is not ShardingKind.COLUMN_WISE)
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[kind.value for kind in kinds],
            min_partition=columns_of_a_shard(table.embedding_dim),
        )
        for table in tables.embedding_bag_configs()
    }
    planner = EmbeddingShardingPlanner(
        topology=TopologyFactory.create_topology(
            trainer_config=TrainerConfig(world_size=trainers, local_world_size=trainers),
            kernel_config=KernelConfig(compute_device="cpu"),
        ),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
    )
    sharders: list[Any] = [sharder]
    plan = planner.plan(tables, sharders).get_plan_for_module("")
    assert isinstance(plan, EmbeddingModuleShardingPlan)
    return plan


def _make_shardings(
    tables: EmbeddingBagCollection,
    plan: EmbeddingModuleShardingPlan,
    sharder: CpuSharder,
    environment: ShardingEnv,
) -> dict[str, Any]:
    """TorchRec's descriptions of how tables are shared, by the kind of sharding.

    `ShardedEmbeddingBagCollection` would put the same parts together, and gives none of them out.
    """
    groups = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(
        tables, plan, "embedding_bags.", sharder.fused_params
    )
    return {
        kind: ShardedEmbeddingBagCollection.create_embedding_bag_sharding(
            infos,
            environment,
            CPU,
            permute_embeddings=True,
            qcomm_codecs_registry=sharder.qcomm_codecs_registry,
        )
        for kind, infos in groups.items()
    }


def _shards_of(plan: EmbeddingModuleShardingPlan, spec: ModelSpec) -> dict[str, tuple[Shard, ...]]:
    """All shards of all tables by the table's name, in the order of `spec`."""
    shards: dict[str, tuple[Shard, ...]] = {}
    for name in spec.table_names:
        specification: Any = plan[_torchrec_name(name)].sharding_spec
        shards[name] = tuple(
            Shard(
                trainer=shard.placement.rank(),
                rows=(row, row + rows),
                columns=(column, column + columns),
            )
            for shard in specification.shards
            for (row, column), (rows, columns) in [(shard.shard_offsets, shard.shard_sizes)]
        )
    return shards


def _codec_registry(precision: CommPrecision) -> dict[str, QuantizedCommCodecs] | None:
    """What TorchRec's sharder takes; None for float32."""
    if precision is CommPrecision.FLOAT32:
        return None
    forward, backward = casts(precision)
    codecs = QuantizedCommCodecs(forward=forward, backward=backward)  # pyright: ignore
    operations = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    return {operation.name: codecs for operation in operations}
