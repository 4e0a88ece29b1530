"""Runs as pandas frames, for questions that no picture of the report answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.measures import COMPARISON
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Kind


def measures(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each run, by its label: status, and every figure of the comparison.

    What was not measured is NaN.
    """
    figures = [[one.pick(run.summary) for one in COMPARISON] for run in runs]
    index = pd.Index(labels(runs), name="run")
    columns = [one.key for one in COMPARISON]
    frame = pd.DataFrame(figures, index=index, columns=columns, dtype=float)
    frame.insert(0, "status", [run.status for run in runs])
    return frame


def points(runs: Sequence[Run], kind: Kind) -> pd.DataFrame:
    """A row for each event of a kind, with its values as columns, and `run` and `step` before."""
    rows: list[dict[str, Any]] = [
        {"run": label, "step": event.step, **event.values}
        for label, run in zip(labels(runs), runs, strict=True)
        for event in run.events
        if event.kind is kind
    ]
    return pd.DataFrame(rows)
