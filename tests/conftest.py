"""One thread for everything, a fixed hypothesis profile, real rows only from CRITEO_TRAIN_TXT."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line hands its arguments to Hydra through sys.argv; no test keeps another's."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.fixture(scope="session")
def criteo_rows() -> Path:
    """The file of real rows; tests that need it skip without it."""
    name = os.environ.get("CRITEO_TRAIN_TXT")
    if not name:
        pytest.skip("needs real rows: set CRITEO_TRAIN_TXT to Criteo's train.txt (or .gz)")
    path = Path(name)
    assert path.is_file(), f"CRITEO_TRAIN_TXT={name} is not a file"
    return path


@pytest.fixture(scope="session")
def small_rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for 7,000 made-up rows, prepared once, and the small model: 93 steps of 64."""
    from dlrm_hybrid.__main__ import run

    folder = tmp_path_factory.mktemp("rows")
    overrides = [
        "data.rows=7000",
        f"data.prepared={folder / 'prepared'}",
        "data.processes=1",
        "model=dlrm_small",
        "train.batch_size=64",
        "telemetry.tensorboard=false",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["dlrm_hybrid", "prepare", *overrides]) == 0
    return overrides


@pytest.fixture
def train(small_rows: list[str], tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Train on the small rows as the command line would: exit code and run folder."""
    from dlrm_hybrid.__main__ import run

    def train_here(name: str, *overrides: str) -> tuple[int, Path]:
        folder = tmp_path / name
        argv = ["dlrm_hybrid", "train", *small_rows, f"hydra.run.dir={folder}", *overrides]
        return run(argv), folder

    return train_here
