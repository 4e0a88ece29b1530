"""What a process learns with, whether it is a whole model or a whole world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.train.parts import Learned

EMBEDDING_PREFIX = "embedding."


class Engine(Protocol):
    """Model, data and optimizers of one process."""

    def learn(self, step: int, at: LoaderState) -> tuple[Learned, LoaderState]:
        """Make one step; see `Parts.learn`."""
        ...

    def evaluate(self, check: Callable[[], None]) -> BinaryScores:
        """Scores on the test part; `check` is called now and then, what it raises ends it."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Views of all that a checkpoint must hold; copying into them loads one."""
        ...

    def restart(self, step: int) -> None:
        """Go on after `step` steps, with what was copied into `tensors`."""
        ...


def checkpoint_groups(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint by file: those of the tables apart from the dense ones."""
    groups: dict[str, dict[str, Tensor]] = {"dense": {}, "embeddings": {}}
    for name, tensor in tensors.items():
        group = "embeddings" if name.startswith(EMBEDDING_PREFIX) else "dense"
        groups[group][name] = tensor
    return groups
