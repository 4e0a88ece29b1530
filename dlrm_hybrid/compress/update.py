"""New values or differences for several tensors, decoded from sections, whatever method made them.

Shapes: T tensors, K elements of them that an update names, E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, values_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import Destination, Elements, decode_sparse
from dlrm_hybrid.wire.ternary import is_ternary, scale_of, ternary_of


@final
@dataclass(frozen=True, slots=True, eq=False)
class DenseUpdate:
    """An update with a value for every element of each tensor.

    Attributes:
        values: of each tensor, float32; may view payloads.
        units: all values of a tensor are this, its negative or 0; None where they are not.
    """

    values: Sequence[Float32s]
    units: Sequence[float | None]

    def values_of(self, tensor: int) -> Float32s:
        """All values of one tensor."""
        return self.values[tensor]

    def elements(self) -> Elements:
        """The same update as one that lists every element."""
        indices = [np.arange(values_N.size, dtype=np.int32) for values_N in self.values]
        offsets_E = np.cumsum([0, *(values_N.size for values_N in self.values)])
        return Elements(offsets_E, np.concatenate(indices), np.concatenate(self.values))

    def copy_to(self, destination: Destination) -> None:
        """Overwrite all elements."""
        for array_N, values_N in zip(destination.arrays, self.values, strict=True):
            np.copyto(array_N, values_N)

    def add_to(self, destination: Destination) -> None:
        """Add to all elements."""
        for array_N, values_N in zip(destination.arrays, self.values, strict=True):
            np.add(array_N, values_N, out=array_N)


Update = DenseUpdate | Elements


def decode(sections: Sequence[Section], what: str) -> Update:
    """Decode the sections of any gradient method to an update.

    Returns:
        a DenseUpdate where all sections are dense or ternary, else Elements.

    Raises:
        DlrmError: a section has no such payload.
    """
    try:
        if all(is_ternary(section) or section.encoding is Encoding.DENSE for section in sections):
            units = [scale_of(section) if is_ternary(section) else None for section in sections]
            return DenseUpdate([_all_values(section) for section in sections], units)
        return decode_sparse(sections)
    except SectionError as error:
        raise DlrmError(f"{what}: {error}") from error


def _all_values(section: Section) -> Float32s:
    if is_ternary(section):
        return ternary_of(section)
    return array_of(section) if section.dtype is Dtype.FLOAT32 else values_of(section)
