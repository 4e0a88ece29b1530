"""The verb `report`: compares runs in one HTML file, with the same as Markdown beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dlrm_hybrid import __version__
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config.commands import ReportConfig
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.disk import writing
from dlrm_hybrid.report.drawing import FORMATS
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.page import Document, build_report, html, markdown, write_pictures
from dlrm_hybrid.report.runs import Run, read_runs, shown
from dlrm_hybrid.report.tables import comparison
from dlrm_hybrid.run.folder import output_file, write_whole
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, ExitCode

OUTPUT_KEY, PICTURES_KEY = "report.output", "report.pictures"


def run(request: Request) -> int:
    """Compare the runs at `report.runs`."""
    options, terminal = request.config.report, Terminal()
    page = output_file(options.output, OUTPUT_KEY)
    files = _picture_files(options.pictures)
    text = output_file(str(page.with_suffix(".md")), OUTPUT_KEY)
    runs = read_runs(_paths(options))
    moment = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")

    def made(several: Sequence[Run]) -> tuple[Document, str]:
        document = build_report(several, f"made {moment} by dlrm_hybrid {__version__}")
        return document, html(document)

    document, drawn = shown(runs, made)
    terminal.table(comparison(runs, labels(runs)))
    write_whole(page, drawn, OUTPUT_KEY)
    pictures = _pictures(document, files, page)
    write_whole(text, markdown(document, pictures), OUTPUT_KEY)
    terminal.line(f"wrote {page} and {text}")
    return ExitCode.DONE


def _pictures(document: Document, files: Path | None, page: Path) -> Path | None:
    """Write the pictures, if wanted; returns the pattern of their files relative to the page."""
    if files is None:
        return None
    with writing(files.parent, PICTURES_KEY):
        files.parent.mkdir(parents=True, exist_ok=True)
        write_pictures(document, files)
    return Path(os.path.relpath(files, page.parent))


def _picture_files(pictures: str | None) -> Path | None:
    """The pattern of picture files, from `report.pictures`: a folder, or such as `plots/*.svg`."""
    if pictures is None or "*" not in Path(pictures).name:
        return None if pictures is None else Path(pictures) / f"*{FORMATS[0]}"
    names = [f"*{ending}" for ending in FORMATS]
    if Path(pictures).name not in names:
        choices = ", ".join(f"FOLDER/{ending}" for ending in names)
        fault = f"{PICTURES_KEY} = {pictures}: must be a folder, or one of {choices}"
        raise ConfigError(faults_text([fault]))
    return Path(pictures)


def _paths(options: ReportConfig) -> list[Path]:
    if options.runs is None:
        raise ConfigError(
            faults_text(["report.runs = null: name run folders, or folders that contain them"])
        )
    names = [options.runs] if isinstance(options.runs, str) else options.runs
    return [Path(name) for name in names]
