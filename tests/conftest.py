"""One thread for everything, a fixed hypothesis profile, real rows only from CRITEO_TRAIN_TXT."""

import os
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


@pytest.fixture(scope="session")
def criteo_rows() -> Path:
    """The file of real rows; tests that need it skip without it."""
    name = os.environ.get("CRITEO_TRAIN_TXT")
    if not name:
        pytest.skip("needs real rows: set CRITEO_TRAIN_TXT to Criteo's train.txt (or .gz)")
    path = Path(name)
    assert path.is_file(), f"CRITEO_TRAIN_TXT={name} is not a file"
    return path
