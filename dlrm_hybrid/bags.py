"""The ids of a batch: a bag of them for each table and row, pooled to the sum of their rows.

Shapes: B rows of a batch, F tables, N ids of all bags, S runs of consecutive ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar, final

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Shaped(Protocol):
    """An array of numpy or torch."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""
        ...


Array = TypeVar("Array", bound=Shaped)
Other = TypeVar("Other", bound=Shaped)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bags(Generic[Array]):
    """Ids as a KeyedJaggedTensor has them: table after table, in each row after row.

    Attributes:
        values: int64, contiguous: (F, B) where every bag has one id, else (N,).
        offsets: int64 (F * B + 1,), where in `values` each bag begins, and N; a bag may be empty.
            None: every bag has one id.
        jagged_tables: F where there are offsets, which do not say it of a batch without rows.
    """

    values: Array
    offsets: Array | None = None
    jagged_tables: int = 0

    @property
    def tables(self) -> int:
        """F."""
        return self.values.shape[0] if self.offsets is None else self.jagged_tables

    @property
    def rows(self) -> int:
        """B."""
        if self.offsets is None:
            return self.values.shape[1]
        return (self.offsets.shape[0] - 1) // self.jagged_tables

    @property
    def num_ids(self) -> int:
        """N, repeated ones counted."""
        return prod(self.values.shape)

    def map(self, function: Callable[[Array], Other]) -> Bags[Other]:
        """The same ids in other arrays."""
        offsets = None if self.offsets is None else function(self.offsets)
        return Bags(function(self.values), offsets, self.jagged_tables)
