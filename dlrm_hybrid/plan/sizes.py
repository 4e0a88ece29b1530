"""Bytes of every frame of a training step, in closed form.

A frame is what `wire.frame` draws: 40 bytes, and for each section 16 and its payload filled up to a
multiple of 8. What a payload takes on average follows from how many elements are sent, taking them
for spread evenly: gaps between them are then geometric, and so are the lengths of their Rice codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

FRAME_BYTES, SECTION_BYTES, ALIGNMENT_BYTES = 40, 16, 8
INDEX_BYTES = 4
RICE_HEAD_BYTES = 4
MOST_RICE_PARAMETER = 31
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of levels of updates, measured on synthetic rows: what is left of the entropy of positions spread
# evenly when they come by popularity, and bits of a level, its part of tables included: a fit,
# docs/plan.md says how far off.
POPULARITY, LEVEL_BITS = 0.42, 3.3
# Of a row and of its gradient as levels, measured with SGD and row-wise Adagrad.
ROW_LEVELS_BYTES = 1.0
MOST_ROW_WIDTH = 256  # of a matrix whose indices may be a byte each


def frame_bytes(payloads: Iterable[float]) -> float:
    """Of a frame with sections of so many bytes."""
    aligned = (math.ceil(one / ALIGNMENT_BYTES) * ALIGNMENT_BYTES for one in payloads)
    return FRAME_BYTES + sum(SECTION_BYTES + one for one in aligned)


def rice_bits(density: float) -> float:
    """Of the Rice code of a gap with the best parameter, on average.

    Args:
        density: share of the elements that are sent, above 0 and below 1.
    """
    stay = math.log1p(-density)
    return min(
        parameter + 1 / -math.expm1(stay * 2**parameter)
        for parameter in range(MOST_RICE_PARAMETER + 1)
    )


def dense_bytes(count: float, precision: str) -> float:
    """Payload of all elements of a tensor."""
    return count * VALUE_BYTES[precision]


def sparse_bytes(
    count: int, kept: float, precision: str, width: int | None = None, *, rice: bool = True
) -> float:
    """Payload of some elements of a tensor in the encoding that takes the fewest bytes.

    Args:
        count: elements of the tensor.
        kept: how many are sent, on average.
        precision: of values on the wire.
        width: of the rows of a matrix whose indices may be sent row by row; None for a tensor.
        rice: whether indices may be Rice codes.
    """
    if kept >= count:
        return dense_bytes(count, precision)
    if kept <= 0:
        return 0.0
    value = VALUE_BYTES[precision]
    indices = [INDEX_BYTES * kept, count / 8]
    if rice:
        indices.append(RICE_HEAD_BYTES + math.ceil(kept * rice_bits(kept / count) / 8))
    if width is not None and width <= MOST_ROW_WIDTH:
        indices.append(count / width + kept)
    return math.ceil(min(indices) / value) * value + kept * value


def levels_bytes(count: int, kept: float) -> float:
    """Of a tensor's elements among those of a bucket that are coded together as levels.

    Args:
        count: elements of the tensor.
        kept: how many are sent, on average.
    """
    if kept <= 0:
        return 0.0
    density = min(kept / count, 1.0)
    even_bits = -math.log2(density)
    if density < 1:
        even_bits -= (1 - density) / density * math.log2(1 - density)
    return kept * (POPULARITY * even_bits + LEVEL_BITS) / 8


def activation_bytes(count: int, kept: float, bits: int) -> float:
    """Payload of kept activations as levels, an estimate: entropies follow from no formula.

    If all units were kept as often, positions would take the entropy of the share that is kept; at
    a tenth, cuts of `make train` take 0.39 of that. Its levels took so much less than their bits.
    Tables come on top, a hundredth of a run of 2,000 messages.
    """
    share = min(max(kept / count, 1e-9), 1 - 1e-9)
    even_bits = -count * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return (0.39 * even_bits + (bits - 1.45) * kept) / 8


def activation_gradient_bytes(kept: float, bits: int) -> float:
    """Payload of the gradients of kept activations as levels; an estimate as `activation_bytes`."""
    return (bits - 2.15) * kept / 8


def id_set_bytes(counts: Sequence[float], rows: Sequence[int], most: int) -> float:
    """Payload of the distinct ids of a batch.

    Args:
        counts: distinct ids of each table, on average.
        rows: of each table.
        most: ids that the batch has of any table, repeated ones counted.
    """
    bits = 0.0
    for count, total in zip(counts, rows, strict=True):
        bits += min(total, most).bit_length()
        if 0 < count < total:
            bits += 5 + count * rice_bits(count / total)
    return math.ceil(bits / 8)


def union(density: float, trainers: float) -> float:
    """Share of the elements that some of several trainers send that know nothing of each other.

    Args:
        density: share that each of them sends.
        trainers: how many; a fraction stands for trainers that are alike.
    """
    return -math.expm1(trainers * math.log1p(-density)) if density < 1 else 1.0


BUILD_UP: Sequence[tuple[int, float, float]] = (
    (2, 1.72, 0.0185),
    (4, 2.86, 0.0311),
    (16, 7.39, 0.0686),
)
"""By trainers: how many times denser a pull is than a push, and its density, measured with 128 rows
for each trainer: docs/results/buildup.md, `dct`."""


def build_up(trainers: int) -> float:
    """How many trainers that know nothing of each other send as many elements as these do.

    Trainers see alike rows of one model, so what they send overlaps more than chance would have it.
    Powers of the number of trainers between those that were measured, and beyond.
    """
    powers = [
        (n, math.log(math.log1p(-pull) / math.log1p(-pull / times)) / math.log(n))
        for n, times, pull in BUILD_UP
    ]
    if trainers <= powers[0][0]:
        return float(trainers) ** powers[0][1]
    for (low, at_low), (high, at_high) in zip(powers, powers[1:], strict=False):
        if trainers <= high:
            share = math.log(trainers / low) / math.log(high / low)
            return trainers ** (at_low + share * (at_high - at_low))
    return trainers ** powers[-1][1]
