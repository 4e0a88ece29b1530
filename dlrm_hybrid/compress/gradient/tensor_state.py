"""What a sparsifier remembers of one tensor.

All that a resumed run needs lies in arrays; tensors over the same memory go to the checkpoint.

Shapes: N elements of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan


@final
class TensorState:
    """Residual, threshold and its life, and the ledger of drains.

    Args:
        spec: of the tensor.
        keep: elements that should leave in each step.
        offset: steps by which its fixed renewals come early.
        memory: of the threshold rule.

    Attributes:
        residual_N: float32.
        drains: int64, one element: how often the residual was drained.
    """

    def __init__(self, spec: Spec, *, keep: int, offset: int, memory: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.keep = keep
        self.memory = memory
        self.residual_N = np.zeros(spec.count, np.float32)
        self.drains = np.zeros(1, np.int64)
        self._discarded = np.zeros(2, np.float64)  # sum, then the L2 norms of all drains
        # NaN stands for none yet; where everything leaves there is nothing to find.
        self._threshold = np.full(1, 0 if keep == spec.count else np.nan, np.float32)
        self._life = np.zeros(2, np.int64)  # age in steps, elements sent
        self._offset = offset
        self._steps = 0
        self._sent = 0
        self._threshold_sum = 0.0
        self._thresholds = 0
        self._renewals = 0

    @property
    def tau(self) -> float:
        """The threshold; NaN before the first."""
        return self._threshold.item()

    def is_over(self, lifespan: LifeSpan, step: int) -> bool:
        """Whether a new threshold is due before this step."""
        if self.keep == self.spec.count:
            return False
        age, sent = self._life.tolist()
        return math.isnan(self.tau) or lifespan.ended(
            step=step + self._offset, age=age, sent=sent, keep=self.keep
        )

    def renew(self, tau: float) -> None:
        """Begin the life of a threshold."""
        self._threshold[0] = tau
        self._life[:] = 0
        self._renewals += 1

    def serve(self, count: int) -> None:
        """One more step of the threshold's life, in which `count` elements reached it."""
        self._life[0] += 1
        self._life[1] += count

    def discard(self) -> None:
        """Forget the residual; the ledger takes its sum and its norm, in float64."""
        lost_N = self.residual_N.astype(np.float64)
        self._discarded += (lost_N.sum(), np.linalg.norm(lost_N))
        self.residual_N[:] = 0

    def count_step(self, sent: int) -> None:
        """For the report: one more step, `sent` elements left."""
        self._steps += 1
        self._sent += sent
        if not math.isnan(self.tau):
            self._threshold_sum += self.tau
            self._thresholds += 1

    def tensors(self) -> dict[str, Tensor]:
        """Views of everything a checkpoint must hold, by "<tensor>.<what>"."""
        small = {
            "threshold": self._threshold,
            "life": self._life,
            "drains": self.drains,
            "discarded": self._discarded,
        }
        views = {
            "residual": torch.from_numpy(self.residual_N).view(self.spec.shape),
            **{name: torch.from_numpy(array) for name, array in small.items()},
            **self.memory,
        }
        return {f"{self.spec.name}.{name}": view for name, view in views.items()}

    def report(self) -> TensorReport:
        """Counts since the last report."""
        report = TensorReport(
            elements=self._steps * self.spec.count,
            sent=self._sent,
            threshold=None if math.isnan(self.tau) else self.tau,
            threshold_sum=self._threshold_sum,
            thresholds=self._thresholds,
            renewals=self._renewals,
        )
        self._steps = self._sent = self._thresholds = self._renewals = 0
        self._threshold_sum = 0.0
        return report
