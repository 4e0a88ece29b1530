"""Where the time of a step goes, by role: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from dlrm_hybrid.report.measures import Summary, digits
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import role_of, role_order

MAX_BARS = 16  # with more of them a run has one bar, the mean of its roles
SPANS = (*(span for span in Span if span is not Span.WAIT), Span.WAIT)

Spent = Mapping[str, float]
"""By span, in the order of `SPANS`, microseconds per sample."""


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


def bars(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Spent]:
    """By label of a run and its role what they spent; without the role where there are too many."""
    spent = {
        label: by_role
        for label, run in zip(labels, runs, strict=True)
        if (by_role := microseconds_by_role(run.summary))
    }
    if sum(map(len, spent.values())) > MAX_BARS:
        return {label: _mean(list(by_role.values())) for label, by_role in spent.items()}
    return {
        " · ".join([label] * (len(spent) > 1) + [role]): values
        for label, by_role in spent.items()
        for role, values in by_role.items()
    }


def table(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """The bars as figures; spans that take no time anywhere are left out, None if all are."""
    spent = bars(runs, labels)
    names = [span for span in SPANS if any(values[span] for values in spent.values())]
    if not names:
        return None
    return Table(
        ("µs per sample", *names, "all"),
        tuple(
            (label, *(digits(values[name]) for name in names), digits(sum(values.values())))
            for label, values in spent.items()
        ),
    )


def _mean(roles: Sequence[Spent]) -> Spent:
    return {span: mean(values[span] for values in roles) for span in SPANS}
