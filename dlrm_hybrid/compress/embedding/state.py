"""What trainers remember of rows, as the tensors of a checkpoint: `levels.<trainer>.<name>`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.embedding.trainer import TrainerMemory

Array = NDArray[np.generic]

LEVELS_PREFIX = "levels."


def tensors_of(trainer: int, memory: TrainerMemory) -> dict[str, Tensor]:
    """What a checkpoint must hold of a trainer."""
    head = f"{LEVELS_PREFIX}{trainer}."
    return {f"{head}{name}": torch.from_numpy(one) for name, one in memory.tensors().items()}


def values_of_trainer(trainer: int, values: Mapping[str, Tensor]) -> dict[str, Array]:
    """What `TrainerMemory.load` takes, among the tensors of a checkpoint; may be nothing."""
    head = f"{LEVELS_PREFIX}{trainer}."
    own = {name: one for name, one in values.items() if name.startswith(head)}
    return {name.removeprefix(head): one.numpy() for name, one in own.items()}


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeptMemory:
    """A trainer's memory, as tables in one process save and load it.

    Attributes:
        trainer: whose.
        memory: it.
    """

    trainer: int
    memory: TrainerMemory

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it."""
        return tensors_of(self.trainer, self.memory)

    def counts(self) -> dict[str, tuple[int, int]]:
        """See `TrainerMemory.counts`."""
        return self.memory.counts()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint, if that holds it."""
        if own := values_of_trainer(self.trainer, values):
            self.memory.load(own)
