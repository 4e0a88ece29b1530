"""Rows of few columns, and runs of a few steps on them in several layouts."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlrm_hybrid.cli.main import run

ROWS, TEST_ROWS = 7000, 1000
SIZES = {"C1": 900, "C2": 5, "C3": 40, "C4": 300, "C5": 90}
SCHEMA = f"""
label: label
dense: [{{name: I1}}, {{name: I2, transform: log1p}}, {{name: I3}}, {{name: I4}}]
categorical: [{", ".join(f"{{name: {name}, kind: hash8}}" for name in SIZES)}]
split: {{by: time, column: number, test_from: {ROWS - TEST_ROWS}}}
vocabulary: all
"""
LAYOUTS = {
    "single": [],
    # Tables in parts of every second row, dense layers at a server, what travels compressed.
    "served": [
        "+experiment=dct_hybrid",
        "parallel.world=in_process",
        "embedding=served",
        "parallel.table_servers=2",
    ],
    "levels": [
        "+experiment=dct_hybrid",
        "parallel.world=in_process",
        "activation.bits=4",
        "activation.sparsity=0.75",
    ],
}


@pytest.fixture(scope="session")
def small_rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Likewise, but of 5 tables: graphs take time by the table, and Criteo's rows have 26."""
    folder = tmp_path_factory.mktemp("few_columns")
    rng = np.random.default_rng(0)
    dense = {f"I{number}": rng.normal(size=ROWS) ** 2 for number in (1, 2, 3, 4)}
    ids = {name: rng.zipf(1.5, ROWS) % size for name, size in SIZES.items()}
    logits = dense["I1"] - dense["I2"] + (ids["C1"] % 3 - 1) + 2 * (ids["C2"] % 2) - 1
    frame = pd.DataFrame({"label": rng.random(ROWS) < 1 / (1 + np.exp(-logits))}).astype(int)
    frame["number"] = np.arange(ROWS)
    frame = frame.assign(**dense, **{name: [f"{i:08x}" for i in ids[name]] for name in SIZES})
    frame.to_csv(folder / "rows.csv", index=False)
    (folder / "schema.yaml").write_text(SCHEMA)
    overrides = [
        "data=table",
        f"data.prepared={folder / 'prepared'}",
        f"data.schema={folder / 'schema.yaml'}",
        f"data.raw={folder / 'rows.csv'}",
        "model=dlrm_small",
        "train.batch_size=64",
        "telemetry.tensorboard=false",
    ]
    assert run(["dlrm_hybrid", "prepare", *overrides]) == 0
    return overrides


@pytest.fixture(scope="session")
def runs(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs by layout."""
    folder = tmp_path_factory.mktemp("runs")
    for name, overrides in LAYOUTS.items():
        steps = ["train.steps=40", "optimizer.lr=0.2", f"hydra.run.dir={folder / name}"]
        assert run(["dlrm_hybrid", "train", *small_rows, *overrides, *steps]) == 0
    return {name: folder / name for name in LAYOUTS}
