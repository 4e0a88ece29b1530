"""How long things took, such as steps: counts in buckets of equal ratios, pure.

A bucket is 2 % wide, so a quantile is within 1 % of the true one, for durations from 1 µs to a
year; shorter ones count as 1 µs. Counts of several ranks, or attempts, add up to those of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any, final

RELATIVE_ERROR = 0.01
PERCENTS = (50, 95, 99)
_RATIO = 1.02  # of a bucket's ends: its middle is within 1 % of all in it
_LEAST_SECONDS = 1e-6
_LOG_RATIO = log(_RATIO)
_LAST = 1600  # about a year


@final
@dataclass(frozen=True, slots=True)
class Durations:
    """Of some number of things.

    Attributes:
        counts: how many there are in each bucket.
        total_seconds: sum of all, exact.
        largest_seconds: of all, exact.
    """

    counts: Mapping[int, int] = field(default_factory=dict[int, int])
    total_seconds: float = 0.0
    largest_seconds: float = 0.0

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """Seconds that at least this share does not exceed, to `RELATIVE_ERROR`; None of none.

        Args:
            share: of 0 to 1.
        """
        rest = share * self.count
        for bucket in sorted(self.counts):
            rest -= self.counts[bucket]
            if rest <= 0:
                middle = _LEAST_SECONDS * _RATIO ** (min(bucket, _LAST) + 0.5)
                return min(middle, self.largest_seconds)
        return None

    def plus(self, other: Durations) -> Durations:
        """Of the things of both."""
        counts = Counter(self.counts)
        counts.update(other.counts)
        return Durations(
            dict(counts),
            self.total_seconds + other.total_seconds,
            max(self.largest_seconds, other.largest_seconds),
        )

    def milliseconds(self) -> dict[str, float | None]:
        """What a summary says, beside how many there are; null of none."""
        count = self.count
        seconds = {
            "mean": self.total_seconds / count if count else None,
            **{f"p{percent}": self.quantile(percent / 100) for percent in PERCENTS},
            "max": self.largest_seconds if count else None,
        }
        return {name: None if one is None else 1e3 * one for name, one in seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """The counts themselves, to be sent and merged elsewhere; `from_json` reads them."""
        return {
            "counts": {str(bucket): count for bucket, count in sorted(self.counts.items())},
            "total_seconds": self.total_seconds,
            "largest_seconds": self.largest_seconds,
        }


@final
@dataclass(slots=True)
class DurationCounter:
    """Durations that become more: at most 1,601 numbers, however many are counted."""

    _counts: Counter[int] = field(default_factory=Counter[int])
    _total_seconds: float = 0.0
    _largest_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = 0
        if seconds > _LEAST_SECONDS:
            bucket = min(int(log(seconds / _LEAST_SECONDS) / _LOG_RATIO), _LAST)
        self._counts[bucket] += 1
        self._total_seconds += seconds
        if seconds > self._largest_seconds:
            self._largest_seconds = seconds

    def snapshot(self) -> Durations:
        """All until now; it does not change any more."""
        return Durations(dict(self._counts), self._total_seconds, self._largest_seconds)


def merged(several: Iterable[Durations]) -> Durations:
    """Of all together."""
    total = Durations()
    for one in several:
        total = total.plus(one)
    return total


def from_json(values: Mapping[str, Any]) -> Durations:
    """What `Durations.to_json` has made."""
    counts = {int(bucket): count for bucket, count in values["counts"].items()}
    return Durations(counts, values["total_seconds"], values["largest_seconds"])
