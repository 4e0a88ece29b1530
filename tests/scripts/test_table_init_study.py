from dataclasses import replace
from typing import Any

import pytest
import table_init
from study_runs import study_run

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def scored(rows: str, init: str | float, auc: float | None) -> Run:
    best = None if auc is None else {"step": 9, "monitor": "auc", "value": auc}
    run = study_run("none", summary={"best": best})
    own: dict[str, Any] = {"data": {"raw": f"files/{rows}.csv"}, "embedding": {"init": init}}
    return replace(run, config={**run.config, **own})


def test_a_law_is_a_column_and_seeds_are_one_cell() -> None:
    given = [("one", "uniform_rows", 0.7), ("one", "uniform_rows", 0.8), ("two", 1e-4, 0.6)]
    lines = table_init.table([scored(*one) for one in given]).markdown().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["rows", "uniform_rows", "0.0001"]
    assert cells[2:] == [["one", "0.7500 ± 0.0707", "–"], ["two", "–", "0.6000"]]


def test_a_run_without_evaluations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs train\.evaluate_every"):
        table_init.table([scored("one", "uniform_rows", None)])
