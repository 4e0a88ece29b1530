"""A run of a few steps, and the raw rows that it was trained on."""

from pathlib import Path

import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.profile import builtin
from dlrm_hybrid.data.synthetic import generate

ROWS = 7000


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that `small_rows` were prepared from."""
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    generate(path, ROWS, 0, builtin("criteo_kaggle"), lambda done: None)
    return path


@pytest.fixture(scope="session")
def trained(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process; every category has a row of its own, and none stands for others."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    argv = ["train", *small_rows, "train.steps=40", "optimizer.lr=0.2", f"hydra.run.dir={folder}"]
    assert run(["dlrm_hybrid", *argv]) == 0
    return folder


@pytest.fixture(scope="session")
def trained_in_time(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose vocabulary knows the training days only."""
    folder = tmp_path_factory.mktemp("in_time")
    rows = ["data.rows=7000", f"data.prepared={folder / 'rows'}", "data.vocabulary=train_days"]
    more = ["model=dlrm_small", "train.steps=5", "telemetry.tensorboard=false", "data.processes=1"]
    argv = ["train", *rows, *more, f"hydra.run.dir={folder / 'run'}"]
    assert run(["dlrm_hybrid", *argv]) == 0
    return folder / "run"
