"""What a frame says of the tensors of a unit, and how copies of them follow it.

Shapes: T tensors of N elements in all, K elements said, E = T + 1 places between which they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.scatter import put_all
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.read_sparse import Parts
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import sparse_of_all
from dlrm_hybrid.wire.ternary import is_ternary, scale_of, ternary_of
from dlrm_hybrid.wire.values import values_of as dense_values

Array = NDArray[np.float32]


class Whole(NamedTuple):
    """Values of all elements.

    Attributes:
        values: of each tensor, float32; may view payloads.
        units: all values of a tensor are this, its negative or 0; None where they are not.
    """

    values: Sequence[Array]
    units: Sequence[float | None]


Changes = Whole | Parts


def changes_of(sections: Sequence[Section], what: str) -> Changes:
    """What sections say.

    Raises:
        DlrmError: one says nothing; the message begins with `what`.
    """
    try:
        if all(is_ternary(one) or one.encoding is Encoding.DENSE for one in sections):
            units = [scale_of(one) if is_ternary(one) else None for one in sections]
            return Whole([_values(section) for section in sections], units)
        return sparse_of_all(sections)
    except SectionError as error:
        raise DlrmError(f"{what}: {error}") from error


@final
class Copies:
    """Copies of tensors, which take over what is said of them, in place.

    Args:
        copies: contiguous; never moved in memory.
    """

    def __init__(self, copies: Sequence[Array]) -> None:
        self._copies = copies
        self._addresses_T = addresses_of(copies)
        self._counts_T = np.array([copy_N.size for copy_N in copies], np.int64)

    def follow(self, changes: Changes, *, adds: bool) -> None:
        """Take over new values, or add differences."""
        if isinstance(changes, Parts):
            put_all(self._addresses_T, self._counts_T, *changes, adds)
            return
        for copy_N, values_N in zip(self._copies, changes.values, strict=True):
            if adds:
                np.add(copy_N, values_N, out=copy_N)
            else:
                np.copyto(copy_N, values_N)


def values_of(changes: Changes, place: int) -> Array:
    """What is said of the tensor at this place."""
    if isinstance(changes, Whole):
        return changes.values[place]
    return changes.values_K[changes.bounds_E[place] : changes.bounds_E[place + 1]]


def addresses_of(arrays: Sequence[Array]) -> NDArray[np.uint64]:
    """Where contiguous arrays begin, for a kernel; they must outlive its call."""
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    return np.array(addresses, np.uint64)


def _values(section: Section) -> Array:
    if is_ternary(section):
        return ternary_of(section)
    return array_of(section) if section.dtype is Dtype.FLOAT32 else dense_values(section)
