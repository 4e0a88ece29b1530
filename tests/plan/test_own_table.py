"""What is planned of a table of one's own comes from its prepared rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import layout
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.types import DataError

ROWS, STEPS = 2_000, 30
SCHEMA = """
label: y
dense: [{name: x}]
categorical: [{name: tags, kind: integer, max_length: 9}, {name: shop, kind: integer, expand_to: 3}]
split: {by: fraction, test: 0.1}
"""
WORLD = (
    *("parallel=hybrid", "parallel.world=processes", "parallel.trainers=2", "parallel.cuts=[]"),
    *("train.batch_size=32", f"train.steps={STEPS}", "checkpoint.minutes=0"),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    tags = [rng.integers(0, 300, rng.integers(0, 10)).tolist() for _ in range(ROWS)]
    columns = {
        "y": rng.integers(0, 2, ROWS),
        "x": rng.random(ROWS),
        "tags": pa.array(tags, pa.list_(pa.int64())),
        "shop": rng.integers(0, 50, ROWS),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    (folder / "mine.yaml").write_text(SCHEMA)
    rows = ("data=table", f"data.schema={folder / 'mine.yaml'}", f"data.raw={folder}/rows.parquet")
    return (*rows, f"data.prepared={folder / 'rows'}", "model=dlrm_small")


@pytest.mark.parametrize("deduplicate", ["false", "true"])
def test_bytes_of_lists_are_as_calculated(
    deduplicate: str, table: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*table, *WORLD, f"embedding.deduplicate={deduplicate}")
    assert run(["dlrm_hybrid", "train", *options, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    config = validate(values_of(list(options)))
    world = layout(config, ROWS)
    assert world.ids.per_row == pytest.approx(4.5 + 3, rel=0.05)
    assert world.ids.most_per_row == pytest.approx(4.5, rel=0.05)
    assert world.ids.rows == (301, 51)
    trained = read_run(tmp_path / "run")
    timed = max(one.values["timed_steps"] for one in trained.events if one.kind is Kind.RANK)
    a_step = trained.summary["network"]["by_class"]["embedding"]["bytes"] / timed
    calculated = bytes_by_class(world, frames(world))[Traffic.EMBEDDING]
    assert calculated == pytest.approx(a_step, rel=0.03)
    missing = replace(config, data=replace(config.data, prepared=str(tmp_path / "none")))
    with pytest.raises(DataError, match="no prepared rows here"):
        layout(missing, ROWS)
