"""Named tensors: their initial values, and the pieces of them that ranks hold.

A tensor's initial values depend on the seed and its name alone, not on order, layout or rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, final

import torch
from torch import Tensor

from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import Group

TableInit = Literal["uniform_rows", "uniform_width"] | float
"""Law of initial rows: U(-b, b), b = 1/sqrt(rows of the table) or 1/sqrt(width); or N(0, s²)."""
PART_ELEMENTS = 1 << 20
PART_BYTES = 1 << 25
NORM = ".norm."  # in the names of the parameters of batch norm


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a named tensor that one rank holds.

    Attributes:
        name: name of the tensor, the same for all ranks.
        begin: offset of the piece in the tensor, by dimension.
        view: the piece; writing to it changes the tensor.
        group: what the tensor is.
        every: distance of its rows in the tensor; 1 if consecutive.
        is_copy: whether another rank holds the same piece and saves it.
    """

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    view: Tensor
    group: Group = Group.DENSE
    every: int = 1
    is_copy: bool = False

    @property
    def is_full(self) -> bool:
        """Whether no other rank holds a part of the tensor."""
        return tuple(self.view.shape) == self.shape


def full_pieces(tensors: Mapping[str, Tensor], group: Group = Group.DENSE) -> list[Piece]:
    """Pieces of tensors that this rank holds as a whole."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return [
        Piece(name=name, shape=shape, begin=(0,) * len(shape), view=view.detach(), group=group)
        for (name, shape), view in zip(shapes.items(), tensors.values(), strict=True)
    ]


def in_groups(pieces: Iterable[Piece], *groups: Group) -> list[Piece]:
    """The pieces of some groups."""
    return [piece for piece in pieces if piece.group in groups]


def whole(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Assemble copies of the tensors that pieces make up, by name."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        if piece.name not in tensors:
            tensors[piece.name] = torch.empty(piece.shape, dtype=piece.view.dtype)
        places = [slice(a, a + n) for a, n in zip(piece.begin, piece.view.shape, strict=True)]
        if places:
            begin, rows = piece.begin[0], len(piece.view)
            places[0] = slice(begin, begin + rows * piece.every, piece.every)
        tensors[piece.name][tuple(places)] = piece.view
    return tensors


def parts(piece: Piece, most_bytes: int = PART_BYTES) -> Iterator[Piece]:
    """Split a piece into pieces of consecutive rows, of at most `most_bytes` or of one row."""
    if not piece.shape:
        yield piece
        return
    rows = max(1, most_bytes * len(piece.view) // max(1, piece.view.nbytes))
    for row in range(0, len(piece.view), rows):
        begin = (piece.begin[0] + row * piece.every, *piece.begin[1:])
        yield replace(piece, begin=begin, view=piece.view[row : row + rows])


def draw_dense(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill weights (out, in) with N(0, 2/(in + out)) and biases (out,) with N(0, 1/out).

    N(mean, variance), as in facebookresearch/dlrm. Batch norm: weights of 1 and biases of 0.
    """
    for name, tensor in tensors.items():
        if NORM in name:
            with torch.no_grad():
                tensor.fill_(name.endswith(".weight"))
            continue
        variance = 1 / len(tensor) if tensor.dim() == 1 else 2 / sum(tensor.shape)
        with torch.no_grad():
            tensor.normal_(0.0, sqrt(variance), generator=_stream(seed, name))


def draw_embeddings(
    tables: Mapping[str, Tensor], seed: int, init: TableInit = "uniform_rows"
) -> None:
    """Fill tables (rows, D) with their initial values.

    Args:
        init: the law; facebookresearch/dlrm draws by `uniform_rows`.
    """
    for name, table_RD in tables.items():
        begin, (rows, dim) = 0, table_RD.shape
        for part_RD in embedding_parts(name, rows, dim, seed, init):
            table_RD[begin : begin + len(part_RD)] = part_RD
            begin += len(part_RD)


def embedding_parts(
    name: str, rows: int, dim: int, seed: int, init: TableInit = "uniform_rows"
) -> Iterator[Tensor]:
    """Draw a table as `draw_embeddings` does, in parts of consecutive rows."""
    stream = _stream(seed, name)
    for first, stop in _parts(rows, dim):
        part_RD = torch.empty(stop - first, dim)
        _draw(part_RD, rows, init, stream)
        yield part_RD


def _parts(rows: int, dim: int) -> Iterator[tuple[int, int]]:
    """Bounds of parts of consecutive rows, fixed because normal draws depend on their number."""
    most = max(1, PART_ELEMENTS // dim)
    for first in range(0, rows, most):
        yield first, min(first + most, rows)


def _draw(part_RD: Tensor, rows: int, init: TableInit, stream: torch.Generator) -> None:
    """Fill a part of a table of `rows` rows."""
    if isinstance(init, float):
        part_RD.normal_(0.0, init, generator=stream)
        return
    bound = 1 / sqrt(rows if init == "uniform_rows" else part_RD.shape[1])
    part_RD.uniform_(-bound, bound, generator=stream)


def _stream(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(fold(seed, "initialise", name))
