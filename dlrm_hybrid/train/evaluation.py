"""The rows of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards


@dataclass(frozen=True, slots=True)
class TestPart:
    """Rows to evaluate, in file order.

    Attributes:
        shards: prepared rows.
        rows: which of them.
        batch_size: rows predicted at once; the scores do not depend on it.
    """

    shards: Shards
    rows: range
    batch_size: int

    def batches(self) -> Iterator[Batch]:
        """All rows; the last batch may be smaller."""
        return sequential_batches(self.shards, self.rows, self.batch_size)
