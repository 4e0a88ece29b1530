"""Dropout with masks that depend on the row alone, however batches are split.

Rows are numbered over the run, batch after batch and trainer after trainer: row r of
trainer t's batch n is (n T + t) B + r. So micro-batches, stages, processes and resumed runs drop
the same activations, and T trainers with batches of B the same as one with T B.

Shapes: b consecutive rows, M width of a layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.rng import fold, splitmix64

LEVELS = 1 << 16  # 16 random bits for each activation
PER_WORD = 4  # activations


@final
@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of one layer in training (Srivastava et al., 2014), scaled as torch.nn.Dropout.

    Attributes:
        stream: seed of the layer's random bits.
        share: share of its activations dropped, in steps of 1 / 65,536.
    """

    stream: int
    share: float

    @classmethod
    def of(cls, layer: str, share: float, seed: int) -> Dropout:
        """Make the dropout of the layer of this name, `top.1`, in a run with this seed."""
        return cls(fold(seed, "dropout", layer), round(share * LEVELS) / LEVELS)

    @property
    def scale(self) -> float:
        """Factor of kept activations, which preserves their mean."""
        return 1 / (1 - self.share)

    def dropped(self, rows: range, width: int) -> Tensor:
        """Draw the mask of activations that become 0, bool (b, M).

        Args:
            rows: consecutive numbers of the rows.
            width: M.
        """
        words = -(-width // PER_WORD)
        bits = splitmix64(self.stream, len(rows) * words, first=rows.start * words)
        bits_bM = bits.view(np.uint16).reshape(len(rows), -1)[:, :width]
        return torch.from_numpy(bits_bM < np.uint16(self.share * LEVELS))
