"""The parts of `summary.json` that come from what each rank of a world told at its end: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_hybrid.telemetry.interface_summary import INTERFACES_UNMEASURED, world_interfaces
from dlrm_hybrid.telemetry.traffic import Phase, Traffic

NETWORK_UNMEASURED: dict[str, Any] = {
    "bytes_total": None,
    "bytes_per_sample": None,
    "dense_equivalent_bytes": None,
    **INTERFACES_UNMEASURED,
    "by_class": {},
    "by_phase": {
        phase: {"bytes": None} for phase in (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)
    },
}

Told = Mapping[str, Any]
"""Values of one `rank` event."""


def world_network(ranks: Sequence[Told], rows: int) -> dict[str, Any]:
    """What was sent while training, every message counted once, by its sender.

    Args:
        ranks: what they told.
        rows: trained on in that time.
    """
    by_class = {
        traffic.value: {
            name: sum(rank["traffic"][Phase.TRAIN][traffic.value][name] for rank in ranks)
            for name in ("bytes", "dense_equivalent_bytes", "messages")
        }
        for traffic in Traffic
    }
    total = sum(tally["bytes"] for tally in by_class.values())
    return {
        **world_interfaces(ranks),
        "bytes_total": total,
        "bytes_per_sample": total / rows if rows else None,
        "dense_equivalent_bytes": sum(
            tally["dense_equivalent_bytes"] for tally in by_class.values()
        ),
        "by_class": by_class,
        "by_phase": {
            phase: {"bytes": sum(_sent(rank, phase) for rank in ranks)}
            for phase in (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)
        },
    }


def world_roles(ranks: Sequence[Told]) -> dict[str, Any]:
    """Each rank's part; of several attempts the last one's."""
    return {
        str(rank["rank"]): {
            "role": rank["role"],
            "cpu_utilization": _share(
                rank["cpu_seconds"][Phase.TRAIN], rank["seconds"][Phase.TRAIN]
            ),
            "bytes_sent": _sent(rank, Phase.TRAIN),
            "bytes_received": rank["received_bytes"],
            **_interface_bytes(rank),
            "seconds_by_span": dict(rank["seconds"]),
        }
        for rank in ranks
    }


def _interface_bytes(rank: Told) -> dict[str, Any]:
    told: Told = rank.get("interface") or {}
    return {f"interface_bytes_{way}": told.get(f"{way}_bytes") for way in ("sent", "received")}


def _sent(rank: Told, phase: str) -> int:
    return sum(tally["bytes"] for tally in rank["traffic"][phase].values())


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
