"""Consecutive rows on their way from a source to their scores.

Shapes: R rows, I dense columns, F categorical columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one source.

    Attributes:
        dense_RI: float32, as the model takes them.
        keys_FR: uint32, categories as they are in vocabularies, each column contiguous.
        label_R: float32, 0 or 1; None where the source has none.
        kept: values of other columns by name, R each.
        where: says where a row of the block comes from, for messages.
    """

    dense_RI: npt.NDArray[np.float32]
    keys_FR: npt.NDArray[np.uint32]
    label_R: npt.NDArray[np.float32] | None
    kept: Mapping[str, npt.NDArray[Any]]
    where: Callable[[int], str]

    @property
    def rows(self) -> int:
        """R."""
        return len(self.dense_RI)
