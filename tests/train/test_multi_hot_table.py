"""A table with a column of lists, from its file to scores: equal worlds, and what lists teach."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from world_runs import summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.telemetry.metrics import BinaryMetrics

ROWS, TAGS = 6_000, 40
SCHEMA = """
label: bought
dense: [{name: price, transform: log1p}]
categorical:
  - {name: tags, kind: integer, max_length: 5}
  - {name: shop}
split: {by: fraction, test: 0.3, seed: 1}
"""
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], float]:
    """Whether a row was bought follows from its tags alone; with the AUC of who knows how."""
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    tags = [rng.integers(0, TAGS, rng.integers(0, 6)).tolist() for _ in range(ROWS)]
    effects = rng.choice([-2.0, 2.0], TAGS)
    logit = np.array([effects[one].sum() for one in tags], np.float32)
    label = (rng.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    best = BinaryMetrics()
    best.add(logit, label)
    columns = {
        "bought": label.astype(np.int8),
        "price": rng.random(ROWS),
        "tags": pa.array(tags, pa.list_(pa.int64())),
        "shop": [f"shop {one}" for one in rng.integers(0, 9, ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    (folder / "mine.yaml").write_text(SCHEMA)
    rows = ("data=table", f"data.schema={folder / 'mine.yaml'}", f"data.raw={folder}/rows.parquet")
    return (*rows, f"data.prepared={folder / 'rows'}", "model=dlrm_small"), best.scores().auc


@pytest.fixture
def train(table: tuple[tuple[str, ...], float], tmp_path: Path) -> Train:
    def train_here(name: str, *options: str) -> Path:
        folder = tmp_path / name
        base = (*table[0], f"hydra.run.dir={folder}", "telemetry.tensorboard=false")
        assert run(["dlrm_hybrid", "train", *base, *options]) == 0
        return folder

    return train_here


def test_scores_are_as_good_as_can_be(table: tuple[tuple[str, ...], float], train: Train) -> None:
    options = ("parallel=single", "train.batch_size=64", "train.epochs=8", "optimizer.lr=0.5")
    auc = summary(train("run", *options))["test"]["auc"]
    assert 0.85 < table[1] - 0.015 < auc
