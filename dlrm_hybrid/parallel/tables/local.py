"""Tables that this process looks up by itself: all of them, or its shards of them.

Sharded tables answer all trainers together, by collectives of their own process group.

Shapes: B batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber, Version


class EmbeddingTables(Protocol):
    """Tables that learn in backward: `model.Embeddings`, or sharded ones."""

    def __call__(self, bags: Bags[Tensor]) -> Tensor:
        """Pooled rows float32 (B, F, D) of the ids of a batch."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate with which the rows of the next lookups learn."""
        ...


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


@final
class LocalTables(Tables):
    """Lookups and updates that are computed at once.

    Args:
        embeddings: the tables.
        trainers: that share them.
        clock: measures the time they take.
        remembered: of the rows that have travelled; None for nothing.
    """

    def __init__(
        self,
        embeddings: EmbeddingTables,
        trainers: int,
        clock: SpanClock,
        remembered: Remembered | None = None,
    ) -> None:
        self._embeddings = embeddings
        self._trainers = trainers
        self._looking_up = clock.within(Span.EMBEDDING)
        self._remembered = remembered
        self._pooled: dict[BatchNumber, Tensor] = {}

    @override
    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        yield from ()
        with self._looking_up:
            self._embeddings.set_lr(lr)
            self._pooled[batch] = pooled_BFD = self._embeddings(bags)
            return pooled_BFD.detach()

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        yield from ()
        with self._looking_up:
            self._pooled.pop(batch).backward(mean_part(gradient_BFD, self._trainers))

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        yield from ()
        with self._looking_up, torch.no_grad():
            return self._embeddings(bags)

    @override
    def state_ahead(self) -> Program[dict[str, Tensor]]:
        yield from ()
        return {} if self._remembered is None else self._remembered.tensors()

    @override
    def counts(self) -> Mapping[str, tuple[int, int]]:
        return {} if self._remembered is None else self._remembered.counts()

    @override
    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        if self._remembered is not None:
            self._remembered.load(values)
