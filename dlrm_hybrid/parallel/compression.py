"""All that one worker compresses with: what it remembers, and what it lets through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from dlrm_hybrid.compress.activation.codec import ActivationCodec
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.parallel.dense.master import copy_into
from dlrm_hybrid.telemetry.compression import ACTIVATION, GRADIENT, counted

PREFIX = "trainer."
"""Of the names of all that compressors remember."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressors of one worker.

    Attributes:
        trainer: whose worker it is.
        gradients: None where no server is pushed to.
        activations: of both its boundaries.
    """

    trainer: int
    gradients: Compressor | None
    activations: ActivationCodec

    def tensors(self) -> dict[str, Tensor]:
        """Views of what a checkpoint must hold; no two workers use the same name."""
        held = dict(self.activations.tensors())
        if self.gradients is not None:
            held |= self.gradients.tensors()
        return {f"{PREFIX}{self.trainer}.{name}": tensor for name, tensor in held.items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from the `tensors` of a checkpoint; raises DataError if one does not fit."""
        copy_into(self.tensors(), values)

    def counts(self) -> dict[str, dict[str, float]]:
        """Since the last call; see `telemetry.compression`."""
        counts = {
            f"{ACTIVATION}{boundary}": counted(
                report.elements, report.kept, report.threshold_sum, report.thresholds
            )
            for boundary, report in self.activations.report().items()
        }
        if self.gradients is None:
            return counts
        return counts | {
            f"{GRADIENT}{name}": counted(
                report.elements, report.sent, report.threshold_sum, report.thresholds
            )
            for name, report in self.gradients.report().items()
        }
