"""Sections as a receiver expects them, and nothing else.

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key, Sections
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.kernels.scatter import scatter
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section


def only_section(
    sections: Sections, dtype: Dtype, shape: Sequence[int], key: Key, *, dense: bool
) -> Section:
    """The one section of a tensor of this type and shape; DENSE, or any encoding.

    Raises:
        DlrmError: there is none, another or one more; names batch, boundary and micro-batch.
    """
    for section in sections if len(sections) == 1 else ():
        is_fitting = (section.dtype, section.count) == (dtype, prod(shape))
        if is_fitting and (section.encoding is Encoding.DENSE or not dense):
            return section
    expected = f"{'DENSE ' if dense else ''}{dtype.name} of {' x '.join(map(str, shape))} elements"
    raise DlrmError(f"{key}: {_shown(sections)}, expected {expected}")


def dense_tensor(sections: Sections, shape: torch.Size, key: Key) -> Tensor:
    """A tensor sent as it is, in memory of torch; raises as `only_section`."""
    section = only_section(sections, Dtype.FLOAT32, shape, key, dense=True)
    tensor = torch.empty(shape)
    np.copyto(host_array(tensor.view(-1), "received", "activation"), array_of(section))
    return tensor


def scattered(
    indices_K: NDArray[np.int32], values_K: NDArray[np.float32], shape: torch.Size
) -> Tensor:
    """A tensor of values at flat positions, ascending, and of 0 elsewhere; K of them."""
    tensor = torch.empty(shape)
    scatter(indices_K, values_K, host_array(tensor.view(-1), "received", "activation"))
    return tensor


def _shown(sections: Sections) -> str:
    shown = (f"{one.encoding.name} {one.dtype.name} of {one.count}" for one in sections)
    return ", ".join(shown) or "nothing"
