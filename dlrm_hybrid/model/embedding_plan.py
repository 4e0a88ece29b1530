"""Where TorchRec puts which part of which table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    ParameterConstraints,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_hybrid.model.embedding_codecs import codec_registry
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.sharding_options import (
    CommPrecision,
    ShardingKind,
    ShardingOptions,
    columns_of_a_shard,
)
from dlrm_hybrid.model.spec import ModelSpec

_OPTIMIZERS: Mapping[EmbeddingOptimizer, EmbOptimType] = {
    EmbeddingOptimizer.SGD: EmbOptimType.EXACT_SGD,
    EmbeddingOptimizer.ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
    EmbeddingOptimizer.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
_CHOICES = (ShardingKind.TABLE_WISE, ShardingKind.ROW_WISE, ShardingKind.COLUMN_WISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rectangle of a table and who holds it.

    Attributes:
        trainer: that holds it.
        rows: first and one past the last.
        columns: first and one past the last.
    """

    trainer: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@final
class CpuSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which offers no row-wise tables on a CPU though they work there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """What the planner may choose from; its constraints narrow it down."""
        return [kind.value for kind in _CHOICES]


def torchrec_name(table: str) -> str:
    """What TorchRec calls a table: it takes dots for the separators of modules."""
    return table.replace(".", "_")


def sharder(options: EmbeddingOptions, precision: CommPrecision) -> CpuSharder:
    """What makes sharded tables that learn in backward."""
    fused: dict[str, Any] = {
        "optimizer": _OPTIMIZERS[options.optimizer],
        "learning_rate": 0.0,
        # Ids are checked where they come from; what else arrives here is no id.
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if options.optimizer is not EmbeddingOptimizer.SGD:
        fused["eps"] = options.eps
    return CpuSharder(fused_params=fused, qcomm_codecs_registry=codec_registry(precision))


def collection(spec: ModelSpec) -> EmbeddingBagCollection:
    """The unsharded tables, without memory."""
    tables = [
        EmbeddingBagConfig(
            name=torchrec_name(name),
            embedding_dim=spec.embedding_dim,
            num_embeddings=rows,
            feature_names=[name],
            pooling=PoolingType.SUM,
            init_fn=_leave,
        )
        for name, rows in zip(spec.table_names, spec.table_rows, strict=True)
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def _leave(table: torch.Tensor) -> torch.Tensor:
    """Draw no values that will be overwritten."""
    return table


def plan(
    tables: EmbeddingBagCollection, sharder: CpuSharder, options: ShardingOptions, trainers: int
) -> EmbeddingModuleShardingPlan:
    """TorchRec's plan: the same for the same arguments, so every trainer makes its own.

    It balances the lookups of table-wise trainers and looks at the rows second. What `auto` makes
    it choose follows from TorchRec's own guesses at the speed of machines and networks.
    """
    kinds = _CHOICES if options.kind is ShardingKind.AUTO else (options.kind,)
    configs = tables.embedding_bag_configs()
    fused: Mapping[str, Any] = sharder.fused_params or {}
    if fused["optimizer"] is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        # One number for a whole row: it cannot be cut by columns.
        kinds = tuple(kind for kind in kinds if kind is not ShardingKind.COLUMN_WISE)
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[kind.value for kind in kinds],
            min_partition=columns_of_a_shard(table.embedding_dim),
        )
        for table in configs
    }
    planner = EmbeddingShardingPlanner(
        topology=_topology(trainers),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
    )
    sharders: list[Any] = [sharder]
    plan = planner.plan(tables, sharders).get_plan_for_module("")
    assert isinstance(plan, EmbeddingModuleShardingPlan)
    return plan


def shards_of(plan: EmbeddingModuleShardingPlan, spec: ModelSpec) -> dict[str, tuple[Shard, ...]]:
    """All shards of all tables by the table's name, in the order of `spec`."""
    shards: dict[str, tuple[Shard, ...]] = {}
    for name in spec.table_names:
        specification: Any = plan[torchrec_name(name)].sharding_spec
        shards[name] = tuple(_shard(shard) for shard in specification.shards)
    return shards


def _shard(shard: Any) -> Shard:
    (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
    return Shard(
        trainer=shard.placement.rank(), rows=(row, row + rows), columns=(column, column + columns)
    )


def _topology(trainers: int) -> Topology:
    return TopologyFactory.create_topology(
        trainer_config=TrainerConfig(world_size=trainers, local_world_size=trainers),
        kernel_config=KernelConfig(compute_device="cpu"),
    )
