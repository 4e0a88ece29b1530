"""The tables of a report: what was reached, sent and spent, and how the runs differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from dlrm_hybrid.report.measures import BYTES, COMPARISON, CPU_USE, Summary, digits
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.summary import role_of, role_order

# Of the command, the machine or another verb; nothing of them reaches a run.
NOT_OF_A_RUN = ("bench", "doctor", "evaluate", "report", "skip_completed")


def comparison(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Quality, bytes, utilisation and speed; columns that no run has measured are left out."""
    shown = [
        measure
        for measure in COMPARISON
        if any(measure.pick(run.summary) is not None for run in runs)
    ]
    return Table(
        ("run", "status", *(measure.title for measure in shown)),
        tuple(
            (label, run.status, *(measure.text(run.summary) for measure in shown))
            for label, run in zip(labels, runs, strict=True)
        ),
        align="llr",
    )


def bytes_by_class(summary: Summary) -> dict[str, float]:
    """Bytes per sample of each class of traffic; empty where nothing was counted."""
    network = summary["network"]
    per_sample, total = network["bytes_per_sample"], network["bytes_total"]
    if not per_sample or not total:
        return {}
    samples = total / per_sample
    return {
        name.replace("_", " "): tally["bytes"] / samples
        for name, tally in network["by_class"].items()
    }


def traffic(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Bytes per sample by class; None where no run has counted bytes."""
    classes = [bytes_by_class(run.summary) for run in runs]
    names = list(dict.fromkeys(name for values in classes for name in values))
    if not names:
        return None
    return Table(
        ("bytes/sample", *names, "all"),
        tuple(
            (
                label,
                *(digits(values[name]) if name in values else MISSING for name in names),
                BYTES.text(run.summary),
            )
            for label, run, values in zip(labels, runs, classes, strict=True)
        ),
    )


def cpu_seconds_by_role(summary: Summary) -> dict[str, float]:
    """CPU seconds of training steps; the workers of one stage are one role, so are all servers."""
    spent: dict[str, float] = {}
    for role in summary["roles"].values():
        use, phases = role["cpu_utilization"], role.get("seconds_by_phase")
        if use is not None and phases is not None:
            name = role_of(role["role"])
            spent[name] = spent.get(name, 0.0) + use * phases["train"]
    return {role: spent[role] for role in sorted(spent, key=role_order)}


def roles(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """CPU seconds by role; None where no run has measured them."""
    spent = [cpu_seconds_by_role(run.summary) for run in runs]
    names = list(dict.fromkeys(name for values in spent for name in values))
    if not names:
        return None
    return Table(
        ("CPU s", *names, CPU_USE.title),
        tuple(
            (
                label,
                *(digits(values[name]) if name in values else MISSING for name in names),
                CPU_USE.text(run.summary),
            )
            for label, run, values in zip(labels, runs, spent, strict=True)
        ),
    )


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Configuration keys that are not the same in all runs; None where there is none."""
    flat = [dict(_leaves(run.config)) for run in runs]
    keys = sorted({key for values in flat for key in values}, key=_reading_order)
    rows = [(key, *(values.get(key, MISSING) for values in flat)) for key in keys]
    different = tuple(row for row in rows if len(set(row[1:])) > 1)
    if not different:
        return None
    return Table(("key", *labels), different, align="l")


def origins(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Where the runs are, when, on what and with which words they were started."""
    remarks = any(run.remarks for run in runs)
    columns = ("run", "folder", "started", "commit", "restarts", "overrides")
    return Table(
        (*columns, "remarks") if remarks else columns,
        tuple(
            (
                label,
                str(run.folder),
                str(run.environment.get("when", MISSING)),
                str(run.environment.get("git_sha") or MISSING),
                MISSING if (restarts := run.summary["restarts"]) is None else f"{restarts:,}",
                shlex.join(run.overrides) or MISSING,
                *(["; ".join(run.remarks) or MISSING] if remarks else []),
            )
            for label, run in zip(labels, runs, strict=True)
        ),
        align="l",
    )


def _reading_order(key: str) -> tuple[str, bool, str]:
    """Section by section, the one that names a choice first."""
    section, _, name = key.rpartition(".")
    return section, name != "name", name


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in NOT_OF_A_RUN:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, Any]", value), f"{key}.")
        else:
            yield key, value if isinstance(value, str) else json.dumps(value)
