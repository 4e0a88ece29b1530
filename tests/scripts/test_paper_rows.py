"""Runs of other methods than the paper's are told apart from its rows and from its baseline."""

from pathlib import Path

import pytest
from made_runs import make_run, world_events
from paper_tables import paper_runs

from dlrm_hybrid.report.runs import read_run


@pytest.mark.parametrize(
    ("overrides", "table", "sparsity"),
    [
        (("gradient=none",), 0, "0 %"),
        (("gradient=dct", "gradient.sparsity=0.9"), 2, "90 %"),
        (("gradient=dct", "gradient.sparsity=0.9", "gradient.aggregation=union"), 2, "90 %, union"),
        (("gradient=topk", "gradient.sparsity=0.9"), 2, "90 %, topk"),
        (("gradient=terngrad",), 2, "0 %, terngrad"),
    ],
)
def test_a_row_names_what_is_not_the_papers(
    overrides: tuple[str, ...], table: int, sparsity: str, tmp_path: Path
) -> None:
    world = ("parallel=hybrid", "parallel.cuts=[]")
    make_run(tmp_path / "run", (*world, *overrides), world_events())
    (found,) = paper_runs([read_run(tmp_path / "run")])
    assert (found.table, found.sparsity) == (table, sparsity)
