from pathlib import Path

import pytest

from dlrm_hybrid.data.shards import Shards, open_shards


@pytest.fixture(scope="session")
def shards(small_rows: list[str]) -> Shards:
    """Rows of synthetic clicks, prepared once."""
    folder = next(one.partition("=")[2] for one in small_rows if "data.prepared" in one)
    return open_shards(Path(folder), None)
