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
from typing import Literal, final

import numpy as np
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.gradient.collective import Collective, Op, round_fault, scales_of
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, Whole, all_sent
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.host import host_array, not_finite
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.kernels import magnitudes
from dlrm_hybrid.kernels import ternary as kernels
from dlrm_hybrid.rng import fold
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Encoding as WireEncoding
from dlrm_hybrid.wire.ternary import ternary

CODES = {"bits": WireEncoding.TERNARY, "trits": WireEncoding.TRITS}
_DROPPED = np.uint32(0xFFF)  # bits of a float32's fraction that a scale has not


@final
class TernaryCompressor(Compressor):
    """Sends gradients as -1, 0 or 1 times a scale, right on average (Wen et al., NIPS 2017).

    Args:
        layout: of the tensors of a stage.
        ternary: the tensors that do not stay float32.
        clip: standard deviations at which gradients are clipped; None for nowhere.
        sharing: the largest scale of all trainers serves all.
        encoding: two bits an element, or five elements a byte.
        seed: of the run.
        trainer: whose gradients these are; each draws its own.
    """

    def __init__(
        self,
        layout: Layout,
        ternary: Sequence[Spec],
        *,
        clip: float | None,
        sharing: bool,
        encoding: Literal["bits", "trits"],
        seed: int,
        trainer: int,
    ) -> None:
        self.layout = layout
        self._ternary, self._clip, self._sharing = ternary, clip, sharing
        self._encoding = CODES[encoding]
        self._seed, self._trainer = seed, trainer
        self._steps = 0

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return (Op.MAX,) if self._sharing else ()

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        arrays = {
            spec.name: host_array(gradients[spec.name], "gradient", spec.name)
            for spec in self.layout.specs
        }
        limits, scales_Q = self._measure(arrays, step)
        if self._sharing:
            own_Q = scales_Q
            scales_Q = scales_of((yield Collective(Op.MAX, (dense(0, own_Q),))))
            if scales_Q.size != own_Q.size or (scales_Q < own_Q).any():
                raise round_fault(f"{scales_Q.size} scales do not serve {own_Q.size} tensors")
        self._steps += 1
        sections = {spec.name: dense(spec.id, arrays[spec.name]) for spec in self.layout.specs}
        for spec, limit, scale in zip(self._ternary, limits, scales_Q.tolist(), strict=True):
            key = fold(self._seed, "ternary", self._trainer, spec.name, step)
            codes_N = np.empty(spec.count, np.uint8)
            kernels.ternarise(arrays[spec.name].reshape(-1), limit, scale, key, codes_N)
            sections[spec.name] = ternary(spec.id, codes_N, self._encoding, scale)
        return Whole(sections)

    @override
    def report(self) -> dict[str, SentReport]:
        steps, self._steps = self._steps, 0
        return all_sent(self.layout, steps)

    def _measure(self, arrays: Mapping[str, Float32s], step: int) -> tuple[list[float], Float32s]:
        """Where each gradient is clipped, and the scale that it then needs."""
        limits: list[float] = []
        for spec in self._ternary:
            total, _, squares, largest = magnitudes.moments(arrays[spec.name].reshape(-1), 0.0)
            if not math.isfinite(squares):
                raise not_finite(step, spec.name)
            mean = total / spec.count
            deviation = math.sqrt(max(0.0, squares / spec.count - mean * mean))
            # Where all elements are equal, clipping would make them all 0.
            clip = self._clip
            limits.append(min(largest, clip * deviation) if clip and deviation > 0 else largest)
        return limits, _rounded_up(np.array(limits, np.float32))


def _rounded_up(scales_Q: Float32s) -> Float32s:
    """Round up to 12 significant bits, but at most to the largest such number."""
    words_Q = (scales_Q.view(np.uint32) + _DROPPED) & ~_DROPPED
    largest = np.uint32(0x7F7FF000)
    return np.minimum(words_Q, largest).view(np.float32)
