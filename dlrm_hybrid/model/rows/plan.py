"""TorchRec's plan: the trainers that hold the rows and columns of each table.

Shapes: T trainers.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any, final

import torch
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

from dlrm_hybrid.bounds import WirePrecision
from dlrm_hybrid.model.sharding import (
    NARROWEST_SHARD,
    casts,
    columns_of_a_shard,
)
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tables import Embedding, Sharding

CPU = torch.device("cpu")
_CHOICES: tuple[Sharding, ...] = ("table_wise", "row_wise", "column_wise")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """A rectangle of a table and the trainer that holds it.

    Attributes:
        rows: first and one past the last.
        columns: first and one past the last.
    """

    trainer: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def quiet() -> None:
    """Silence warnings about how TorchRec 1.8 uses torch 2.13: users cannot act on them."""
    # Old names of collectives, used by row-wise tables.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed"
    )
    # A function that is called with every awaitable.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@final
class CpuSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with row-wise tables on a CPU: they work, but it does not offer them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Kinds that the planner may choose from; its constraints narrow them down."""
        return list(_CHOICES)


def _torchrec_name(table: str) -> str:
    """TorchRec's name of a table, without dots, which it takes for separators of modules."""
    return table.replace(".", "_")


def unsharded_tables(spec: ModelShape) -> EmbeddingBagCollection:
    """The tables before sharding, without memory."""
    tables = [
        EmbeddingBagConfig(
            name=_torchrec_name(name),
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[name],
            pooling=PoolingType.SUM,
            init_fn=lambda table: table,  # draws nothing: values would be overwritten
        )
        for name, rows, dim in zip(spec.table_names, spec.table_rows, spec.widths.dims, strict=True)
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def make_plan(
    tables: EmbeddingBagCollection,
    sharder: CpuSharder,
    embedding: Embedding,
    trainers: int,
) -> EmbeddingModuleShardingPlan:
    """Make TorchRec's plan: the same for the same arguments, so every trainer makes its own.

    It balances the lookups of trainers with table-wise shards, and rows second. What it chooses
    for `auto` follows from TorchRec's guesses at the speed of machines and networks.
    """
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=_kinds(embedding, table.embedding_dim),
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


def _kinds(embedding: Embedding, dim: int) -> list[str]:
    kinds = _CHOICES if embedding.sharding == "auto" else (embedding.sharding,)
    if embedding.is_rowwise or dim % NARROWEST_SHARD:
        # One number per full row, or a width without parts, rules column-wise shards out.
        return [kind for kind in kinds if kind != "column_wise"]
    return [*kinds]


def make_shardings(
    tables: EmbeddingBagCollection,
    plan: EmbeddingModuleShardingPlan,
    sharder: CpuSharder,
    environment: ShardingEnv,
) -> dict[str, Any]:
    """Make TorchRec's shardings of the tables, by the kind of sharding.

    `ShardedEmbeddingBagCollection` would assemble the same parts, but exposes none of them.
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


def shards_of(
    plan: EmbeddingModuleShardingPlan, spec: ModelShape
) -> dict[str, tuple[TableShard, ...]]:
    """All shards of each table by name, in the order of `spec`."""
    shards: dict[str, tuple[TableShard, ...]] = {}
    for name in spec.table_names:
        specification: Any = plan[_torchrec_name(name)].sharding_spec
        shards[name] = tuple(
            TableShard(
                trainer=shard.placement.rank(),
                rows=(row, row + rows),
                columns=(column, column + columns),
            )
            for shard in specification.shards
            for (row, column), (rows, columns) in [(shard.shard_offsets, shard.shard_sizes)]
        )
    return shards


def codec_registry(precision: WirePrecision) -> dict[str, QuantizedCommCodecs] | None:
    """Codecs for TorchRec's sharder; None for float32."""
    if precision == "float32":
        return None
    forward, backward = casts(precision)
    codecs = QuantizedCommCodecs(forward=forward, backward=backward)  # pyright: ignore
    operations = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    return {operation.name: codecs for operation in operations}
