"""How trainers share the embedding tables: options, routes, and the type of rows on the wire.

TorchRec's own half-precision codecs are not used: its BF16 becomes FP16 on a CPU without a word,
and its FP16 lets gradients below 6e-8 vanish and rounds those below 6e-5 ever more coarsely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

import torch
from torch import Tensor

from dlrm_hybrid.comm.counted_group import CountedGroup
from dlrm_hybrid.compress.embedding.memory import LevelOptions
from dlrm_hybrid.model.spec import ModelSpec

NARROWEST_SHARD = 4  # columns, as FBGEMM needs; a rule of the configuration knows it too


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
        levels: how finely distinct rows and gradients are sent as levels; None: they are cast.
    """

    kind: ShardingKind
    comm_precision: CommPrecision
    deduplicate: bool
    levels: LevelOptions | None = None


def columns_of_a_shard(embedding_dim: int) -> int | None:
    """Width of the parts when tables are cut by columns: half of it or less; None if impossible."""
    widths = range(NARROWEST_SHARD, embedding_dim // 2 + 1, NARROWEST_SHARD)
    return max((width for width in widths if embedding_dim % width == 0), default=None)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which trainer looks up what, by lookups that each take the tables of one kernel.

    Attributes:
        wanted_T: tables that each trainer looks up, in the order of its lookups.
        num_features_L: tables of each lookup of this trainer; together as many as wanted from it.
        blocks_L: first and one past the last row that this trainer holds, of every table of a
            lookup; None where it holds all rows.
    """

    wanted_T: tuple[tuple[int, ...], ...]
    num_features_L: tuple[int, ...]
    blocks_L: tuple[tuple[tuple[int, int], ...] | None, ...]


def routes(
    shardings: Mapping[str, Any],
    blocks: Mapping[str, tuple[int, int]],
    spec: ModelSpec,
    group: CountedGroup,
) -> Routes:
    """To the lookups of sharded tables, one for each kind of sharding.

    Args:
        shardings: TorchRec's descriptions by kind.
        blocks: first and one past the last row that this trainer holds, by table, of those that
            are cut by rows.
        spec: the tables.
        group: of the trainers.
    """
    tables = {name: table for table, name in enumerate(spec.table_names)}
    wanted_T: list[list[int]] = [[] for _ in range(group.size())]
    num_features_L: list[int] = []
    blocks_L: list[tuple[tuple[int, int], ...] | None] = []
    for kind, sharding in shardings.items():
        by_rows = kind == ShardingKind.ROW_WISE
        names_T: list[list[str]] = (
            [sharding.feature_names()] * group.size()
            if by_rows
            else sharding.feature_names_per_rank()
        )
        for wanted, names in zip(wanted_T, names_T, strict=True):
            wanted.extend(tables[name] for name in names)
        mine = names_T[group.rank()]
        num_features_L.append(len(mine))
        blocks_L.append(tuple(blocks[name] for name in mine) if by_rows else None)
    return Routes(tuple(map(tuple, wanted_T)), tuple(num_features_L), tuple(blocks_L))


FLOAT16_GRADIENT_SCALE = 2.0**16
"""Gradients of a mean loss are far below 1: from 1 on they become infinite and the run fails."""


@final
@dataclass(frozen=True, slots=True)
class Cast:
    """Multiplies by a power of two and casts; a codec as TorchRec's QuantizedCommCodec asks."""

    dtype: torch.dtype
    scale: float

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        """Float32 → `dtype`, before rows or gradients travel."""
        return times(input_tensor, self.scale).to(self.dtype)

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        """`dtype` → float32, on the way back."""
        return times(input_grad.float(), 1.0 / self.scale)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The type on the wire."""
        return self.dtype

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        """How many elements travel: as many as are given."""
        return input_len

    def create_context(self) -> None:
        """Nothing is remembered between the two ends."""

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Width of a row on the wire and how much of it is padding."""
        return input_tensor.shape[-1], 0


def times(tensor: Tensor, factor: float) -> Tensor:
    """A tensor multiplied by a factor; the tensor itself for a factor of 1."""
    return tensor if factor == 1.0 else tensor * factor


_PLAIN = Cast(torch.float32, 1.0)
_CASTS: Mapping[CommPrecision, tuple[Cast, Cast]] = {
    CommPrecision.FLOAT32: (_PLAIN, _PLAIN),
    CommPrecision.FLOAT16: (
        Cast(torch.float16, 1.0),
        Cast(torch.float16, FLOAT16_GRADIENT_SCALE),
    ),
    CommPrecision.BFLOAT16: (Cast(torch.bfloat16, 1.0), Cast(torch.bfloat16, 1.0)),
}


def casts(precision: CommPrecision) -> tuple[Cast, Cast]:
    """Of rows, and of gradients, on the wire."""
    return _CASTS[precision]


@final
@dataclass(frozen=True, slots=True)
class Rounding:
    """What pooled rows and their gradients become on the way, for tables that do not travel."""

    precision: CommPrecision

    def pooled(self, pooled: Tensor) -> Tensor:
        """Rows as the trainers see them."""
        cast, _ = casts(self.precision)
        return cast.decode(cast.encode(pooled))

    def gradient(self, gradient: Tensor) -> Tensor:
        """A trainer's part of the gradient as the tables see it."""
        _, cast = casts(self.precision)
        return cast.decode(cast.encode(gradient))
