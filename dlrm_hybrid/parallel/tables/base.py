"""Embedding tables as protocols: the lookups and updates of one trainer, wherever the rows are.

Shapes: B batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.ends import Remembered
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.types import BatchNumber, Group, Version


class Tables(Protocol):
    """One trainer's access to the tables; several batches may be between lookup and update.

    Attributes:
        remembered: compression state of exchanged rows; None without any.
    """

    remembered: Remembered | None = None

    def prefetch(self, batch: BatchNumber, bags: Bags[Tensor]) -> None:
        """Request the rows of a batch whose `lookup` will follow; may do nothing.

        Args:
            batch: its number; batches come in order, each at least once.
            bags: its ids.
        """

    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        """Pooled rows float32 (B, F, D), detached; an `update` of the batch must follow.

        Args:
            batch: its number.
            bags: its ids.
            lr: learning rate of the rows in this batch: FBGEMM needs it before the lookup.
        """
        ...

    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        """Update the rows that a batch looked up.

        Args:
            batch: its number; forgotten afterwards.
            gradient_BFD: gradient of this trainer's own mean loss, float32.
        """
        ...

    def begin_evaluation(self) -> None:
        """Let `predict` keep the rows that it fetches, as no table changes before `lookup`."""

    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        """Pooled rows as from `lookup`, without an update to follow."""
        ...

    def state_ahead(self) -> Program[list[Piece]]:
        """The state of rows requested ahead, for a checkpoint; waits for them."""
        yield from ()
        tensors = {} if self.remembered is None else self.remembered.tensors()
        return full_pieces(tensors, Group.LEVELS)

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Per counter: (total, sent or lost) since the last call."""
        return {} if self.remembered is None else self.remembered.counts()

    def flush(self) -> Program[None]:
        """Send gradients that are held back, after the last update and before `settle`."""
        yield from ()

    def settle(self) -> Program[None]:
        """Wait until no message of this trainer is under way, and its updates are applied.

        Rows that were requested ahead are dropped; the next `prefetch` requests them anew.
        """
        yield from ()

    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        """Resume after `version` batches, with nothing under way but what `values` hold.

        Args:
            version: the number of the next batch.
            values: `state_ahead` of this trainer, and other tensors; may have none of it.
        """
        if self.remembered is not None:
            self.remembered.load(values)


def mean_part(gradient_BFD: Tensor, trainers: int) -> Tensor:
    """One trainer's share of the gradient of the mean loss of all trainers."""
    return gradient_BFD if trainers == 1 else gradient_BFD / trainers
