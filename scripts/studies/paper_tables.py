"""The tables of the DCT paper (Gupta et al., KDD 2021) from runs, beside the paper's own figures.

    python scripts/studies/paper_tables.py FOLDER... --output tables.md

Every complete run below the folders becomes part of a row, of the table that compresses the same
thing; the runs of a row are its seeds. The baseline of a run is the one of its seed, with the same
data in the same order, in whatever folder it is.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import mean
from typing import final

from paper_numbers import BASELINE, TABLES, TITLES
from paper_rows import PaperRun, paper_runs

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.types import ConfigError

COLUMNS = (
    *("sparsity", "workers", "train loss", "train acc. %", "test loss", "test acc. %"),
    *("against baseline, %", "sent of gradients, activations, %"),
    *("paper: train", "paper: test", "paper: against baseline, %", "seeds"),
)


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """Runs on the same rows with the same model.

    Attributes:
        words: which rows, how many steps.
        tables: by title; those that no run belongs to are left out.
    """

    words: str
    tables: Mapping[str, Table]


def settings(runs: Iterable[PaperRun]) -> list[Setting]:
    """The tables of each setting.

    Raises:
        ConfigError: two baselines of one seed differ, or a row has two runs of one seed.
    """
    found: defaultdict[str, list[PaperRun]] = defaultdict(list)
    for run in runs:
        found[run.setting].append(run)
    return [Setting(alike[0].words, _tables(alike)) for alike in found.values()]


def page(found: Iterable[Setting]) -> str:
    """The tables as Markdown."""
    texts: list[str] = []
    for setting in found:
        texts.append(f"# {setting.words}\n")
        for title, table in setting.tables.items():
            text = table.markdown()
            texts.append(f"## {title}\n\n{text}")
    return "\n".join(texts)


def _tables(runs: Sequence[PaperRun]) -> dict[str, Table]:
    baselines = _baselines(runs)
    found: dict[str, Table] = {}
    for number, title in TITLES.items():
        rows: defaultdict[tuple[int, str], list[PaperRun]] = defaultdict(list)
        for run in runs:
            if run.table == number:
                rows[run.workers, run.sparsity].append(run)
        if rows:
            cells = [_row(rows[key], baselines) for key in sorted(rows)]
            if baselines:
                cells.insert(0, _row(list(baselines.values()), baselines))
            found[f"Table {number}. {title}"] = Table(COLUMNS, tuple(cells))
    return found


def _baselines(runs: Iterable[PaperRun]) -> dict[int, PaperRun]:
    """By seed; several of one seed, such as those of every sweep, must agree."""
    found: dict[int, PaperRun] = {}
    for run in runs:
        if run.table:
            continue
        other = found.setdefault(run.seed, run)
        if not isclose(run.scores.test_loss, other.scores.test_loss, rel_tol=1e-9):
            raise ConfigError(f"{run.folder} and {other.folder}: two baselines that differ")
    return found


def _row(runs: Sequence[PaperRun], baselines: Mapping[int, PaperRun]) -> tuple[str, ...]:
    runs = sorted(runs, key=lambda run: run.seed)
    if len({run.seed for run in runs}) < len(runs):
        raise ConfigError(f"{', '.join(run.folder for run in runs)}: one row, one seed")
    one = runs[0]
    changes = [
        100 * (run.scores.test_loss / baselines[run.seed].scores.test_loss - 1)
        for run in runs
        if one.table and run.seed in baselines
    ]
    columns = list(zip(*(run.scores for run in runs), strict=True))
    return (
        one.sparsity if one.table else "baseline",
        str(one.workers) if one.table else MISSING,
        *(
            mean_spread(column, digits)
            for column, digits in zip(columns, (4, 2, 4, 2), strict=True)
        ),
        mean_spread(changes, 2, "+") if changes else MISSING,
        _sent(runs) if one.table else MISSING,
        *_of_paper(one),
        str(len(runs)),
    )


def _of_paper(run: PaperRun) -> tuple[str, str, str]:
    """Training, test, and test log-loss against the paper's baseline."""
    paper = BASELINE
    if run.table:
        row = TABLES[run.table].get(run.point) if run.point else None
        if row is None:
            return MISSING, MISSING, MISSING
        paper = row
    change = 100 * (paper.test_loss / BASELINE.test_loss - 1)
    return (
        f"{paper.train_loss:.4f}, {paper.train_accuracy:.2f} %",
        f"{paper.test_loss:.4f}, {paper.test_accuracy:.2f} %",
        f"{change:+z.2f}" if run.table else MISSING,
    )


def _sent(runs: Sequence[PaperRun]) -> str:
    return ", ".join(
        f"{100 * mean(share for share in shares if share is not None):.3g}"
        if None not in shares
        else "all"
        for shares in zip(*(run.sent for run in runs), strict=True)
    )


def main() -> None:
    """Read the folders of the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    parser.add_argument("--output", type=Path, required=True, help="a Markdown file")
    arguments = parser.parse_args()
    text = page(settings(paper_runs(read_runs(arguments.folders))))
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
