"""Which elements of a vector are meant, without their values, as a section of a few bits each.

The gaps between increasing indices in Golomb-Rice code (`kernels.gaps`); the reader knows how many
elements the vector has. Shapes: K indices of N elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.gaps import (
    BITS_OF_A_COUNT,
    BITS_OF_AN_ID,
    STORE_BYTES,
    decode_ids,
    encode_ids,
)
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError

Int32s = NDArray[np.int32]


def index_set(indices_K: Int32s, count: int) -> Section:
    """A section of bytes.

    Args:
        indices_K: int32, contiguous, increasing from 0 to N - 1.
        count: N, below 2**31.

    Raises:
        ValueError: the indices do not increase from 0 to N - 1.
    """
    is_increasing = bool((indices_K[1:] > indices_K[:-1]).all())
    if indices_K.size and not (is_increasing and indices_K[0] >= 0 and indices_K[-1] < count):
        raise ValueError(f"indices do not increase from 0 to {count - 1}")
    bits = BITS_OF_AN_ID * indices_K.size + BITS_OF_A_COUNT
    out = np.empty(bits // 8 + 1 + STORE_BYTES, np.uint8)
    sizes_1 = np.array([indices_K.size])
    num_bytes = encode_ids(indices_K.astype(np.int64), sizes_1, *_vector(count), out)
    return Section(0, Encoding.DENSE, Dtype.UINT8, num_bytes, out[:num_bytes].data)


def index_set_of(sections: Sequence[Section], count: int) -> Int32s:
    """Read the indices of a message that is one section of `index_set`.

    Args:
        sections: of the message.
        count: N, elements of the vector, below 2**31.

    Raises:
        SectionError: there is not one such section, or none has this payload.
    """
    if len(sections) != 1:
        reason = f"{len(sections)} sections, expected one set of indices"
        raise SectionError(0, Encoding.DENSE, reason)
    (section,) = sections
    if section.encoding is not Encoding.DENSE or section.dtype is not Dtype.UINT8:
        reason = f"{section.encoding.name} {section.dtype.name.lower()} is no set of indices"
        raise SectionError(section.tensor, Encoding.DENSE, reason)
    given = np.frombuffer(section.payload, np.uint8).copy()  # writable: one type for the kernel
    # An index takes a bit at least, whatever the head says.
    indices_K = np.empty(min(count, 8 * given.size), np.int64)
    found = decode_ids(given, *_vector(count), indices_K, np.empty(1, np.int64))
    if found < 0:
        raise section.error(f"{given.size} bytes hold no set of {count} elements")
    return indices_K[:found].astype(np.int32)


def _vector(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A vector as the only table of row ids: its rows, and the bits of their number."""
    return np.array([count]), np.array([count.bit_length()])
