"""Dropout whose masks depend on the row alone, wherever and with whatever others it is computed.

Rows are numbered over the run, in the order in which trainers' batches follow each other: row r of
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

LEVELS = 1 << 16  # of 16 random bits for each activation
PER_WORD = 4  # activations


@final
@dataclass(frozen=True, slots=True)
class Dropout:
    """What one layer drops in training (Srivastava et al., 2014), scaled as torch.nn.Dropout.

    Attributes:
        stream: seed of its random bits.
        share: of its activations that are dropped, in steps of 1 / 65,536.
    """

    stream: int
    share: float

    @classmethod
    def of(cls, layer: str, share: float, seed: int) -> Dropout:
        """Of the layer with this name, `top.1`, in a run with this seed."""
        return cls(fold(seed, "dropout", layer), round(share * LEVELS) / LEVELS)

    @property
    def scale(self) -> float:
        """Of activations that are kept, so that sums stay the same on average."""
        return 1 / (1 - self.share)

    def dropped(self, rows: range, width: int) -> Tensor:
        """bool (b, M): which activations become 0.

        Args:
            rows: their numbers, consecutive.
            width: M.
        """
        words = -(-width // PER_WORD)
        bits = splitmix64(self.stream, len(rows) * words, first=rows.start * words)
        bits_bM = bits.view(np.uint16).reshape(len(rows), -1)[:, :width]
        return torch.from_numpy(bits_bM < np.uint16(self.share * LEVELS))
