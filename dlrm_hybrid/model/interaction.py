"""Interactions of a model as data: widths and parameters of each kind; free of torch.

Shapes: F vectors of a row that interact (bottom MLP first, then the tables), D their width,
W = F D all of them one after the other, R rank. Without dense columns there is no bottom MLP: the
vectors are those of the tables, and the outputs of `Dot` and `Fm` have no first vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross:
    """Cross layers: x' = x0 * (w (v x) + bias) + x (see `layers.interactions`).

    Attributes:
        layers: number of layers.
        rank: R, columns of w and rows of v; None: w is a full matrix, and there is no v.
        deep: layer widths of a parallel deep network, each with ReLU; empty for none.
    """

    layers: int
    rank: int | None
    deep: tuple[int, ...] = ()

    def width(self, vectors: int, dim: int, has_bottom: bool) -> int:
        """Width of the output: W, and that of the deep network."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fm:
    """A factorization machine parallel to a deep network over the same vectors.

    Attributes:
        deep: widths of the deep network's layers, each with ReLU.
    """

    deep: tuple[int, ...]

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
