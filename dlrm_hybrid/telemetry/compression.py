"""Counts of elements before and after compression, summed over intervals and ranks; pure.

Names: `gradient.<tensor>`, `activation.<boundary>`; for embedding rows sent as quantised levels,
`rows.levels` counts elements of their gradients, `rows.lost_residuals` rows whose rounding residual
was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Counts = Mapping[str, Mapping[str, float]]
"""By name: number of elements, of those sent, of thresholds, and the sum of the thresholds."""

GRADIENT = "gradient."
ACTIVATION = "activation."


def ratio(part: float, whole: float) -> float | None:
    """Quotient of part and whole; None if the whole is 0."""
    return part / whole if whole else None


def counted(elements: int, sent: int, threshold_sum: float, thresholds: int) -> dict[str, float]:
    """Make the counts of one name."""
    return {
        "elements": elements,
        "sent": sent,
        "threshold_sum": threshold_sum,
        "thresholds": thresholds,
    }


def merged(several: Iterable[Counts]) -> dict[str, dict[str, float]]:
    """Add up the counts of several ranks or intervals."""
    sums: dict[str, dict[str, float]] = {}
    for counts in several:
        for name, values in counts.items():
            tally = sums.setdefault(name, dict.fromkeys(values, 0))
            for key, value in values.items():
                tally[key] += value
    return sums


def values_of(counts: Counts) -> dict[str, Any]:
    """The values of an event: counts, density and mean threshold by name; null if undefined."""
    return {
        name: {
            "elements": tally["elements"],
            "sent": tally["sent"],
            "density": ratio(tally["sent"], tally["elements"]),
            "threshold": ratio(tally["threshold_sum"], tally["thresholds"]),
        }
        for name, tally in counts.items()
    }


def density(several: Iterable[Mapping[str, Any]], prefix: str) -> float | None:
    """Share of elements sent, over several events' values and all names with a prefix."""
    tallies = [t for values in several for name, t in values.items() if name.startswith(prefix)]
    return ratio(sum(t["sent"] for t in tallies), sum(t["elements"] for t in tallies))
