"""Histograms of whole numbers: nanoseconds of steps, staleness of pushes, distinct ids of batches.

Each number below 256 has a bucket of its own. Above, a bucket is at most 1/128 wide, so a quantile
is within 0.4 % of the true one. Histograms of ranks or attempts can be added.

Shapes: B rows of a batch, F tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags, table_offsets

EXACT_BITS = 8  # leading bits of a number that decide its bucket
SAMPLED = 64  # count the ids of every 64th batch, beginning with the first


@final
@dataclass(slots=True)
class Histogram:
    """Counts of whole numbers in buckets.

    Attributes:
        counts: counts by the least number of each bucket.
        total: the exact sum of all numbers.
        largest: the exact maximum of all numbers.
    """

    counts: Counter[int] = field(default_factory=Counter[int])
    total: int = 0
    largest: int = 0

    @property
    def count(self) -> int:
        """How many numbers the histogram has counted."""
        return self.counts.total()

    @property
    def mean(self) -> float | None:
        """The exact mean; None without numbers."""
        return self.total / self.count if self.counts else None

    def add(self, number: int) -> None:
        """Count one number, which is not negative."""
        shift = _shift(number)
        self.counts[number >> shift << shift] += 1
        self.total += number
        self.largest = max(self.largest, number)

    def quantile(self, share: float) -> int | None:
        """The smallest number that a share (0 to 1) does not exceed; None without numbers."""
        rest = share * self.count
        for least in sorted(self.counts):
            rest -= self.counts[least]
            if rest <= 0:
                return min(least + (1 << _shift(least) >> 1), self.largest)
        return None

    def figures(self, *percents: int) -> dict[str, float | None]:
        """Mean, quantiles (95 for `p95`) and maximum for a summary; None without numbers."""
        return {
            "mean": self.mean,
            **{f"p{percent}": self.quantile(percent / 100) for percent in percents},
            "max": self.largest if self.counts else None,
        }

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values, for an event; `from_json` reads them."""
        counts = {str(least): count for least, count in sorted(self.counts.items())}
        return {"counts": counts, "total": self.total, "largest": self.largest}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Histogram:
        """Read the values of `to_json`."""
        counts = Counter({int(least): count for least, count in values["counts"].items()})
        return cls(counts, values["total"], values["largest"])

    @classmethod
    def merged(cls, several: Iterable[Histogram]) -> Histogram:
        """Add up histograms in a new one."""
        total = cls()
        for part in several:
            total.counts.update(part.counts)
            total.total += part.total
            total.largest = max(total.largest, part.largest)
        return total


ByTrainer = Mapping[int, Histogram]
"""A histogram for each trainer, by its number."""


def merged_by_trainer(several: Iterable[ByTrainer]) -> dict[int, Histogram]:
    """Add up the histograms of several servers, attempts or ranks, trainer by trainer."""
    parts: dict[int, list[Histogram]] = {}
    for by_trainer in several:
        for trainer, part in by_trainer.items():
            parts.setdefault(trainer, []).append(part)
    return {trainer: Histogram.merged(parts[trainer]) for trainer in sorted(parts)}


@final
@dataclass(slots=True)
class IdSample:
    """Samples the number of distinct ids in a trainer's batches, added up over the tables.

    The cost of lookups, updates and their messages grows with it.
    """

    ids: Histogram = field(default_factory=Histogram)
    _batches: int = 0

    def add(self, bags: Bags[Int64s]) -> None:
        """Take a batch as it is read; every `SAMPLED`th is counted."""
        if self._batches % SAMPLED == 0:
            self.ids.add(count_distinct(bags))
        self._batches += 1


def count_distinct(bags: Bags[Int64s]) -> int:
    """Number of distinct ids of each table, added up."""
    if bags.offsets is not None:
        by_table = np.split(bags.values, table_offsets(bags)[1:-1])
        return sum(len(np.unique(ids_N)) for ids_N in by_table)
    sorted_FB = np.sort(bags.values, axis=1)
    return bags.tables + int(np.count_nonzero(sorted_FB[:, 1:] != sorted_FB[:, :-1]))


def _shift(number: int) -> int:
    return max(0, number.bit_length() - EXACT_BITS)
