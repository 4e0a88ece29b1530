"""Tensors as a rank holds them: whole, or a rectangle of one whose rest lies with other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a rank holds of a tensor.

    Attributes:
        name: of the tensor, the same for all ranks.
        shape: of the whole tensor.
        begin: where the piece lies in it: the first index of each dimension.
        view: the piece; writing to it changes the tensor.
    """

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    view: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether nobody else holds anything of the tensor."""
        return tuple(self.view.shape) == self.shape


def whole(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Tensors of which this rank holds everything."""
    return [
        Piece(name=name, shape=tuple(tensor.shape), begin=(0,) * tensor.dim(), view=tensor.detach())
        for name, tensor in tensors.items()
    ]
