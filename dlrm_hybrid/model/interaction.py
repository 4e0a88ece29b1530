"""Interactions of a model as data, the sections `model.cross` and `model.fm`; free of torch.

Shapes: F vectors of a row that interact (bottom MLP first, then the tables), D their width,
W = F D all of them one after the other, R rank. Without dense columns there is no bottom MLP: the
vectors are the rows of the tables, and the outputs of `Dot` and `Fm` have no first vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from dlrm_hybrid.bounds import Bound, Positive
from dlrm_hybrid.record import Record, key

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Dot:
    """Dot products of all pairs of vectors, after the first (Naumov et al., 2019, section 2)."""

    def width(self, vectors: int, dim: int, has_bottom: bool) -> int:
        """Width of the output: D + F (F - 1) / 2, less D without a bottom MLP."""
        return dim * has_bottom + vectors * (vectors - 1) // 2

    def shapes(self, vectors: int, dim: int) -> Shapes:
        """Shapes of the parameters: there are none."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Cross(Record):
    """Cross layers, of low rank or full: x0 * (w v x + bias) + x; and what is beside."""

    layers: Annotated[int, Bound(ge=1, le=64)] = key(3, "cross layers below the top MLP")
    rank: Annotated[int, Bound(ge=1, le=65_536)] | None = key(
        64,
        "rank of w v; about a quarter of the width (tables + 1) · embedding_dim is usual; null: w "
        "is a full matrix",
    )
    deep: tuple[Positive, ...] = key(
        (), "widths of a deep network over all vectors, beside the cross layers"
    )

    def width(self, vectors: int, dim: int, has_bottom: bool) -> int:
        """Width of the output: W, and the width of the deep network."""
        return vectors * dim + sum(self.deep[-1:])

    def shapes(self, vectors: int, dim: int) -> Shapes:
        """Shapes of the parameters, by name below `interaction`."""
        width = vectors * dim
        of_layer: dict[str, tuple[int, ...]] = {"w": (width, self.rank or width), "bias": (width,)}
        if self.rank is not None:
            of_layer = {"v": (self.rank, width), **of_layer}
        of_layers = {
            f"{layer}.{name}": shape
            for layer in range(1, self.layers + 1)
            for name, shape in of_layer.items()
        }
        return {**of_layers, **_deep_shapes(width, self.deep)}


@dataclass(frozen=True, kw_only=True)
class Fm(Record):
    """The deep network beside a factorization machine: sum of all dots beside a deep network."""

    deep: Annotated[tuple[Positive, ...], Bound(min_length=1)] = key(
        (128, 64), "widths of the deep network over all vectors"
    )

    def width(self, vectors: int, dim: int, has_bottom: bool) -> int:
        """Width of the output: the bottom MLP's vector, the deep network's output, one number."""
        return dim * has_bottom + self.deep[-1] + 1

    def shapes(self, vectors: int, dim: int) -> Shapes:
        """Shapes of the parameters, by name below `interaction`."""
        return _deep_shapes(vectors * dim, self.deep)


def _deep_shapes(width: int, deep: Sequence[int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise((width, *deep)), 1):
        shapes[f"deep.{layer}.weight"] = (fan_out, fan_in)
        shapes[f"deep.{layer}.bias"] = (fan_out,)
    return shapes


Interaction = Dot | Cross | Fm
