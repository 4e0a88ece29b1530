"""Consecutive rows on their way from a source to their scores.

Shapes: R rows, I dense columns, F categorical columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.sources.values import Values


@dataclass(frozen=True, slots=True)
class CriteoValues:
    """A block of Criteo text, as its parser reads it.

    Attributes:
        dense_RI: float32, as a model takes them.
        keys_FR: uint32, categories, each column contiguous.
    """

    dense_RI: npt.NDArray[np.float32]
    keys_FR: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one source.

    Attributes:
        values: their features.
        label_R: float32, 0 or 1; None where the source has none.
        kept: values of other columns by name, R each, as arrays of numpy or Arrow.
        where: says where a row of the block, from 0, comes from, for messages.
    """

    values: CriteoValues | Values
    label_R: npt.NDArray[np.float32] | None
    kept: Mapping[str, Any]
    where: Callable[[int], str]
