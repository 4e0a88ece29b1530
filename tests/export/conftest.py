"""Runs of a few steps, in several layouts."""

from pathlib import Path

import pytest

from dlrm_hybrid.cli.main import run

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
def runs(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs by layout."""
    folder = tmp_path_factory.mktemp("runs")
    for name, overrides in LAYOUTS.items():
        steps = ["train.steps=40", "optimizer.lr=0.2", f"hydra.run.dir={folder / name}"]
        assert run(["dlrm_hybrid", "train", *small_rows, *overrides, *steps]) == 0
    return {name: folder / name for name in LAYOUTS}
