"""Some elements of tensors as sections, each in the encoding that takes the fewest bytes.

A payload is the indices, then the values in the same order. Indices increase. DENSE stands for all
elements, never for fewer: what a section means does not depend on how it is encoded. The indices
are

    INDEX32   K indices, i32 each
    BITMAP    bit i of byte b says whether element 8 b + i is there
    RICE      u32: K in the low 27 bits, the parameter above │ the gaps (kernels/gaps.py)
    ROWS      of a matrix of B rows: how many of each, u8 each │ their K columns, u8 each

filled up with zeros to a multiple of a value's size. Any payload gives indices that increase from 0
to N - 1 and as many values, or a `SectionError`. To read them takes no more memory than ten bytes
for every value that the payloads have room for, and the payloads.

Shapes: K elements of N; a matrix has B rows; T sections, E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s, UInt64s
from dlrm_hybrid.kernels.gaps import (
    BITS_OF_A_COUNT,
    BITS_OF_AN_ID,
    STORE_BYTES,
    decode_ids,
    encode_ids,
)
from dlrm_hybrid.kernels.scatter import put_all
from dlrm_hybrid.kernels.sections import (
    SIZE,
    Format,
    read_sections,
    write_sections,
)
from dlrm_hybrid.wire.dense import pack, unpack
from dlrm_hybrid.wire.section import (
    ELEMENT_BYTES,
    ENCODINGS,
    FLOATS,
    MAX_COUNT,
    Dtype,
    Encoding,
    Section,
    SectionError,
)


@final
class Destination:
    """The tensors that updates are written to, in place.

    Args:
        arrays: float32, contiguous; never moved in memory.
    """

    def __init__(self, arrays: Sequence[Float32s]) -> None:
        self.arrays = arrays
        self.addresses_T = addresses_of(arrays)
        self.counts_T = np.array([array_N.size for array_N in arrays], np.int64)


class Elements(NamedTuple):
    """Some elements of each of several tensors, in memory of their own.

    Attributes:
        offsets_E: int64, where the elements of each tensor begin among the K, then K.
        indices_K: int32, in their tensors, increasing in each.
        values_K: float32.
    """

    offsets_E: Int64s
    indices_K: Int32s
    values_K: Float32s

    def values_of(self, tensor: int) -> Float32s:
        """The values for one tensor."""
        return self.values_K[self.offsets_E[tensor] : self.offsets_E[tensor + 1]]

    def copy_to(self, destination: Destination) -> None:
        """Overwrite these elements."""
        put_all(destination.addresses_T, destination.counts_T, *self, adds=False)

    def add_to(self, destination: Destination) -> None:
        """Add to these elements."""
        put_all(destination.addresses_T, destination.counts_T, *self, adds=True)


def sparse(tensor: int, count: int, indices_K: Int32s, values_K: Float32s, dtype: Dtype) -> Section:
    """The smallest section of these elements; `encode_sparse` of one tensor."""
    counts_1, offsets_2 = np.array([count]), np.array([0, indices_K.size])
    return encode_sparse((tensor,), counts_1, offsets_2, indices_K, values_K, dtype)[0]


def rows(
    tensor: int,
    shape: tuple[int, int],
    indices_K: Int32s,
    values_K: Float32s,
    dtype: Dtype,
    allow_rice: bool,
) -> Section:
    """As `sparse`, of a matrix: ROWS too, where it is smaller.

    Args:
        tensor: number of the tensor.
        shape: B rows and their width; ROWS needs a width of at most 256, and no row of 256.
        indices_K: int32, contiguous, increasing: row times width plus column.
        values_K: float32, contiguous, rounded as `wire.dense.narrow` does.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
        allow_rice: whether RICE may be used, which takes longer than ROWS to write and to read.

    Raises:
        ValueError: some but not all elements, and indices that do not increase from 0 to N - 1.
    """
    arrays = (np.array([shape[0] * shape[1]]), np.array([0, indices_K.size]), indices_K, values_K)
    return encode_sparse((tensor,), *arrays, dtype, width=shape[1], allow_rice=allow_rice)[0]


def encode_sparse(
    tensors: Sequence[int],
    counts_T: Int64s,
    offsets_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    dtype: Dtype,
    *,
    width: int = 0,
    allow_rice: bool = True,
) -> list[Section]:
    """The smallest section of some elements of each of T tensors, in one go.

    The payloads share memory with each other, none with the arguments.

    Args:
        tensors: their numbers.
        counts_T: int64, elements of each, below 2**31.
        offsets_E: int64, where the elements of each begin among the K of all, then K.
        indices_K: int32, contiguous, those of each tensor increasing from 0 to its count - 1.
        values_K: float32, contiguous, rounded as `wire.dense.narrow` does.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
        width: of the matrices that all tensors are, for ROWS; 0 for none.
        allow_rice: whether RICE may be used.

    Raises:
        ValueError: some but not all elements of a tensor, and indices that do not increase from 0
            to its count - 1.
    """
    format = Format(width, allow_rice, ELEMENT_BYTES[dtype])
    # The kernel rounds to bfloat16 as it writes, without a pass of its own.
    values = pack(values_K, dtype) if dtype is Dtype.FLOAT16 else values_K.view(np.uint8)
    forms_T2 = np.empty((len(tensors), 2), np.int64)
    # No form takes more for an index than INDEX32.
    out = np.empty((4 + format.value_bytes) * indices_K.size + STORE_BYTES, np.uint8)
    fault = write_sections(counts_T, offsets_E, format, indices_K, values, forms_T2, out)
    if fault >= 0:
        raise ValueError(f"indices do not increase from 0 to {int(counts_T[fault]) - 1}")
    sections: list[Section] = []
    payloads, start = out.data, 0
    chosen = zip(tensors, counts_T.tolist(), forms_T2.tolist(), strict=True)
    for tensor, count, (form, stop) in chosen:
        sections.append(Section(tensor, ENCODINGS[form], dtype, count, payloads[start:stop]))
        start = stop
    return sections


def sparse_of(section: Section) -> Elements:
    """The elements of a section that `sparse` made, or of a dense one.

    Raises:
        SectionError: no such section has this payload.
    """
    return decode_sparse((section,))


def rows_of(section: Section, shape: tuple[int, int]) -> tuple[Int32s, Float32s]:
    """Flat indices and values of a section that `rows` made of a matrix of this shape.

    Raises:
        SectionError: no such section has this payload, or it is of another size.
    """
    if section.count != shape[0] * shape[1]:
        raise section.error(f"{section.count} elements are no matrix of {shape[0]} × {shape[1]}")
    elements = decode_sparse((section,), shape[1])
    return elements.indices_K, elements.values_K


def addresses_of(arrays: Sequence[Float32s]) -> UInt64s:
    """The addresses of contiguous arrays, for kernels; arrays must outlive the call."""
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    return np.array(addresses, np.uint64)


def decode_sparse(sections: Sequence[Section], width: int = 0) -> Elements:
    """The elements of sections that `encode_sparse` made, or of dense ones, in one go.

    Args:
        sections: all of one type.
        width: of the matrices that their tensors are, for ROWS; 0 for none.

    Raises:
        SectionError: no such section has the payload of one, or another type than the first.
    """
    dtype = sections[0].dtype if sections else Dtype.FLOAT32
    last = Encoding.ROWS if width else Encoding.RICE
    for section in sections:
        if section.dtype is not dtype or section.encoding > last or section.count > MAX_COUNT:
            raise _unreadable(section, dtype)
    if dtype not in FLOATS:
        raise _unreadable(sections[0], dtype)
    payloads = [section.payload for section in sections]
    joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    # Read-only whatever the frame was: one type for the kernel.
    data = np.frombuffer(memoryview(joined).toreadonly(), np.uint8)
    value_bytes = ELEMENT_BYTES[dtype]
    heads = [(int(s.encoding), s.count, len(s.payload)) for s in sections]
    room = data.size // value_bytes
    offsets_E, indices_K = np.empty(len(sections) + 1, np.int64), np.empty(room, np.int32)
    # A bfloat16 is half of a float32, and is read into its place without a pass of its own.
    target_bytes = value_bytes if dtype is Dtype.FLOAT16 else ELEMENT_BYTES[Dtype.FLOAT32]
    values = np.empty(room * target_bytes, np.uint8)
    heads_T3 = np.array(heads, np.int64).reshape(-1, 3)
    fault = read_sections(
        data, heads_T3, width, value_bytes, target_bytes, offsets_E, indices_K, values
    )
    if fault >= 0:
        raise _fault(sections[fault // 2], fault % 2)
    size = int(offsets_E[-1])
    values = values[: size * target_bytes]
    values_K = unpack(values, dtype) if dtype is Dtype.FLOAT16 else values.view(np.float32)
    return Elements(offsets_E, indices_K[:size], values_K)


def _unreadable(section: Section, dtype: Dtype) -> SectionError:
    """Why `read_sections` must not see the section."""
    name = section.dtype.name.lower()
    if section.dtype not in FLOATS or section.count > MAX_COUNT:
        return section.error(f"it holds {section.count} elements of {name}")
    if section.dtype is not dtype:
        return section.error(f"it holds {name}, others {dtype.name.lower()}")
    if section.encoding > Encoding.ROWS:
        return section.error("its elements are not listed")
    return section.error("only the shape of its matrix says what it holds")


def _fault(section: Section, fault: int) -> SectionError:
    count = section.count
    if fault == SIZE:
        return section.error(f"{len(section.payload)} bytes hold no choice of {count} elements")
    match section.encoding:
        case Encoding.INDEX32:
            return section.error(f"indices do not increase from 0 to {count - 1}")
        case Encoding.BITMAP:
            return section.error(f"the bitmap does not choose as many of {count} as have values")
        case Encoding.ROWS:
            return section.error("columns do not increase inside their rows")
        case _:
            return section.error(f"the gaps are not those of indices below {count}")


def index_set(indices_K: Int32s, count: int) -> Section:
    """Encode increasing indices, without values, as Golomb-Rice coded gaps.

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
    data = np.frombuffer(section.payload, np.uint8).copy()  # writable: one type for the kernel
    # An index takes a bit at least, whatever the head says.
    indices_K = np.empty(min(count, 8 * data.size), np.int64)
    size = decode_ids(data, *_vector(count), indices_K, np.empty(1, np.int64))
    if size < 0:
        raise section.error(f"{data.size} bytes hold no set of {count} elements")
    return indices_K[:size].astype(np.int32)


def _vector(count: int) -> tuple[Int64s, Int64s]:
    """A vector as the only table of row ids: its rows, and the bits of their number."""
    return np.array([count]), np.array([count.bit_length()])
