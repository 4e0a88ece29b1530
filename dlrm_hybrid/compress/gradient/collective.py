"""Rounds in which trainers agree before they send: what each contributes, how a server reduces it.

In a round every trainer of a stage contributes sections, and all get the same result. Which rounds
a step has is known from the method on both sides, so no frame says it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set, index_set_of

Sections = tuple[Section, ...]
Result = TypeVar("Result")


class Op(Enum):
    """How a server reduces the contributions of a round to its result.

    LEADER: that of trainer `step % trainers`, a set of indices or lists of counts.
    UNION: of sets of indices.
    MAX: of lists of scales, element by element.
    """

    LEADER = "leader"
    UNION = "union"
    MAX = "max"


class Collective(NamedTuple):
    """One round between the trainers of a stage: what a trainer yields to be sent its result.

    Attributes:
        op: what becomes of the contributions.
        value: its own contribution; empty where it only listens.
    """

    op: Op
    value: Sections


def reduce(op: Op, contributions: Sequence[Sections], step: int, count: int) -> Sections:
    """Reduce the contributions of all trainers to the result of a round.

    Raises:
        SectionError: a contribution is not what the operation takes.
    """
    if op is Op.LEADER:
        sections = contributions[step % len(contributions)]
        if len(sections) == 1 and sections[0].dtype is Dtype.UINT8:
            index_set_of(sections, count)
        else:
            counts_of(sections)
        return sections
    if op is Op.UNION:
        chosen_K = np.concatenate([index_set_of(c, count) for c in contributions])
        chosen_K.sort()
        is_first_K = np.ones(chosen_K.size, bool)  # six times as fast as np.unique
        np.not_equal(chosen_K[1:], chosen_K[:-1], out=is_first_K[1:])
        return (index_set(chosen_K[is_first_K], count),)
    largest_Q = scales_of(contributions[0])
    for contribution in contributions[1:]:
        scales_Q = scales_of(contribution)
        if scales_Q.size != largest_Q.size:
            raise round_fault(f"{scales_Q.size} scales, and {largest_Q.size} of another trainer")
        largest_Q = np.maximum(largest_Q, scales_Q)
    return (dense(0, largest_Q),)


def encode_together(
    encodings: Sequence[Generator[Collective, Sections, Result]], step: int, count: int
) -> list[Result]:
    """Encode for all trainers of a stage in one process, rounds included.

    Args:
        encodings: of `Compressor.encode`, in trainer order; a single trainer agrees with itself.
        step: of the encodings.
        count: N, elements of the stage.

    Raises:
        SectionError: as `reduce`.
        DlrmError: not all are in the same round.
    """
    results: dict[int, Result] = {}
    agreed: Sections | None = None
    while True:
        rounds: list[Collective] = []
        for trainer, encoding in enumerate(encodings):
            try:
                rounds.append(next(encoding) if agreed is None else encoding.send(agreed))
            except StopIteration as end:
                results[trainer] = end.value
        if not rounds:
            return [results[trainer] for trainer in range(len(encodings))]
        op = rounds[0].op
        if len(rounds) < len(encodings) or any(r.op is not op for r in rounds):
            raise DlrmError(f"not all {len(encodings)} trainers are in a round of {op.value}")
        agreed = reduce(op, [r.value for r in rounds], step, count)


def round_fault(reason: str) -> SectionError:
    """The error for sections that are not what a round takes or gives."""
    return SectionError(0, Encoding.DENSE, reason)


def counts_of(sections: Sections) -> list[Int32s]:
    """Read lists of numbers of 0 or more, one in each section; raises SectionError."""
    if not sections:
        raise round_fault("0 sections, expected lists of numbers")
    return [_counts_of(section) for section in sections]


def scales_of(sections: Sections) -> Float32s:
    """Read the one list of finite scales of 0 or more; raises SectionError."""
    if len(sections) != 1 or sections[0].dtype is not Dtype.FLOAT32:
        raise round_fault(f"{len(sections)} sections, expected one of float32")
    if sections[0].encoding is not Encoding.DENSE:
        raise round_fault(f"{sections[0].encoding.name} is not dense")
    scales_Q: Float32s = array_of(sections[0])
    if not (np.isfinite(scales_Q) & (scales_Q >= 0)).all():
        raise round_fault("a scale is negative or not finite")
    return scales_Q


def _counts_of(section: Section) -> Int32s:
    if section.encoding is not Encoding.DENSE or section.dtype is not Dtype.INT32:
        raise round_fault(f"{section.encoding.name} {section.dtype.name.lower()} are no numbers")
    numbers_L: Int32s = array_of(section)
    if (numbers_L < 0).any():
        raise round_fault("a number is negative")
    return numbers_L
