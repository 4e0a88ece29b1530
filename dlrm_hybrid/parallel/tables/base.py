"""What a worker with the interaction asks of embedding tables, wherever these are.

Shapes: B batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.types import BatchNumber, Version


class Remembered(Protocol):
    """What ends remember of what they have sent each other."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it."""
        ...

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint, if that holds it."""
        ...

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """By name, since the last call, of how many how many were sent, or lost."""
        ...


class Tables(Protocol):
    """One trainer's access to the tables; several batches may be between lookup and update.

    Attributes:
        remembered: of rows that have travelled; None for nothing.
    """

    remembered: Remembered | None = None

    def prefetch(self, batch: BatchNumber, bags: Bags[Tensor]) -> None:
        """Ask for the rows of a batch whose `lookup` will follow; may do nothing.

        Args:
            batch: its number; batches come in their order, each at least once.
            bags: its ids.
        """

    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        """Pooled rows float32 (B, F, D), detached, that `update` will follow.

        Args:
            batch: its number.
            bags: its ids.
            lr: learning rate of the rows in this batch: FBGEMM wants it before the lookup.
        """
        ...

    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        """Update the rows that a batch looked up.

        Args:
            batch: its number; forgotten afterwards.
            gradient_BFD: of the mean loss of this trainer's batch, float32; divided by the number
                of trainers here.
        """
        ...

    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        """Pooled rows as `lookup` gives them; no update follows."""
        ...

    def state_ahead(self) -> Program[dict[str, Tensor]]:
        """What a checkpoint must hold of rows that have been asked for; waits for them."""
        yield from ()
        return {} if self.remembered is None else self.remembered.tensors()

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """By name, since the last call, of how many how many were sent, or lost."""
        return {} if self.remembered is None else self.remembered.counts()

    def flush(self) -> Program[None]:
        """Send what is held back of gradients, after the last update and before `settle`."""
        yield from ()

    def settle(self) -> Program[None]:
        """Wait until no message of this trainer is under way, and its updates are applied.

        Rows that were asked for ahead are forgotten; the next `prefetch` asks for them anew.
        """
        yield from ()

    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        """Go on after so many batches, with nothing under way but what `values` hold of it.

        Args:
            version: the number of the next batch.
            values: `state_ahead` of this trainer, and other tensors; may have none of it.
        """
        if self.remembered is not None:
            self.remembered.load(values)


def mean_part(gradient_BFD: Tensor, trainers: int) -> Tensor:
    """A trainer's part of the gradient of the mean loss of all trainers."""
    return gradient_BFD if trainers == 1 else gradient_BFD / trainers
