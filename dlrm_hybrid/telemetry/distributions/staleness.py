"""How stale the weights were that gradients were computed with: counted by servers, pure.

The staleness of a push is the number of updates that its weights had missed when it was applied
itself. Each up to 1023 has a count of its own; above, all between two powers of two share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

EXACT_BITS = 10  # below 2**10 each has a count of its own


@final
@dataclass(frozen=True, slots=True)
class Staleness:
    """Of some pushes.

    Attributes:
        counts: how many pushes by staleness; where several share a count, by the least of these.
        total: sum over all pushes.
        largest: of all pushes.
    """

    counts: Mapping[int, int] = field(default_factory=dict[int, int])
    total: int = 0
    largest: int = 0

    @property
    def pushes(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        """Exact; None without pushes."""
        return self.total / self.pushes if self.counts else None

    def quantile(self, share: float) -> int | None:
        """What at least this share of the pushes does not exceed; None without pushes.

        Args:
            share: of 0 to 1.

        Returns:
            the least such staleness; where it shares a count with others, the largest of these.
        """
        rest = share * self.pushes
        for least in sorted(self.counts):
            rest -= self.counts[least]
            if rest <= 0:
                width = 1 if least >> EXACT_BITS == 0 else least
                return min(least + width - 1, self.largest)
        return None

    def plus(self, other: Staleness) -> Staleness:
        """Of the pushes of both."""
        counts = Counter(self.counts)
        counts.update(other.counts)
        return Staleness(dict(counts), self.total + other.total, max(self.largest, other.largest))

    def values(self) -> dict[str, Any]:
        """What an event or a summary says; null without pushes."""
        return {
            "pushes": self.pushes,
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.largest if self.counts else None,
        }


ByTrainer = Mapping[int, Staleness]
"""Of the pushes of each trainer that has pushed, by its number."""


@dataclass(slots=True)
class _Sums:
    """A `Staleness` that grows."""

    counts: Counter[int] = field(default_factory=Counter[int])
    total: int = 0
    largest: int = 0


@final
@dataclass(frozen=True, slots=True)
class StalenessCounter:
    """Counts the pushes that come to one server."""

    _by_trainer: dict[int, _Sums] = field(default_factory=dict[int, _Sums])

    def add(self, trainer: int, staleness: int) -> None:
        """Count one push."""
        bits = staleness.bit_length()
        least = staleness if bits <= EXACT_BITS else 1 << (bits - 1)
        sums = self._by_trainer.setdefault(trainer, _Sums())
        sums.counts[least] += 1
        sums.total += staleness
        sums.largest = max(sums.largest, staleness)

    def snapshot(self) -> dict[int, Staleness]:
        """The counts until now; they do not change any more."""
        return {
            trainer: Staleness(dict(sums.counts), sums.total, sums.largest)
            for trainer, sums in sorted(self._by_trainer.items())
        }


def merged(several: Iterable[ByTrainer]) -> dict[int, Staleness]:
    """Of all pushes to several servers, or in several intervals."""
    sums: dict[int, Staleness] = {}
    for by_trainer in several:
        for trainer, one in by_trainer.items():
            sums[trainer] = sums.get(trainer, Staleness()).plus(one)
    return dict(sorted(sums.items()))


def values_of(by_trainer: ByTrainer) -> dict[str, Any]:
    """What a summary says of all pushes together, and under `by_trainer` of each trainer's."""
    total = Staleness()
    for one in by_trainer.values():
        total = total.plus(one)
    each = {str(trainer): one.values() for trainer, one in by_trainer.items()}
    return {**total.values(), "by_trainer": each}


def to_json(by_trainer: ByTrainer) -> dict[str, Any]:
    """The counts themselves, to be sent and merged elsewhere; `from_json` reads them."""
    return {
        str(trainer): {
            "counts": {str(least): count for least, count in sorted(one.counts.items())},
            "total": one.total,
            "largest": one.largest,
        }
        for trainer, one in by_trainer.items()
    }


def from_json(values: Mapping[str, Any]) -> dict[int, Staleness]:
    """What `to_json` was given."""
    return {
        int(trainer): Staleness(
            {int(least): count for least, count in one["counts"].items()},
            one["total"],
            one["largest"],
        )
        for trainer, one in values.items()
    }
