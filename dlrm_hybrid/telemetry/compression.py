"""What compression let through, counted where it happens and summed over a run: pure.

Names: `gradient.<tensor>`, `activation.<boundary>`; of rows that travel as levels `rows.levels`,
elements of their gradients, and `rows.lost_residuals`, rows of which what rounding left is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Counts = Mapping[str, Mapping[str, float]]
"""By name: elements, sent (of these), and of thresholds how many there are and their sum."""

GRADIENT = "gradient."
ACTIVATION = "activation."


def counted(elements: int, sent: int, threshold_sum: float, thresholds: int) -> dict[str, float]:
    """The counts of one name."""
    return {
        "elements": elements,
        "sent": sent,
        "threshold_sum": threshold_sum,
        "thresholds": thresholds,
    }


def merged(several: Iterable[Counts]) -> dict[str, dict[str, float]]:
    """The sums of several ranks' or intervals' counts."""
    sums: dict[str, dict[str, float]] = {}
    for counts in several:
        for name, values in counts.items():
            so_far = sums.setdefault(name, dict.fromkeys(values, 0))
            for key, value in values.items():
                so_far[key] += value
    return sums


def values_of(counts: Counts) -> dict[str, Any]:
    """What an event says: by name the density and the mean threshold; null where there is none."""
    return {
        name: {
            "elements": one["elements"],
            "sent": one["sent"],
            "density": _ratio(one["sent"], one["elements"]),
            "threshold": _ratio(one["threshold_sum"], one["thresholds"]),
        }
        for name, one in counts.items()
    }


def density(several: Iterable[Mapping[str, Any]], prefix: str) -> float | None:
    """Share of the elements sent over several events' values, of the names with this prefix."""
    tallies = [
        tally for values in several for name, tally in values.items() if name.startswith(prefix)
    ]
    return _ratio(sum(one["sent"] for one in tallies), sum(one["elements"] for one in tallies))


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None
