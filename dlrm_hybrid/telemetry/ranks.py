"""What the ranks of a run have reported, for `summary.json`: pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_hybrid.telemetry.distributions.distinct_ids import mean_ids
from dlrm_hybrid.telemetry.distributions.durations import Durations, from_json, merged
from dlrm_hybrid.telemetry.traffic import Phase, Traffic

WORKER = re.compile(r"worker(?:-(\d{1,9})\.(\d{1,9}))?")  # trainer and stage
SERVERS, TABLE_SERVERS = "servers", "table servers"

RankValues = Mapping[str, Any]
"""Values of one `rank` event."""


def world_cpu(ranks: Sequence[RankValues], cores: int) -> dict[str, float | None]:
    """CPU seconds of all ranks while training, and their share of what they could have had.

    Args:
        ranks: their reports.
        cores: of the machines.
    """
    cpu_seconds = sum(rank["cpu_seconds"][Phase.TRAIN] for rank in ranks)
    processes = len({rank["rank"] for rank in ranks})
    seconds = sum(rank["seconds"][Phase.TRAIN] for rank in ranks) / (processes or 1)
    return {
        "utilization": ratio(cpu_seconds, seconds * min(processes, cores)),
        "seconds": cpu_seconds or None,
    }


def world_roles(ranks: Sequence[RankValues]) -> dict[str, Any]:
    """Each rank's part; of several attempts the last one's."""
    return {
        str(rank["rank"]): {
            "role": rank["role"],
            "cpu_utilization": ratio(
                rank["cpu_seconds"][Phase.TRAIN], rank["seconds"][Phase.TRAIN]
            ),
            "cpu_seconds": rank["cpu_seconds"][Phase.TRAIN],
            "thread_cpu_seconds": (rank.get("thread_cpu_seconds") or {}).get(Phase.TRAIN),
            "threads": rank.get("threads"),
            "peak_rss_bytes": rank.get("peak_rss_bytes"),
            "bytes_sent": all_bytes(rank["traffic"], Phase.TRAIN),
            "bytes_received": all_bytes(rank["received"], Phase.TRAIN),
            **_interface_bytes(rank),
            "seconds_by_span": dict(rank["seconds_by_span"]),
            "seconds_by_wait": rank.get("seconds_by_wait"),
            "seconds_by_phase": dict(rank["seconds"]),
        }
        for rank in sorted(ranks, key=lambda one: one["rank"])
    }


def world_steps(ranks: Sequence[RankValues]) -> dict[str, Any]:
    """How long steps took, by the clock of each trainer's last stage, or of the only process.

    Args:
        ranks: their reports; those of several attempts, or incarnations, are added up.
    """
    by_worker: dict[tuple[int, int], list[Durations]] = {}
    for rank in ranks:
        found = WORKER.fullmatch(rank["role"])
        if found is not None and rank.get("step_times") is not None:
            trainer, stage = found.groups(default="-1")
            key = int(stage), int(trainer)
            by_worker.setdefault(key, []).append(from_json(rank["step_times"]))
    last = max((stage for stage, _ in by_worker), default=-1)
    by_trainer = {
        trainer: merged(times)
        for (stage, trainer), times in sorted(by_worker.items())
        if stage == last
    }
    return {
        **_steps(merged(by_trainer.values())),
        "by_trainer": {str(one): _steps(times) for one, times in by_trainer.items() if one >= 0},
    }


def world_ids(ranks: Sequence[RankValues]) -> dict[str, Any]:
    """Distinct ids of a trainer's batch, the mean of those that were counted.

    Args:
        ranks: their reports; those of several attempts, or incarnations, are added up.
    """
    by_trainer: dict[int, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        found = WORKER.fullmatch(rank["role"])
        if found is not None and (sample := rank.get("distinct_ids")) is not None:
            by_trainer.setdefault(int(found[1] or -1), []).append(sample)
    return {
        "mean": mean_ids(one for several in by_trainer.values() for one in several),
        "by_trainer": {
            str(trainer): mean_ids(several)
            for trainer, several in sorted(by_trainer.items())
            if trainer >= 0
        },
    }


def _steps(times: Durations) -> dict[str, float | None]:
    return {"steps": times.count or None, **times.milliseconds()}


def role_of(name: str) -> str:
    """`stage 1` of worker-0.1 and of worker-3.1; all servers of a kind are one role."""
    kind, _, position = name.partition("-")
    if kind == "server":
        return SERVERS
    if kind == "tables":
        return TABLE_SERVERS
    return f"stage {position.partition('.')[2]}" if "." in position else "worker"


def role_order(role: str) -> tuple[int, str]:
    """Sorts what `role_of` returns: stage after stage, then the servers."""
    return {SERVERS: 1, TABLE_SERVERS: 2}.get(role, 0), role


def _interface_bytes(rank: RankValues) -> dict[str, Any]:
    reported: RankValues = rank.get("interface") or {}
    return {f"interface_bytes_{way}": reported.get(f"{way}_bytes") for way in ("sent", "received")}


def all_bytes(tallies: RankValues | None, phase: str) -> int | None:
    """Of all classes of traffic in one direction; None where one is not counted, or all."""
    if tallies is None or len(tallies[phase]) < len(Traffic):
        return None
    return sum(one["bytes"] for one in tallies[phase].values())


def ratio(part: float, whole: float) -> float | None:
    """None where the whole is 0."""
    return part / whole if whole else None
