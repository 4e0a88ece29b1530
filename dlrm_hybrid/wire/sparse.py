"""Some elements of a tensor as a section, in the encoding that takes the fewest bytes.

A payload is the indices (`wire.indices`), then the values in the same order. Indices rise. DENSE
stands for all elements, never for fewer: what a section means does not hang on how it is encoded.

Any payload gives indices that rise from 0 to N - 1 and as many values, or a `SectionError`. No
memory is taken beyond ten bytes for every value that the payload has room for, and, where it is as
long as a bitmap, for a bitmap.

Shapes: K elements of N; a matrix has B rows; E = T + 1 places between which T tensors lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.rice import MAX_RICE, STORE_BYTES, write_sections
from dlrm_hybrid.wire.indices import (
    MAX_COLUMNS,
    Bytes,
    Int32s,
    bitmap_of,
    error,
    index32_of,
    padded,
    read_bitmap,
    read_index32,
    read_rice,
    read_rows,
    rice_of,
    rice_size,
    unordered,
)
from dlrm_hybrid.wire.indices import rows_of as row_bytes_of
from dlrm_hybrid.wire.section import ELEMENT_BYTES, FLOATS, Dtype, Encoding, Section
from dlrm_hybrid.wire.values import Float32s, pack, packed, unpack, values_of, write

Int64s = NDArray[np.int64]

MAX_COUNT = 2**31 - 1

# By the numbers of kernels/rice.py.
_FORMS = (Encoding.DENSE, Encoding.INDEX32, Encoding.BITMAP, Encoding.RICE)

_READERS = {
    Encoding.INDEX32: read_index32,
    Encoding.BITMAP: read_bitmap,
    Encoding.RICE: read_rice,
}


@final
@dataclass(frozen=True, slots=True)
class Sparse:
    """What a section holds, in memory of its own.

    Attributes:
        indices_K: int32, rising.
        values_K: float32.
    """

    indices_K: Int32s
    values_K: Float32s


def sparse(tensor: int, count: int, indices_K: Int32s, values_K: Float32s, dtype: Dtype) -> Section:
    """The smallest section of these elements; one that holds all views its values for FLOAT32.

    RICE is tried up to one element in two; above that a bitmap is as short for random indices.

    Args:
        tensor: number of the tensor.
        count: its elements N, below 2**31.
        indices_K: int32, contiguous, rising from 0 to N - 1.
        values_K: float32, contiguous, already rounded by `wire.values.narrow`.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.

    Raises:
        ValueError: some but not all elements, and indices that do not rise from 0 to N - 1.
    """
    if indices_K.size == count:
        return packed(tensor, values_K, dtype)
    if indices_K.size == 0:
        return Section(tensor, Encoding.INDEX32, dtype, count, b"")
    choice = _smallest(indices_K, count, 0, ELEMENT_BYTES[dtype], True)
    return _section(tensor, dtype, values_K, count, choice)


def sparse_all(
    tensors: Sequence[int],
    counts_T: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    dtype: Dtype,
) -> list[Section]:
    """The `sparse` sections of T tensors, many times faster than one by one.

    The payloads share memory with each other, none with the arguments.

    Args:
        tensors: their numbers.
        counts_T: int64, elements of each, below 2**31.
        bounds_E: int64, T + 1 places: where the elements of each begin among the K of all, and the
            end of the last.
        indices_K: int32, contiguous, those of each tensor rising from 0 to its count - 1.
        values_K: float32, contiguous, already rounded by `wire.values.narrow`.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.

    Raises:
        ValueError: some but not all elements of a tensor, and indices that do not rise from 0 to
            its count - 1.
    """
    values = pack(values_K, dtype)
    out = np.empty(4 * indices_K.size + values.size + STORE_BYTES, np.uint8)
    forms_T, stops_T = np.empty(counts_T.size, np.int64), np.empty(counts_T.size, np.int64)
    fault = write_sections(counts_T, bounds_E, indices_K, values, out, forms_T, stops_T)
    if fault >= 0:
        raise unordered(int(counts_T[fault]))
    made: list[Section] = []
    payloads, start = out.data, 0
    described = zip(tensors, counts_T.tolist(), forms_T.tolist(), stops_T.tolist(), strict=True)
    for tensor, count, form, stop in described:
        made.append(Section(tensor, _FORMS[form], dtype, count, payloads[start:stop]))
        start = stop
    return made


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
        indices_K: int32, contiguous, rising: row times width plus column.
        values_K: float32, contiguous, already rounded by `wire.values.narrow`.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
        allow_rice: whether RICE may be used, which takes longer than ROWS to write and to read.

    Raises:
        ValueError: some but not all elements, and indices that do not rise from 0 to N - 1.
    """
    count = shape[0] * shape[1]
    if indices_K.size in (0, count):
        return sparse(tensor, count, indices_K, values_K, dtype)
    width = shape[1] if shape[1] <= MAX_COLUMNS else 0
    choice = _smallest(indices_K, count, width, ELEMENT_BYTES[dtype], allow_rice)
    return _section(tensor, dtype, values_K, count, choice)


def sparse_of(section: Section) -> Sparse:
    """The elements of a section that `sparse` made, or of a dense one.

    Raises:
        SectionError: no such section has this payload.
    """
    if section.encoding is Encoding.DENSE:
        values_K = values_of(section)
        return Sparse(np.arange(values_K.size, dtype=np.int32), values_K)
    reader = _READERS.get(section.encoding)
    if reader is None:
        raise error(section, "only the shape of its matrix tells what it holds")
    _check(section)
    indices_K, start = reader(section)
    return Sparse(indices_K, _values(section, start))


def rows_of(section: Section, shape: tuple[int, int]) -> tuple[Int32s, Float32s]:
    """Flat indices and values of a section that `rows` made of a matrix of this shape.

    Raises:
        SectionError: no such section has this payload, or it is of another size.
    """
    if section.count != shape[0] * shape[1]:
        raise error(section, f"{section.count} elements are no matrix of {shape[0]} × {shape[1]}")
    if section.encoding is not Encoding.ROWS:
        found = sparse_of(section)
        return found.indices_K, found.values_K
    _check(section)
    indices_K, start = read_rows(section, shape)
    return indices_K, _values(section, start)


def _section(
    tensor: int, dtype: Dtype, values_K: Float32s, count: int, choice: tuple[Encoding, Bytes]
) -> Section:
    encoding, part = choice
    payload = np.empty(part.size + values_K.size * ELEMENT_BYTES[dtype], np.uint8)
    payload[: part.size] = part
    write(values_K, dtype, payload[part.size :])
    return Section(tensor, encoding, dtype, count, payload.data)


def _smallest(
    indices_K: Int32s, count: int, width: int, value_bytes: int, allow_rice: bool
) -> tuple[Encoding, Bytes]:
    """How to write some but not all indices; `width` is 0 where ROWS may not be used."""
    num_values = indices_K.size
    sizes = {
        Encoding.INDEX32: 4 * num_values,
        Encoding.BITMAP: padded((count + 7) // 8, value_bytes),
    }
    if width:
        sizes[Encoding.ROWS] = padded(count // width + num_values, value_bytes)
    parameter = 0
    if allow_rice and 2 * num_values <= count and num_values <= MAX_RICE:
        parameter, rice_bytes = rice_size(indices_K, count)
        sizes[Encoding.RICE] = padded(rice_bytes, value_bytes)
    encoding = min(sizes, key=sizes.__getitem__)
    num_bytes = sizes[encoding]
    if encoding is Encoding.INDEX32:
        return encoding, index32_of(indices_K, count)
    if encoding is Encoding.BITMAP:
        return encoding, bitmap_of(indices_K, count, num_bytes)
    if encoding is Encoding.RICE:
        return encoding, rice_of(indices_K, parameter, num_bytes)
    part = row_bytes_of(indices_K, count, width, num_bytes)
    if part is None:
        return _smallest(indices_K, count, 0, value_bytes, allow_rice)
    return encoding, part


def _check(section: Section) -> None:
    if section.dtype not in FLOATS or section.count > MAX_COUNT:
        raise error(section, f"it holds {section.count} elements of {section.dtype.name.lower()}")


def _values(section: Section, start: int) -> Float32s:
    return unpack(memoryview(section.payload)[start:], section.dtype)
