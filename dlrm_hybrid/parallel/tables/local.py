"""Tables that this process looks up by itself: all of them, or its shards.

Sharded tables serve all trainers together, by collectives of their own process group.

Shapes: B batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.ends import Remembered
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber


class EmbeddingTables(Protocol):
    """Tables that update themselves in backward: `model.Embeddings`, or sharded ones."""

    def __call__(self, bags: Bags[Tensor]) -> Tensor:
        """Pooled rows float32 (B, F, D) of the ids of a batch."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the rows of the next lookups."""
        ...


@final
class LocalTables(Tables):
    """Looks up and updates rows at once, in this process.

    Args:
        embeddings: the tables.
        trainers: number that share them.
        clock: measures the time they take.
        remembered: compression state of exchanged rows; None without any.
        keep_rows: called before an evaluation; None where no row is exchanged.
    """

    def __init__(
        self,
        embeddings: EmbeddingTables,
        trainers: int,
        clock: SpanClock,
        remembered: Remembered | None = None,
        keep_rows: Callable[[], None] | None = None,
    ) -> None:
        self._embeddings = embeddings
        self._trainers = trainers
        self._looking_up = clock.within(Span.EMBEDDING)
        self.remembered = remembered
        self._keep_rows = keep_rows
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
    def begin_evaluation(self) -> None:
        if self._keep_rows is not None:
            self._keep_rows()

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        yield from ()
        with self._looking_up, torch.no_grad():
            return self._embeddings(bags)
