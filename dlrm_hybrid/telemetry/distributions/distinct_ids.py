"""How many distinct ids a trainer's batch has, all tables together: counted in a sample of batches.

Lookups, updates and their messages grow with it. Most tables never count it, so it is counted here.

Shapes: B rows of a batch, F tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.bags import Bags, table_offsets

EVERY = 64  # batches; the first is counted, too


@final
@dataclass(slots=True)
class IdSample:
    """The ids of some batches, as they are read.

    Attributes:
        batches: that were counted.
        ids: distinct ones, summed over these.
    """

    batches: int = 0
    ids: int = 0
    _seen: int = 0

    def add(self, bags: Bags[npt.NDArray[np.int64]]) -> None:
        """Take a batch; counts each `EVERY`th."""
        if self._seen % EVERY == 0:
            self.batches += 1
            self.ids += count_distinct(bags)
        self._seen += 1

    def to_json(self) -> dict[str, int] | None:
        """What an event says; None before the first batch."""
        return {"batches": self.batches, "ids": self.ids} if self.batches else None


def count_distinct(bags: Bags[npt.NDArray[np.int64]]) -> int:
    """Distinct ids of each table, added up."""
    if bags.offsets is not None:
        by_table = np.split(bags.values, table_offsets(bags)[1:-1])
        return sum(len(np.unique(ids_N)) for ids_N in by_table)
    sorted_FB = np.sort(bags.values, axis=1)
    return bags.tables + int(np.count_nonzero(sorted_FB[:, 1:] != sorted_FB[:, :-1]))


def mean_ids(several: Iterable[Mapping[str, Any]]) -> float | None:
    """Distinct ids a batch, of all samples together; None without any."""
    counted = list(several)
    batches = sum(one["batches"] for one in counted)
    return sum(one["ids"] for one in counted) / batches if batches else None
