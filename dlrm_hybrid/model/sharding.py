"""Sharing of the embedding tables among trainers: options, routes, and types on the wire.

TorchRec's own half-precision codecs are not used: its BF16 silently becomes FP16 on a CPU, and its
FP16 flushes gradients below 6e-8 to zero and rounds those below 6e-5 ever more coarsely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dlrm_hybrid.bounds import WirePrecision
from dlrm_hybrid.comm.group import CountedGroup
from dlrm_hybrid.model.spec import ModelShape

NARROWEST_SHARD = 4  # columns, as FBGEMM needs; the configuration checks it too


def columns_of_a_shard(embedding_dim: int) -> int | None:
    """Width of column-wise shards: half the dimension or less; None if impossible."""
    widths = range(NARROWEST_SHARD, embedding_dim // 2 + 1, NARROWEST_SHARD)
    return max((width for width in widths if embedding_dim % width == 0), default=None)


@dataclass(frozen=True, slots=True)
class Routes:
    """Tables and rows that each trainer looks up, by lookups that each use one kernel.

    Attributes:
        wanted_T: tables that each trainer looks up, in the order of its lookups.
        num_features_L: number of tables per lookup of this trainer; sums to those wanted from it.
        blocks_L: per lookup, first and one past the last row held here of each table; None for all.
    """

    wanted_T: tuple[tuple[int, ...], ...]
    num_features_L: tuple[int, ...]
    blocks_L: tuple[tuple[tuple[int, int], ...] | None, ...]


def routes(
    shardings: Mapping[str, Any],
    blocks: Mapping[str, tuple[int, int]],
    spec: ModelShape,
    group: CountedGroup,
) -> Routes:
    """Find the routes to the lookups of sharded tables, one lookup per kind of sharding.

    Args:
        shardings: TorchRec's shardings, by kind.
        blocks: first and one past the last row held here, by table, of those with row-wise shards.
    """
    tables = {name: table for table, name in enumerate(spec.table_names)}
    wanted_T: list[list[int]] = [[] for _ in range(group.size())]
    num_features_L: list[int] = []
    blocks_L: list[tuple[tuple[int, int], ...] | None] = []
    for kind, sharding in shardings.items():
        by_rows = kind == "row_wise"
        names_T: list[list[str]] = (
            [sharding.feature_names()] * group.size()
            if by_rows
            else sharding.feature_names_per_rank()
        )
        for numbers, names in zip(wanted_T, names_T, strict=True):
            numbers.extend(tables[name] for name in names)
        features = names_T[group.rank()]
        num_features_L.append(len(features))
        blocks_L.append(tuple(blocks[name] for name in features) if by_rows else None)
    return Routes(tuple(map(tuple, wanted_T)), tuple(num_features_L), tuple(blocks_L))


FLOAT16_GRADIENT_SCALE = 2.0**16
"""Gradients of a mean loss are far below 1; those from 1 on overflow, and the run fails."""


@final
@dataclass(frozen=True, slots=True)
class Cast:
    """Multiplies by a power of two and casts, as a QuantizedCommCodec of TorchRec."""

    dtype: torch.dtype
    scale: float

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        """Cast float32 rows or gradients to `dtype` for the wire."""
        return times(input_tensor, self.scale).to(self.dtype)

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        """Cast rows or gradients from the wire back to float32."""
        return times(input_grad.float(), 1.0 / self.scale)

    def rounded(self, tensor: Tensor) -> Tensor:
        """Round rows or gradients as they would be received."""
        return self.decode(self.encode(tensor))

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The type on the wire."""
        return self.dtype

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        """Number of elements on the wire, the same as given."""
        return input_len

    def create_context(self) -> None:
        """Make no context: the codec has no state."""

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Width of a row on the wire, and its padding, which is 0."""
        return input_tensor.shape[-1], 0


def times(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a factor; returns the tensor itself for 1."""
    return tensor if factor == 1.0 else tensor * factor


_PLAIN = Cast(torch.float32, 1.0)
_CASTS: Mapping[WirePrecision, tuple[Cast, Cast]] = {
    "float32": (_PLAIN, _PLAIN),
    "float16": (
        Cast(torch.float16, 1.0),
        Cast(torch.float16, FLOAT16_GRADIENT_SCALE),
    ),
    "bfloat16": (Cast(torch.bfloat16, 1.0), Cast(torch.bfloat16, 1.0)),
}


def casts(precision: WirePrecision) -> tuple[Cast, Cast]:
    """The casts of rows, and of gradients, on the wire."""
    return _CASTS[precision]
