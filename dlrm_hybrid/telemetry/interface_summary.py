"""Use of the links between machines, from what each rank told at its end: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INTERFACES_UNMEASURED: Mapping[str, Any] = {
    "utilization": None,
    "utilization_by_rank": None,
    "utilization_mean_direction": None,
    "rate_bits_per_second": None,
    "interface_bytes": None,
}


@dataclass(slots=True)
class _Use:
    """Of one rank's interface, over all attempts, while training.

    Attributes:
        seconds: of training.
        busier_seconds: line time of the direction that was busier in each window.
        mean_seconds: line time of the mean of both directions.
    """

    seconds: float = 0.0
    busier_seconds: float = 0.0
    mean_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Of the busier direction."""
        return self.busier_seconds / self.seconds


def world_interfaces(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of `network` in the summary that is about links; None where nothing was measured.

    The use of a link is the mean, over windows of 100 ms, of its busier direction's share of the
    rate. `utilization` is that of the busiest link, `utilization_mean_direction` the same link's
    with both directions averaged. `interface_bytes` is what left all interfaces: with headers,
    acknowledgements, and what was sent twice.

    Args:
        ranks: what they told, of all attempts.
    """
    told = [(rank["rank"], one) for rank in ranks if (one := rank.get("interface")) is not None]
    if not told:
        return dict(INTERFACES_UNMEASURED)
    owners: dict[str, int] = {}  # of several ranks with one interface the first speaks for it
    for rank, one in told:
        owners[one["address"]] = min(rank, owners.get(one["address"], rank))
    rates = [one["rate_bits_per_second"] for _, one in told]
    used = _uses(told) if all(rates) else {}
    busiest = max(used.values(), key=lambda use: use.share, default=None)
    return {
        "utilization": None if busiest is None else busiest.share,
        "utilization_by_rank": {str(rank): used[rank].share for rank in sorted(used)} or None,
        "utilization_mean_direction": (
            None if busiest is None else busiest.mean_seconds / busiest.seconds
        ),
        "rate_bits_per_second": rates[-1],
        "interface_bytes": sum(
            one["sent_bytes"] for rank, one in told if owners[one["address"]] == rank
        ),
    }


def _uses(told: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[int, _Use]:
    uses: dict[int, _Use] = {}
    for rank, one in told:
        use, rate = uses.setdefault(rank, _Use()), one["rate_bits_per_second"]
        use.seconds += one["seconds"]
        use.busier_seconds += 8 * one["busier_bytes"] / rate
        use.mean_seconds += 4 * (one["received_bytes"] + one["sent_bytes"]) / rate
    return {rank: use for rank, use in uses.items() if use.seconds}
