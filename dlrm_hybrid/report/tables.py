"""The tables of a report: what was reached, sent and spent, and how the runs differ."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.report.measures import BYTES, COMPARISON, CPU_USE, Summary, digits
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import role_of, role_order

# Of the command, the machine or another verb; nothing of them reaches a run.
NOT_OF_A_RUN = ("bench", "doctor", "evaluate", "report", "skip_completed")
MAX_BARS = 16  # with more of them a run has one bar, the mean of its roles
SPANS = (*(span for span in Span if span is not Span.WAIT), Span.WAIT)

Spent = Mapping[str, float]
"""By span, in the order of `SPANS`, microseconds per sample."""


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
    sums = [BYTES.text(run.summary) for run in runs]
    return _figures(("bytes/sample", "all"), labels, classes, sums)


def cpu_seconds_by_role(summary: Summary) -> dict[str, float]:
    """CPU seconds of training steps; the workers of one stage are one role, so are all servers."""
    spent: Counter[str] = Counter()
    for role in summary["roles"].values():
        use, phases = role["cpu_utilization"], role.get("seconds_by_phase")
        if use is not None and phases is not None:
            spent[role_of(role["role"])] += use * phases["train"]
    return {role: spent[role] for role in sorted(spent, key=role_order)}


def roles(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """CPU seconds by role; None where no run has measured them."""
    spent = [cpu_seconds_by_role(run.summary) for run in runs]
    uses = [CPU_USE.text(run.summary) for run in runs]
    return _figures(("CPU s", CPU_USE.title), labels, spent, uses)


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Configuration keys that are not the same in all runs; None where there is none."""
    configs = [flat(run.config) for run in runs]
    keys = {key for values in configs for key in values if key.split(".")[0] not in NOT_OF_A_RUN}
    rows = [
        (key, *(_text(values[key]) if key in values else MISSING for values in configs))
        for key in sorted(keys, key=_reading_order)
    ]
    different = [row for row in rows if len(set(row[1:])) > 1]
    return Table(("key", *labels), different, align="l") if different else None


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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _figures(
    ends: tuple[str, str],
    labels: Iterable[str],
    values: Sequence[Mapping[str, float]],
    sums: Iterable[str],
) -> Table | None:
    """A row for each label, a column for each name that has a value anywhere; None without one.

    Args:
        ends: headings of the first and the last column.
        labels: of the rows.
        values: by name, of each row.
        sums: the last cell of each row.
    """
    names = list(dict.fromkeys(name for row in values for name in row))
    rows = [
        (label, *(digits(row[name]) if name in row else MISSING for name in names), total)
        for label, row, total in zip(labels, values, sums, strict=True)
    ]
    return Table((ends[0], *names, ends[1]), rows) if names else None


def microseconds_by_role(summary: Summary) -> dict[str, Spent]:
    """Wall time for each sample of the whole world, by role; empty where it was not measured.

    The ranks of a role are averaged, so each role's spans add up to the time of the run.
    """
    samples = (summary["samples_per_second"] or 0.0) * (summary["seconds"] or 0.0)
    ranks: dict[str, list[Mapping[str, float]]] = {}
    for told in summary["roles"].values():
        spans = told["seconds_by_span"]
        if samples and spans and SPANS[0] in spans:  # older runs have phases there
            ranks.setdefault(role_of(told["role"]), []).append(spans)
    return {
        role: {span: 1e6 * mean(spans[span] for spans in ranks[role]) / samples for span in SPANS}
        for role in sorted(ranks, key=role_order)
    }


def span_bars(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Spent]:
    """By label of a run and its role what they spent; without the role where there are too many."""
    spent = {
        label: by_role
        for label, run in zip(labels, runs, strict=True)
        if (by_role := microseconds_by_role(run.summary))
    }
    if sum(map(len, spent.values())) > MAX_BARS:
        return {label: _mean_of_roles(list(by_role.values())) for label, by_role in spent.items()}
    return {
        " · ".join([label] * (len(spent) > 1) + [role]): values
        for label, by_role in spent.items()
        for role, values in by_role.items()
    }


def spans(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """The bars as figures; spans that take no time anywhere are left out, None if all are."""
    spent = span_bars(runs, labels)
    taken = [span for span in SPANS if any(values[span] for values in spent.values())]
    rows = [{span.value: values[span] for span in taken} for values in spent.values()]
    sums = [digits(sum(values.values())) for values in spent.values()]
    return _figures(("µs per sample", "all"), spent, rows, sums)


def _mean_of_roles(roles: Sequence[Spent]) -> Spent:
    return {span: mean(values[span] for values in roles) for span in SPANS}
