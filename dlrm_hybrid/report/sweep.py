"""The jobs of a sweep as one table: pure but for reading their folders."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.config.identity import same_results
from dlrm_hybrid.report.labels import short, varying
from dlrm_hybrid.report.measures import SWEEP, Measure
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.summary import UNFINISHED
from dlrm_hybrid.types import ExitCode

REFUSED = "refused"
FAILED = "failed"


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep, after it.

    Attributes:
        folder: of its run.
        overrides: what made it different, as `key=value`.
        values: its whole configuration.
        exit_code: how it ended.
    """

    folder: Path
    overrides: tuple[str, ...]
    values: Mapping[str, Any]
    exit_code: int


@final
@dataclass(frozen=True, slots=True)
class Row:
    """What became of one job.

    Attributes:
        job: name of its folder.
        keys: its value of each swept key, None where it does not name it.
        status: of its run; `refused` where none has begun.
        summary: of its run.
    """

    job: str
    keys: Mapping[str, str | None]
    status: str
    summary: Mapping[str, Any] | None

    def pick(self, measure: Measure) -> float | None:
        """One figure of it."""
        return None if self.summary is None else measure.pick(self.summary)


def rows_of(jobs: Sequence[Job]) -> list[Row]:
    """One row for each job, with the keys that are not the same in all of them.

    Raises:
        DataError: a file in a run folder is damaged.
    """
    swept = varying([job.overrides for job in jobs])
    rows: list[Row] = []
    for index, job in enumerate(jobs):
        keys = {key: values[index] for key, values in swept.items()}
        run = _own_run(job)
        rows.append(Row(job.folder.name, keys, _status(job, run), run.summary if run else None))
    return rows


def sweep_table(rows: Sequence[Row]) -> Table:
    """The rows, at least one, as they are to be read."""
    return Table(
        (
            "job",
            *short(list(rows[0].keys)).values(),
            "status",
            *(measure.title for measure in SWEEP),
        ),
        tuple(
            (
                row.job,
                *(value or MISSING for value in row.keys.values()),
                row.status,
                *(
                    MISSING if (value := row.pick(measure)) is None else measure.show(value)
                    for measure in SWEEP
                ),
            )
            for row in rows
        ),
        align="l" * (2 + len(rows[0].keys)) + "r",
    )


def sweep_csv(rows: Sequence[Row]) -> str:
    """The rows, at least one, with every digit; what is not known is empty."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job", *rows[0].keys, "status", *(measure.key for measure in SWEEP)])
    for row in rows:
        writer.writerow(
            [row.job, *row.keys.values(), row.status, *(row.pick(measure) for measure in SWEEP)]
        )
    return file.getvalue()


def _own_run(job: Job) -> Run | None:
    """The run of this job, not one that was in the folder before and is another."""
    if not is_run(job.folder):
        return None
    run = read_run(job.folder)
    return run if same_results(run.config, job.values) else None


def _status(job: Job, run: Run | None) -> str:
    if run is None:
        return REFUSED
    if run.status == UNFINISHED and job.exit_code != ExitCode.DONE:
        return FAILED
    return run.status
