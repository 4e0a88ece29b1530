"""How trainers share the embedding tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dlrm_hybrid.types import ConfigError

NARROWEST_SHARD = 4  # columns


class ShardingKind(StrEnum):
    """What of a table one trainer holds; `auto` leaves it to TorchRec's planner."""

    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    COLUMN_WISE = "column_wise"
    AUTO = "auto"


class CommPrecision(StrEnum):
    """The type in which pooled embeddings and their gradients travel."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """How trainers share the tables and what they send each other.

    Attributes:
        kind: what of a table one trainer holds.
        comm_precision: of pooled embeddings and their gradients on the wire.
        deduplicate: look up every distinct id of a trainer's batch once.
    """

    kind: ShardingKind
    comm_precision: CommPrecision
    deduplicate: bool

    def check(self, *, optimizer: str, trainers: int, embedding_dim: int) -> None:
        """Refuse what cannot be.

        Args:
            optimizer: of the tables: `sgd` …
            trainers: that share the tables.
            embedding_dim: width of the tables.

        Raises:
            ConfigError: one line for each fault, each naming its keys.
        """
        faults: list[str] = []
        if trainers == 1 and self.comm_precision is not CommPrecision.FLOAT32:
            faults.append(
                f"embedding.comm_precision = {self.comm_precision}: "
                "with parallel.trainers = 1 nothing is sent"
            )
        if trainers == 1 and self.deduplicate:
            faults.append(
                "embedding.deduplicate = True: with parallel.trainers = 1 nothing is sent"
            )
        if self.deduplicate and self.kind is not ShardingKind.TABLE_WISE:
            faults.append(
                f"embedding.deduplicate = True: needs embedding.sharding = table_wise, "
                f"not {self.kind}"
            )
        if self.kind is ShardingKind.COLUMN_WISE:
            if optimizer == "rowwise_adagrad":
                faults.append(
                    f"embedding.sharding = {self.kind}: embedding.optimizer = {optimizer} "
                    "keeps one number for each whole row"
                )
            if columns_of_a_shard(embedding_dim) is None:
                faults.append(
                    f"embedding.sharding = {self.kind}: model.embedding_dim = {embedding_dim} "
                    f"cannot be cut: FBGEMM needs columns in multiples of {NARROWEST_SHARD}"
                )
        if faults:
            raise ConfigError("\n".join(faults))


def columns_of_a_shard(embedding_dim: int) -> int | None:
    """Width of the parts when tables are cut by columns: half of it or less; None if impossible."""
    widths = range(NARROWEST_SHARD, embedding_dim // 2 + 1, NARROWEST_SHARD)
    return max((width for width in widths if embedding_dim % width == 0), default=None)
