"""The jobs of a sweep as one table: pure but for reading their folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dlrm_hybrid.config.compose import Job
from dlrm_hybrid.config.identity import same_results
from dlrm_hybrid.report.labels import short, varying
from dlrm_hybrid.report.measures import SWEEP
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.summary import UNFINISHED
from dlrm_hybrid.types import ExitCode

REFUSED = "refused"
FAILED = "failed"


def sweep_frame(jobs: Sequence[tuple[Job, int]]) -> pd.DataFrame:
    """A row for each job: its folder's name, the keys that differ, status and scores.

    Args:
        jobs: that have ended, with their exit codes.

    Raises:
        DataError: a file in a run folder is damaged.
    """
    keys = varying([job.overrides for job, _ in jobs])
    runs = [_own_run(job) for job, _ in jobs]
    figures = {
        measure.key: [None if run is None else measure.pick(run.summary) for run in runs]
        for measure in SWEEP
    }
    texts = pd.DataFrame(
        {
            "job": [job.folder.name for job, _ in jobs],
            **keys,
            "status": [_status(run, code) for run, (_, code) in zip(runs, jobs, strict=True)],
        }
    )
    return pd.concat([texts, pd.DataFrame(figures, dtype=float)], axis="columns")


def sweep_table(frame: pd.DataFrame) -> Table:
    """The rows of `sweep_frame` as they are to be read."""
    keys = [str(name) for name in frame.columns[1 : -len(SWEEP) - 1]]
    columns = ("job", *short(keys).values(), "status", *(measure.title for measure in SWEEP))
    num_texts = len(keys) + 2
    shows = [*[str] * num_texts, *(measure.show for measure in SWEEP)]
    records: list[tuple[Any, ...]] = list(frame.itertuples(index=False, name=None))
    rows = [
        [
            MISSING if pd.isna(value) else show(value)
            for value, show in zip(record, shows, strict=True)
        ]
        for record in records
    ]
    return Table(columns, rows, "l" * num_texts + "r")


def _own_run(job: Job) -> Run | None:
    """The run of this job, not one that was in the folder before and is another."""
    if not is_run(job.folder):
        return None
    run = read_run(job.folder)
    return run if same_results(run.config, job.values) else None


def _status(run: Run | None, exit_code: int) -> str:
    if run is None:
        return REFUSED
    if run.status == UNFINISHED and exit_code != ExitCode.DONE:
        return FAILED
    return run.status
