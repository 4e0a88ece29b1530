"""Gradients as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport, without_threshold
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Section


@final
class NoCompression:
    """Every element as float32, nothing kept.

    Values that are not finite travel on to the server, which looks for them in every mean.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs: Sequence[Spec] = tuple(specs)
        self._steps = 0

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Sections that view the gradients."""
        self._steps += 1
        return {spec.name: dense(spec.id, gradients[spec.name].numpy()) for spec in self.specs}

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def report(self) -> dict[str, TensorReport]:
        """Everything was sent."""
        steps, self._steps = self._steps, 0
        return {
            spec.name: without_threshold(steps * spec.count, sent=steps * spec.count)
            for spec in self.specs
        }
