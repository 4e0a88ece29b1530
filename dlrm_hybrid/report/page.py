"""Documents about runs, rendered as a self-contained HTML page or as Markdown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import final

from dlrm_hybrid.report import figures, tables
from dlrm_hybrid.report.drawing import MARKERS, figure, save, style, svg
from dlrm_hybrid.report.figures import Picture
from dlrm_hybrid.report.labels import labels, trained
from dlrm_hybrid.report.measures import BYTES
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import Table, escape, plain_markdown
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS

STYLE_FILE = Path(__file__).with_name("page.css")
COMPARISON = (
    "Speed, bytes and utilisation are those of training steps, without evaluation, checkpoints "
    f"and warm-up, the first {WARMUP_STEPS} steps of each attempt. Dense ÷ sent: how many times "
    "more bytes plain float32 messages would have been. A dash: not measured."
)
SEEDS = (
    "Mean ± sample standard deviation of the complete runs that differ only in train.seed or "
    "data.seed."
)
SPANS = (
    "What the ranks of a role do, on average: the model and its tables, making and reading "
    "messages, the servers' optimizer, sending, reading rows; the rest of the time they wait."
)
STEPS = (
    "From the end of one step to the end of the next, without evaluation and checkpoints, by the "
    "clock of each trainer's last stage, or of the only process; quantiles to 1 %. The p95 of "
    "trainers goes from the fastest to the slowest. Ids a batch: distinct ones of one trainer's "
    "batch, in all tables together."
)
WAITS = (
    "The wait of the section Time, by what it was for. Workers wait for a frame of this kind, for "
    "a collective of the trainers, or for their turn among threads; servers until this kind comes. "
    "A dash: never."
)
RANKS = (
    "CPU seconds of training steps, of all ranks of a role, and how much of them is in the thread "
    "that learns, or in those of parallel.threads; the rest is in threads of the network and of "
    "libraries. Peak memory: the largest rank's, with what all ranks share of the program."
)
STALENESS = (
    "How many updates the weights of a push had missed when it was applied itself. The mean of all "
    "hides a slow trainer; means and batches of trainers are from the least to the most."
)
BEFORE = "Scores of all rows of a file with the model as it was before it learned them."
LABELS = (
    "Of the test part. A run's loss is the sum of these by their weights, its other scores are the "
    "first label's."
)
GROWTH = (
    "Categories of rows that go on from another run's: those it has rows for, new ones with rows "
    "behind these, those whose rows new ones took, and those without; of the columns with most new "
    "ones."
)
DIFFERENCES = "Keys that are not the same in all runs."


@final
@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document.

    Attributes:
        heading: heading of the part; empty continues the one above.
    """

    heading: str
    text: str
    table: Table | None
    pictures: Sequence[Picture] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Steps done and planned of a run, also in words."""

    done: int
    total: int
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document about runs, before it is rendered.

    Attributes:
        status: status shown beside the heading, or empty.
        subtitle: when and by what it was made.
        trained: what was trained, in a line.
        runs: labels of the runs, in the order of their styles; empty for a watched run.
    """

    title: str
    heading: str
    status: str = ""
    subtitle: str
    trained: str
    progress: Progress | None = None
    runs: tuple[str, ...] = ()
    sections: tuple[Section, ...]


def build_report(runs: Sequence[Run], subtitle: str) -> Document:
    """Make the report of one run or several; `subtitle` tells when and by what it was made."""
    names = labels(runs)
    args = runs, names
    usage = (*figures.usage(*args), *figures.cpu(*args))
    quality, losses = tuple(figures.quality(*args)), tuple(figures.losses(*args))
    sections = (
        Section("Comparison", COMPARISON, tables.comparison(*args), quality),
        Section("Seeds", SEEDS, tables.over_seeds(runs)),
        Section("Loss", _uncounted(runs), None, losses),
        Section("Labels", LABELS, tables.label_scores(*args), tuple(figures.label_losses(*args))),
        Section("Bytes", "", tables.traffic(*args), tuple(figures.traffic(*args))),
        Section("Time", SPANS, tables.spans(*args), tuple(figures.time_by_span(*args))),
        Section("Steps", STEPS, tables.steps(*args)),
        Section("Waiting", WAITS, tables.waits(*args)),
        Section("Network and CPU", "", tables.roles(*args), usage),
        Section("Ranks", RANKS, tables.ranks(*args)),
        Section("Compression", "", None, tuple(figures.compressed(*args))),
        Section("Staleness", STALENESS, tables.staleness(*args)),
        Section("Before learning", BEFORE, tables.progressive(*args)),
        Section("New categories", GROWTH, tables.growth(*args)),
        Section("Configuration", DIFFERENCES, tables.differences(*args)),
        Section("Runs", "", tables.origins(*args)),
    )
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs compared"
    return Document(
        title=title,
        heading=title,
        subtitle=subtitle,
        trained=trained(runs),
        runs=tuple(names),
        sections=tuple(section for section in sections if section.table or section.pictures),
    )


def _uncounted(runs: Sequence[Run]) -> str:
    """The reason why there is no picture over bytes; empty if there is one."""
    if any(BYTES.pick(run.summary) is not None for run in runs):
        return ""
    return (
        "No picture over bytes: a world of one process sends only a part of what processes would "
        "send, parallel=single sends nothing, and warm-up does not count."
    )


def html(document: Document, refresh_seconds: float | None = None) -> str:
    """Render a document as HTML; all its texts are escaped.

    Args:
        refresh_seconds: seconds after which a browser reloads the page; None for a final one.
    """
    again, status, progress = "", "", document.progress
    if refresh_seconds is not None:
        again = f'<meta http-equiv="refresh" content="{max(1, round(refresh_seconds))}">\n'
    if document.status:
        status = f' <span class="status">{escape(document.status)}</span>'
    parts = [f"<h1>{escape(document.heading)}{status}</h1>"]
    parts.append(f'<p class="subtitle">{escape(document.subtitle)}</p>')
    parts.append(f"<p>{escape(document.trained)}</p>")
    if progress is not None:
        done, text = min(progress.done, progress.total), escape(progress.text)
        bar = f'<progress max="{progress.total}" value="{done}">{text}</progress>'
        parts.append(f"<p>{bar}<br>{text}</p>")
    parts += [_section_html(section, document.runs) for section in document.sections]
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{again}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(document.title)}</title>
<style>
{STYLE_FILE.read_text(encoding="utf-8")}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _section_html(section: Section, runs: Sequence[str]) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"] if section.heading else []
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.table is not None:
        parts.append(section.table.html())
    if section.pictures:
        if runs and any(picture.has_runs for picture in section.pictures):
            parts.append(_key(runs))
        shown = "\n".join(_figure(picture) for picture in section.pictures)
        parts.append(f'<div class="pictures">\n{shown}\n</div>')
    return "\n".join(parts)


def _key(runs: Sequence[str]) -> str:
    items: list[str] = []
    for number, label in enumerate(runs):
        drawn = style(number)
        dashes = f' stroke-dasharray="{" ".join(map(str, drawn.dashes))}"' if drawn.dashes else ""
        line = f'<path d="M0 5h32" stroke="{drawn.color}" stroke-width="3"{dashes}/>'
        mark = f'<g fill="{drawn.color}">{MARKERS[drawn.marker]}</g>'
        swatch = f'<svg viewBox="0 0 32 10" aria-hidden="true">{line}{mark}</svg>'
        items.append(f"<li>{swatch}{escape(label)}</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def _figure(picture: Picture) -> str:
    data = b64encode(svg(figure(picture))).decode("ascii")
    title = escape(picture.title)
    return (
        f'<figure><h3>{title}</h3><img alt="{title}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def markdown(document: Document, pictures: PurePath | None) -> str:
    """Render a document as Markdown.

    Args:
        pictures: pattern of the picture files (see `file_of`), relative to the page; None leaves
            pictures out, and sections that have nothing else.
    """
    head = (f"# {document.heading}", document.subtitle, document.trained)
    parts = ["\n\n".join(map(plain_markdown, head)) + "\n"]
    parts += [
        _section_text(section, pictures)
        for section in document.sections
        if section.table is not None or pictures is not None
    ]
    return "\n".join(parts)


def file_of(picture: Picture, files: PurePath) -> PurePath:
    """The file of a titled picture, from the pattern of all pictures, such as `plots/*.png`."""
    title = picture.title.lower().replace(" ", "_")
    return files.with_name(files.name.replace("*", title))


def write_pictures(document: Document, files: Path) -> None:
    """Write each picture to a file of its own, with the key of the runs in it."""
    for section in document.sections:
        for picture in section.pictures:
            save(figure(picture, is_alone=True), Path(file_of(picture, files)))


def _section_text(section: Section, pictures: PurePath | None) -> str:
    parts = [f"## {section.heading}\n"]
    if section.text:
        parts.append(f"{section.text}\n")
    table = section.table
    if table is not None:
        parts.append(table.markdown())
    if pictures is not None:
        shown = "" if pictures.suffix == ".pdf" else "!"  # only a link, as pages cannot show a PDF
        parts += [
            f"{shown}[{image.title}]({file_of(image, pictures).as_posix()})\n\n{image.title}. "
            f"{plain_markdown(image.caption)}\n"
            for image in section.pictures
        ]
    return "\n".join(parts)
