"""Tables of how long steps take, and what ranks take: CPU time and memory."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_hybrid.report.measures import Summary, digits, integer, percent
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.report.tables import MAX_BARS, span_of
from dlrm_hybrid.telemetry.summary import ratio, role_of, role_order

MEGABYTE = 1e6
ALL = "all"
STEP_FIGURES = ("mean", "p50", "p95", "p99", "max")


def ranks(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """CPU time and memory of each role; of each run where these are too many, None without any."""
    grouped = [_by_role(run.summary) for run in runs]
    if sum(map(len, grouped)) > MAX_BARS:
        grouped = [
            {ALL: [rank for several in by_role.values() for rank in several]} if by_role else {}
            for by_role in grouped
        ]
    is_alone = len(runs) == 1
    rows = [
        (role if is_alone else f"{label} · {role}", *_cells(by_role[role]))
        for label, by_role in zip(labels, grouped, strict=True)
        for role in sorted(by_role, key=role_order)
    ]
    columns = ("role", "ranks", "CPU s", "in threads that learn", "peak MB of a rank")
    return Table(columns, rows) if rows else None


def steps(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """How long the steps of each run took; None where no rank has reported."""
    rows = [
        (label, *_step_cells(run.summary))
        for label, run in zip(labels, runs, strict=True)
        if run.summary["step_milliseconds"]["steps"]
    ]
    figures = (f"{name}, ms" for name in STEP_FIGURES)
    columns = ("run", "steps", *figures, "p95 of trainers", "ids a batch")
    return Table(columns, rows) if rows else None


def _step_cells(summary: Summary) -> list[str]:
    found = summary["step_milliseconds"]
    slow = [one["p95"] for one in found["by_trainer"].values()]
    return [
        span_of([found["steps"]], integer),
        *(span_of([found[name]], digits) for name in STEP_FIGURES),
        span_of(slow, digits),
        span_of([summary["distinct_ids_per_batch"]["mean"]], integer),
    ]


def _by_role(summary: Summary) -> dict[str, list[Summary]]:
    """The ranks of each role that have said what they took."""
    found: dict[str, list[Summary]] = {}
    for rank in summary["roles"].values():
        if rank.get("peak_rss_bytes") is not None:
            found.setdefault(role_of(rank["role"]), []).append(rank)
    return found


def _cells(several: Sequence[Summary]) -> tuple[str, ...]:
    cpu_seconds, learning = (
        sum(rank.get(key) or 0.0 for rank in several)
        for key in ("cpu_seconds", "thread_cpu_seconds")
    )
    share = ratio(learning, cpu_seconds)
    peak_bytes = max(rank["peak_rss_bytes"] for rank in several)
    return (
        integer(len(several)),
        digits(cpu_seconds),
        MISSING if share is None else percent(share),
        digits(peak_bytes / MEGABYTE),
    )
