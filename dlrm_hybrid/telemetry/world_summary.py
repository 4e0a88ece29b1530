"""The parts of `summary.json` that come from what each rank told at its end: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_hybrid.telemetry.interface_summary import INTERFACES_UNMEASURED, world_interfaces
from dlrm_hybrid.telemetry.traffic import Phase, Traffic

NETWORK_UNMEASURED: dict[str, Any] = {
    "bytes_total": None,
    "bytes_per_sample": None,
    "dense_equivalent_bytes": None,
    "pull_density": None,
    **INTERFACES_UNMEASURED,
    "by_class": {},
    "by_phase": {
        phase: {"bytes": None} for phase in (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)
    },
}

SERVERS = "servers"

Told = Mapping[str, Any]
"""Values of one `rank` event."""


def world_network(ranks: Sequence[Told], rows: int) -> dict[str, Any]:
    """What was sent while training, every message counted once, by its sender.

    None where nothing travels, or nobody has told. A class that is not counted is missing; sums
    over all classes are None then.

    Args:
        ranks: what they told.
        rows: trained on in that time.
    """
    ranks = [rank for rank in ranks if rank["traffic"] is not None]
    if not ranks:
        return NETWORK_UNMEASURED
    by_class = {
        traffic.value: {
            name: sum(rank["traffic"][Phase.TRAIN][traffic.value][name] for rank in ranks)
            for name in ("bytes", "dense_equivalent_bytes", "messages")
        }
        for traffic in Traffic
        if all(traffic.value in rank["traffic"][Phase.TRAIN] for rank in ranks)
    }
    pull_density = _pull_density(ranks)
    if len(by_class) < len(Traffic):
        return {**NETWORK_UNMEASURED, "by_class": by_class, "pull_density": pull_density}
    total = sum(tally["bytes"] for tally in by_class.values())
    return {
        **world_interfaces(ranks),
        "bytes_total": total,
        "bytes_per_sample": total / rows if rows else None,
        "dense_equivalent_bytes": sum(
            tally["dense_equivalent_bytes"] for tally in by_class.values()
        ),
        "pull_density": pull_density,
        "by_class": by_class,
        "by_phase": {
            phase: {"bytes": sum(_all_bytes(rank["traffic"], phase) or 0 for rank in ranks)}
            for phase in (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)
        },
    }


def world_strangers(ranks: Sequence[Told]) -> dict[str, int | None]:
    """How much came from outside the run and was refused; None where nobody listens."""
    counts = [told for rank in ranks if (told := rank.get("strangers")) is not None]
    return {
        name: sum(told[name] for told in counts) if counts else None
        for name in ("foreign_messages", "refused_connections")
    }


def world_cpu(ranks: Sequence[Told], cores: int) -> dict[str, float | None]:
    """CPU seconds of all ranks while training, and their share of what they could have had.

    Args:
        ranks: what they told.
        cores: of the machines.
    """
    cpu_seconds = sum(rank["cpu_seconds"][Phase.TRAIN] for rank in ranks)
    processes = len({rank["rank"] for rank in ranks})
    seconds = sum(rank["seconds"][Phase.TRAIN] for rank in ranks) / processes
    return {
        "utilization": _share(cpu_seconds, seconds * min(processes, cores)),
        "seconds": cpu_seconds,
    }


def world_roles(ranks: Sequence[Told]) -> dict[str, Any]:
    """Each rank's part; of several attempts the last one's."""
    return {
        str(rank["rank"]): {
            "role": rank["role"],
            "cpu_utilization": _share(
                rank["cpu_seconds"][Phase.TRAIN], rank["seconds"][Phase.TRAIN]
            ),
            "bytes_sent": _all_bytes(rank["traffic"], Phase.TRAIN),
            "bytes_received": _all_bytes(rank["received"], Phase.TRAIN),
            **_interface_bytes(rank),
            "seconds_by_span": dict(rank["seconds_by_span"]),
            "seconds_by_phase": dict(rank["seconds"]),
        }
        for rank in sorted(ranks, key=lambda one: one["rank"])
    }


def role_of(name: str) -> str:
    """`stage 1` of worker-0.1 and of worker-3.1; all servers are one role, so is a lone worker."""
    kind, _, place = name.partition("-")
    if kind == "server":
        return SERVERS
    return f"stage {place.partition('.')[2]}" if "." in place else "worker"


def role_order(role: str) -> tuple[bool, str]:
    """Sorts what `role_of` returns: stage after stage, then the servers."""
    return role == SERVERS, role


def _interface_bytes(rank: Told) -> dict[str, Any]:
    told: Told = rank.get("interface") or {}
    return {f"interface_bytes_{way}": told.get(f"{way}_bytes") for way in ("sent", "received")}


def _all_bytes(tallies: Told | None, phase: str) -> int | None:
    """Of all classes of traffic in one direction; None where one is not counted, or all."""
    if tallies is None or len(tallies[phase]) < len(Traffic):
        return None
    return sum(one["bytes"] for one in tallies[phase].values())


def _pull_density(ranks: Sequence[Told]) -> float | None:
    """Share of the weights that a version changes; of all versions, those of warm-up too."""
    versions: list[Told] = [rank["versions"] for rank in ranks if rank.get("versions")]
    told, elements = (sum(one[key] for one in versions) for key in ("told", "elements"))
    return _share(told, elements)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
