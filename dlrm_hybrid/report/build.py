"""From runs to a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlrm_hybrid.report import pictures, spans, tables
from dlrm_hybrid.report.document import Document, Picture, Section
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.measures import BYTES
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.report.trained import trained

COMPARISON = (
    "Speed, bytes and utilisation are those of training steps, without evaluation, checkpoints "
    "and the first five steps of each attempt. Dense ÷ sent: how many times more bytes plain "
    "float32 messages would have been. A dash: not measured."
)
SPANS = (
    "What the ranks of a role do, on average: the model and its tables, making and reading "
    "messages, the servers' optimizer, sending, reading rows; the rest of the time they wait."
)
DIFFERENCES = "Keys that are not the same in all runs."


def build_report(runs: Sequence[Run], subtitle: str) -> Document:
    """Everything there is to tell of these runs.

    Args:
        runs: at least one.
        subtitle: when and by what the report was made.
    """
    names = labels(runs)
    sections = [
        _section(
            "Comparison",
            COMPARISON,
            tables.comparison(runs, names),
            pictures.quality(runs, names),
        ),
        _section("Loss", _uncounted(runs), None, pictures.losses(runs, names)),
        _section("Bytes", "", tables.traffic(runs, names), pictures.traffic(runs, names)),
        _section("Time", SPANS, spans.table(runs, names), pictures.time_by_span(runs, names)),
        _section(
            "Network and CPU",
            "",
            tables.roles(runs, names),
            [*pictures.usage(runs, names), *pictures.cpu(runs, names)],
        ),
        _section("Compression", "", None, pictures.compressed(runs, names)),
        _section("Configuration", DIFFERENCES, tables.differences(runs, names), ()),
        _section("Runs", "", tables.origins(runs, names), ()),
    ]
    return Document(
        title=f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs compared",
        subtitle=subtitle,
        trained=trained(runs),
        runs=tuple(names),
        sections=tuple(section for section in sections if section.table or section.pictures),
    )


def _uncounted(runs: Sequence[Run]) -> str:
    """Why there is nothing over bytes, if there is not."""
    if any(BYTES.pick(run.summary) is not None for run in runs):
        return ""
    return (
        "No picture over bytes: a world of one process sends only a part of what processes would "
        "send, and parallel=single sends nothing."
    )


def _section(heading: str, text: str, table: Table | None, drawn: Iterable[Picture]) -> Section:
    return Section(heading=heading, text=text, table=table, pictures=tuple(drawn))
