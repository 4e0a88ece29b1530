"""Every trainer sends what any trainer has chosen: aggregation over the union of all choices.

So does DEFT (ICPP 2023, algorithm 1) with every method that it compares with: residuals stay
smaller than where each sends its own choice alone, and pushes are as large as pulls.

Shapes: N elements of all tensors of a stage, K of them, E places between which tensors lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import GradientCompressor, Spec, TensorReport
from dlrm_hybrid.compress.gradient.coordination import Sections
from dlrm_hybrid.compress.gradient.residuals import split_places
from dlrm_hybrid.wire.index_set import index_set, only_index_set_of
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse_all, sparse_of
from dlrm_hybrid.wire.values import narrow


@final
@dataclass(frozen=True, slots=True)
class UnionCoordination:
    """One round, which comes to all elements that anybody has chosen."""

    rounds: int = 1

    def combine(
        self, number: int, step: int, proposals: Sequence[Sections], count: int
    ) -> Sections:
        """The union; raises SectionError if a proposal is no set of elements."""
        chosen_K = np.concatenate([only_index_set_of(proposal, count) for proposal in proposals])
        return (index_set(np.unique(chosen_K), count),)


@final
class UnionIndex:
    """A compressor whose choice is a proposal.

    Args:
        inner: keeps a residual "<tensor>.residual" for each tensor; what leaves it is taken back,
            and leaves with what others have chosen.
        dtype: of the values sent, as `inner` rounds them.
    """

    def __init__(self, inner: GradientCompressor, dtype: Dtype) -> None:
        self._inner = inner
        self._dtype = dtype
        held = inner.tensors()
        self._residuals = [held[f"{spec.name}.residual"].view(-1).numpy() for spec in inner.specs]
        self._counts_T = np.array([spec.count for spec in inner.specs], np.int64)
        self._firsts_E = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._counts_T)])
        self._sent_T = np.zeros(len(inner.specs), np.int64)
        self._agreed_K = np.zeros(0, np.int32)

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors it was made for."""
        return self._inner.specs

    @property
    def rounds(self) -> int:
        """One."""
        return 1

    def propose(self, number: int, gradients: Mapping[str, Tensor], step: int) -> Sections:
        """What the compressor chooses."""
        sections = self._inner.encode(gradients, step)
        chosen = [np.zeros(0, np.int32)]
        for place, spec in enumerate(self.specs):
            own = sparse_of(sections[spec.name])
            # What rounding took is there already, so the sum is what it was before it left.
            self._residuals[place][own.indices_K] += own.values_K
            chosen.append(own.indices_K + np.int32(self._firsts_E[place]))
        return (index_set(np.concatenate(chosen), int(self._firsts_E[-1])),)

    def agree(self, number: int, agreed: Sections) -> None:
        """Take the union; raises SectionError if it is no set of elements."""
        self._agreed_K = only_index_set_of(agreed, int(self._firsts_E[-1]))

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Sections of the elements agreed on, zeros included, in memory of their own."""
        bounds_E, places_K = split_places(self._agreed_K, self._firsts_E)
        parts = np.split(places_K, bounds_E[1:-1])
        values_K = np.concatenate(
            [own_N[part] for own_N, part in zip(self._residuals, parts, strict=True)]
        )
        rounded_K = narrow(values_K, self._dtype)
        rests = np.split(values_K - rounded_K, bounds_E[1:-1])
        for own_N, part, rest in zip(self._residuals, parts, rests, strict=True):
            own_N[part] = rest
        self._sent_T += np.diff(bounds_E)
        numbers = [spec.id for spec in self.specs]
        sections = sparse_all(
            *(numbers, self._counts_T, bounds_E, places_K, rounded_K), self._dtype
        )
        return {spec.name: section for spec, section in zip(self.specs, sections, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """Those of the compressor."""
        return self._inner.tensors()

    def report(self) -> dict[str, TensorReport]:
        """By tensor; what was sent is what was agreed on."""
        sent, self._sent_T = self._sent_T.tolist(), np.zeros_like(self._sent_T)
        reports = self._inner.report()
        return {
            spec.name: replace(reports[spec.name], sent=count)
            for spec, count in zip(self.specs, sent, strict=True)
        }
