"""What a section says of a flat tensor, and how a copy of the tensor follows it.

K elements said, N elements of the tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.scatter import put
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import sparse_of
from dlrm_hybrid.wire.ternary import is_ternary, ternary_of
from dlrm_hybrid.wire.values import values_of

Array = NDArray[np.float32]
Indices = NDArray[np.int32]


class Changes(NamedTuple):
    """Values of some elements, or of all.

    Attributes:
        indices_K: ascending; None for all elements.
        values_K: float32; may view a payload.
    """

    indices_K: Indices | None
    values_K: Array


def changes_of(section: Section, what: str) -> Changes:
    """What a section says.

    Raises:
        DlrmError: nothing; the message begins with `what`.
    """
    if section.encoding is Encoding.DENSE and section.dtype is Dtype.FLOAT32:
        return Changes(None, array_of(section))
    try:
        if is_ternary(section):
            return Changes(None, ternary_of(section))
        if section.encoding is Encoding.DENSE:
            return Changes(None, values_of(section))
        said = sparse_of(section)
    except SectionError as error:
        raise DlrmError(f"{what}: {error}") from error
    return Changes(said.indices_K, said.values_K)


def whole(changes: Changes, count: int) -> Changes:
    """The same with zeros for all elements of which nothing is said."""
    spread_N = np.zeros(count, np.float32)
    follow(spread_N, changes, adds=False)
    return Changes(None, spread_N)


def follow(copy_N: Array, changes: Changes, *, adds: bool) -> None:
    """Take over new values, or add differences."""
    indices_K, values_K = changes
    if indices_K is None:
        if adds:
            np.add(copy_N, values_K, out=copy_N)
        else:
            np.copyto(copy_N, values_K)
    elif adds:
        put(indices_K, copy_N[indices_K] + values_K, copy_N)
    else:
        put(indices_K, values_K, copy_N)
