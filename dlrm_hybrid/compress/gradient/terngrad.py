"""TernGrad: gradients as -1, 0 or 1 times a scale, without bias and without a residual.

Each gradient is clipped at some standard deviations; its scale is the largest magnitude that is
left, of all trainers where they share it. An element becomes ± scale with the chance |g| / scale,
else 0, so that on average it is what it was (W. Wen et al., TernGrad, NIPS 2017, algorithm 1).

A scale is rounded up to 12 significant bits: sums over trainers are then exact, whatever the order,
and a pull can name the levels that they reach. The draws of a step depend on seed, step, trainer
and tensor alone, so there is no state to save.

Shapes: N elements of a tensor, Q tensors that become ternary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport, without_threshold
from dlrm_hybrid.compress.gradient.coordination import Sections
from dlrm_hybrid.kernels.ternary import measure
from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.ternary import ternary

Float32s = NDArray[np.float32]

_DROPPED = np.uint32(0xFFF)  # bits of a float32's fraction that a scale has not


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TernGradOptions:
    """How gradients become ternary.

    Attributes:
        clip: standard deviations at which gradients are clipped; None for nowhere.
        shares: the largest scale of all trainers serves all.
        encoding: TERNARY or TRITS.
        smallest: tensors of fewer elements stay float32.
        exempt: names of tensors that do too.
        seed: of the run.
        trainer: whose gradients these are; each draws its own.
    """

    clip: float | None
    shares: bool
    encoding: Encoding
    smallest: int
    exempt: frozenset[str]
    seed: int
    trainer: int


@final
@dataclass(frozen=True, slots=True)
class TernGradCoordination:
    """One round, which comes to the largest scale of each tensor."""

    rounds: int = 1

    def combine(
        self, number: int, step: int, proposals: Sequence[Sections], count: int
    ) -> Sections:
        """The largest scales; raises SectionError if a proposal is no list of scales."""
        scales_Q = _scales_of(proposals[0])
        for proposal in proposals[1:]:
            others_Q = _scales_of(proposal)
            if others_Q.size != scales_Q.size:
                raise _no_scales(f"{others_Q.size} scales, and {scales_Q.size} of another trainer")
            scales_Q = np.maximum(scales_Q, others_Q)
        return (dense(0, scales_Q),)


@final
class TernGrad:
    """Draws for one trainer.

    Args:
        specs: of the tensors of a stage; each has float32 elements.
        options: of the method.
    """

    def __init__(self, specs: Sequence[Spec], options: TernGradOptions) -> None:
        self.specs: Sequence[Spec] = tuple(specs)
        self._options = options
        self._ternary = [
            spec
            for spec in specs
            if spec.count >= options.smallest and spec.name not in options.exempt
        ]
        self._limits: list[float] = []
        self._scales_Q = np.zeros(0, np.float32)
        self._steps = 0

    @property
    def rounds(self) -> int:
        """One where scales are shared, else none."""
        return int(self._options.shares)

    def propose(self, number: int, gradients: Mapping[str, Tensor], step: int) -> Sections:
        """The scales that this trainer needs."""
        self._measure(gradients, step)
        return (dense(0, self._scales_Q),)

    def agree(self, number: int, agreed: Sections) -> None:
        """Take the scales that serve all trainers; raises SectionError if they do not serve."""
        scales_Q = _scales_of(agreed)
        if scales_Q.size != len(self._ternary) or (scales_Q < self._scales_Q).any():
            raise _no_scales(f"{scales_Q.size} scales do not serve {len(self._ternary)} tensors")
        self._scales_Q = scales_Q

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Codes in memory of their own, and views of the gradients that stay float32."""
        if not self._options.shares:
            self._measure(gradients, step)
        self._steps += 1
        sections = {spec.name: dense(spec.id, gradients[spec.name].numpy()) for spec in self.specs}
        drawn = zip(self._ternary, self._limits, self._scales_Q.tolist(), strict=True)
        for spec, limit, scale in drawn:
            sections[spec.name] = ternary(
                spec.id,
                gradients[spec.name].numpy().reshape(-1),
                self._options.encoding,
                limit=limit,
                scale=scale,
                key=fold(self._options.seed, "ternary", self._options.trainer, spec.name, step),
            )
        return sections

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def report(self) -> dict[str, TensorReport]:
        """Every element was sent."""
        steps, self._steps = self._steps, 0
        return {
            spec.name: without_threshold(steps * spec.count, sent=steps * spec.count)
            for spec in self.specs
        }

    def _measure(self, gradients: Mapping[str, Tensor], step: int) -> None:
        """Where each gradient is clipped, and the scale that it then needs."""
        self._limits = []
        scales: list[float] = []
        for spec in self._ternary:
            total, squares, largest = measure(gradients[spec.name].numpy().reshape(-1))
            if not math.isfinite(squares):
                raise DivergedError(
                    f"step {step + 1}: the gradient of {spec.name} is not finite; "
                    "optimizer.lr or embedding.lr may be too high"
                )
            mean = total / spec.count
            deviation = math.sqrt(max(0.0, squares / spec.count - mean * mean))
            # Where all elements are equal, clipping would leave nothing of them.
            clips = self._options.clip is not None and deviation > 0
            limit = min(largest, (self._options.clip or 0.0) * deviation) if clips else largest
            self._limits.append(limit)
            scales.append(limit)
        self._scales_Q = _rounded_up(np.array(scales, np.float32))


def _rounded_up(scales_Q: Float32s) -> Float32s:
    """To 12 significant bits; what is beyond the largest such number becomes it."""
    words_Q = (scales_Q.view(np.uint32) + _DROPPED) & ~_DROPPED
    largest = np.uint32(0x7F7FF000)
    return np.minimum(words_Q, largest).view(np.float32)


def _scales_of(sections: Sections) -> Float32s:
    if len(sections) != 1 or sections[0].dtype is not Dtype.FLOAT32:
        raise _no_scales(f"{len(sections)} sections, expected one of float32")
    if sections[0].encoding is not Encoding.DENSE:
        raise _no_scales(f"{sections[0].encoding.name} is not dense")
    scales_Q: Float32s = array_of(sections[0])
    if not (np.isfinite(scales_Q) & (scales_Q >= 0)).all():
        raise _no_scales("a scale is negative or not finite")
    return scales_Q


def _no_scales(reason: str) -> SectionError:
    return SectionError(0, Encoding.DENSE, reason)
