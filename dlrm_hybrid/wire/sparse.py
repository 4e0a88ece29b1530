"""Some elements of tensors as sections, each in the encoding that takes the fewest bytes.

A payload is the indices, then the values in the same order. Indices rise. DENSE stands for all
elements, never for fewer: what a section means does not hang on how it is encoded. The indices are

    INDEX32   K indices, i32 each
    BITMAP    bit i of byte b says whether element 8 b + i is there
    RICE      u32: K in the low 27 bits, the parameter above │ the gaps (kernels/write_sections.py)
    ROWS      of a matrix of B rows: how many of each, u8 each │ their K columns, u8 each

filled up with zeros to a multiple of a value's size.

Shapes: K elements of N; a matrix has B rows; E = T + 1 places between which T tensors lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dlrm_hybrid.kernels.section_forms import MAX_COLUMNS, choose_forms
from dlrm_hybrid.kernels.write_sections import STORE_BYTES, write_sections
from dlrm_hybrid.wire.read_sparse import Int32s, Int64s, Parts, misfit, read
from dlrm_hybrid.wire.section import ELEMENT_BYTES, ENCODINGS, Dtype, Section
from dlrm_hybrid.wire.values import Float32s, pack


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
    """The smallest section of these elements; `sparse_all` of one tensor."""
    return _one(tensor, (1, count), 0, indices_K, values_K, dtype, True)


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
        values_K: float32, contiguous, rounded as `wire.values.narrow` does.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
        allow_rice: whether RICE may be used, which takes longer than ROWS to write and to read.

    Raises:
        ValueError: some but not all elements, and indices that do not rise from 0 to N - 1.
    """
    width = shape[1] if shape[1] <= MAX_COLUMNS else 0
    return _one(tensor, shape, width, indices_K, values_K, dtype, allow_rice)


def sparse_all(
    tensors: Sequence[int],
    counts_T: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    dtype: Dtype,
) -> list[Section]:
    """The smallest section of some elements of each of T tensors, in one go.

    The payloads share memory with each other, none with the arguments.

    Args:
        tensors: their numbers.
        counts_T: int64, elements of each, below 2**31.
        bounds_E: int64, T + 1 places: where the elements of each begin among the K of all, and the
            end of the last.
        indices_K: int32, contiguous, those of each tensor rising from 0 to its count - 1.
        values_K: float32, contiguous, rounded as `wire.values.narrow` does.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.

    Raises:
        ValueError: some but not all elements of a tensor, and indices that do not rise from 0 to
            its count - 1.
    """
    return _written(tensors, counts_T, bounds_E, 0, True, indices_K, values_K, dtype)


def sparse_of(section: Section) -> Sparse:
    """The elements of a section that `sparse` made, or of a dense one.

    Raises:
        SectionError: no such section has this payload.
    """
    found = read((section,), 0)
    return Sparse(found.indices_K, found.values_K)


def sparse_of_all(sections: Sequence[Section]) -> Parts:
    """The elements of sections that `sparse_all` made, or of dense ones, in one go.

    Raises:
        SectionError: no such section has the payload of one, or another type than the first.
    """
    return read(sections, 0)


def rows_of(section: Section, shape: tuple[int, int]) -> tuple[Int32s, Float32s]:
    """Flat indices and values of a section that `rows` made of a matrix of this shape.

    Raises:
        SectionError: no such section has this payload, or it is of another size.
    """
    if section.count != shape[0] * shape[1]:
        raise misfit(section, f"{section.count} elements are no matrix of {shape[0]} × {shape[1]}")
    found = read((section,), shape[1])
    return found.indices_K, found.values_K


def _one(
    tensor: int,
    shape: tuple[int, int],
    width: int,
    indices_K: Int32s,
    values_K: Float32s,
    dtype: Dtype,
    allow_rice: bool,
) -> Section:
    counts_T, bounds_E = np.array([shape[0] * shape[1]]), np.array([0, indices_K.size])
    (section,) = _written(
        (tensor,), counts_T, bounds_E, width, allow_rice, indices_K, values_K, dtype
    )
    return section


def _written(
    tensors: Sequence[int],
    counts_T: Int64s,
    bounds_E: Int64s,
    width: int,
    allow_rice: bool,
    indices_K: Int32s,
    values_K: Float32s,
    dtype: Dtype,
) -> list[Section]:
    value_bytes = ELEMENT_BYTES[dtype]
    forms_T3 = np.empty((len(tensors), 3), np.int64)
    fault = choose_forms(counts_T, bounds_E, width, allow_rice, value_bytes, indices_K, forms_T3)
    if fault >= 0:
        raise ValueError(f"indices do not rise from 0 to {int(counts_T[fault]) - 1}")
    # The kernel rounds to bfloat16 by the way: no pass of its own.
    values = pack(values_K, dtype) if dtype is Dtype.FLOAT16 else values_K.view(np.uint8)
    chosen, bounds = forms_T3.tolist(), bounds_E.tolist()
    size = sum(num_bytes for _, num_bytes, _ in chosen) + value_bytes * indices_K.size
    out = np.empty(size + STORE_BYTES, np.uint8)
    write_sections(counts_T, bounds_E, width, indices_K, values, value_bytes, forms_T3, out)
    made: list[Section] = []
    payloads, start = out.data, 0
    for place, (form, num_bytes, _) in enumerate(chosen):
        stop = start + num_bytes + value_bytes * (bounds[place + 1] - bounds[place])
        count = int(counts_T[place])
        made.append(Section(tensors[place], ENCODINGS[form], dtype, count, payloads[start:stop]))
        start = stop
    return made
