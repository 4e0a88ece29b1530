"""What a person sees at the end of a run: scores, time by role, bytes by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from dlrm_hybrid.cli.figures import quantity
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.telemetry.markdown import MISSING
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.world_summary import role_of, role_order

WIDE = 100  # columns; fewer have no room for every span
NARROW_SPANS = (Span.COMPUTE, Span.EMBEDDING, Span.ENCODE, Span.DECODE, Span.WAIT)
SHORT = {Span.EMBEDDING: "embed"}

Told = Mapping[str, Any]


def tell_scores(terminal: Terminal, title: str, scores: Told, teacher: Told | None) -> None:
    """A table of test scores: the model's and, for synthetic rows, the best possible ones."""

    def cell(value: float | None) -> str:
        return MISSING if value is None else f"{value:.4f}"

    names = ("loss", "auc", "accuracy", "normalized_entropy", "base_rate")
    rows = [["model", *(cell(scores[name]) for name in names)]]
    if teacher is not None:
        rows.append(["Bayes optimum", *(cell(teacher.get(name)) for name in names)])
    columns = (title, "log-loss", "AUC", "accuracy", "norm. entropy", "base rate")
    terminal.table("", columns, rows)


def tell_run(terminal: Terminal, summary: Told) -> None:
    """Time by role, bytes by class, speed; whatever was measured."""
    tell_roles(terminal, list(summary["roles"].values()))
    if summary["network"]["by_class"]:
        tell_traffic(terminal, summary["network"])
    tell_strangers(terminal, summary["network"])
    speed, cpu = summary["samples_per_second"], summary["cpu"]["utilization"]
    if speed is not None:
        used = "" if cpu is None else f", CPU {cpu:.0%}"  # None: no step after the warm-up
        terminal.line(f"{summary['samples']:,} samples, {speed:,.0f} samples/s{used}")


def tell_roles(terminal: Terminal, roles: Sequence[Told]) -> None:
    """A table of what the ranks of each role do with their time, in percent, and send.

    The workers of one stage are one role. Shares of time are means over its ranks, CPU is percent
    of a core for each rank, bytes are of all ranks.
    """
    together: dict[str, list[Told]] = {}
    for one in roles:
        if one["cpu_utilization"] is not None:
            together.setdefault(role_of(one["role"]), []).append(one)
    wide = terminal.console.width >= WIDE
    shown = tuple(Span) if wide else NARROW_SPANS
    rows: list[list[str]] = []
    for role in sorted(together, key=role_order):
        ranks = together[role]
        shares = {span: mean(_share(rank, span) for rank in ranks) for span in Span}
        sent = [rank["bytes_sent"] for rank in ranks if rank["bytes_sent"] is not None]
        cells = [f"{shares[span]:.0%}" for span in shown]
        if not wide:
            cells.append(f"{sum(shares[span] for span in Span if span not in shown):.0%}")
        cells.append(f"{mean(rank['cpu_utilization'] for rank in ranks):.0%}")
        cells.append(f"{quantity(sum(sent))}B" if sent else MISSING)
        rows.append([role, *cells])
    names = [SHORT.get(span, span.value) for span in shown] + ([] if wide else ["other"])
    if rows:
        terminal.table("", ("role", *names, "CPU", "sent"), rows)


def tell_traffic(terminal: Terminal, network: Told) -> None:
    """A table of the bytes sent while training, by class, beside what plain float32 would take.

    Where a class is not counted there is neither a sum nor what a sample costs.
    """
    tallies, per_sample = dict(network["by_class"]), network["bytes_per_sample"]
    if per_sample is not None:
        tallies["all"] = {
            "messages": sum(one["messages"] for one in tallies.values()),
            "bytes": network["bytes_total"],
            "dense_equivalent_bytes": network["dense_equivalent_bytes"],
        }
    rows = [
        [
            name.replace("_", " "),
            f"{one['messages']:,}",
            f"{quantity(one['bytes'])}B",
            f"{quantity(one['dense_equivalent_bytes'])}B",
            _times(one["dense_equivalent_bytes"], one["bytes"]),
            f"{one['bytes'] / network['bytes_total'] * per_sample:,.0f}" if per_sample else MISSING,
        ]
        for name, one in tallies.items()
    ]
    columns = ("sent in training", "messages", "sent", "dense", "dense ÷ sent", "B/sample")
    terminal.table("", columns, rows)


def tell_strangers(terminal: Terminal, network: Told) -> None:
    """A line, if anybody from outside the run has come; logs say who, and to which rank."""
    messages, connections = network["foreign_messages"], network["refused_connections"]
    if messages or connections:
        terminal.line(
            f"rejected from outside the run: {messages:,} messages, {connections:,} connections"
        )


def _share(rank: Told, span: Span) -> float:
    spans = rank["seconds_by_span"]
    return spans[span] / (sum(spans.values()) or 1.0)


def _times(dense_bytes: int, sent_bytes: int) -> str:
    return f"{dense_bytes / sent_bytes:.1f}×" if dense_bytes and sent_bytes else MISSING
