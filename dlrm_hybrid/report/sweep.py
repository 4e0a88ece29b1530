"""The jobs of a sweep as one table: pure but for reading their folders."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dlrm_hybrid.config.compose import Job
from dlrm_hybrid.config.identity import same_results
from dlrm_hybrid.report.labels import short, varying
from dlrm_hybrid.report.measures import SWEEP, figures, texts
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
    runs = [_own_run(job) for job, _ in jobs]
    heads = pd.DataFrame(
        {
            "job": [job.folder.name for job, _ in jobs],
            **varying([job.overrides for job, _ in jobs]),
            "status": [_status(run, code) for run, (_, code) in zip(runs, jobs, strict=True)],
        }
    )
    found = figures([None if run is None else run.summary for run in runs])
    return heads.join(found.filter([measure.key for measure in SWEEP]))


def sweep_table(frame: pd.DataFrame) -> Table:
    """The rows of `sweep_frame` as they are to be read."""
    heads = frame.drop(columns=[measure.key for measure in SWEEP]).fillna(MISSING)
    columns = ["job", *short(list(map(str, heads.columns[1:-1]))).values(), "status"]
    shown = heads.set_axis(columns, axis="columns").join(texts(frame))
    return Table.of(shown, "l" * len(columns) + "r")


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
