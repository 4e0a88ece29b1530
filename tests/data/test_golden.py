"""Batches of synthetic rows, bit for bit as the first release gave them: equal losses follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from criteo_rows import run_prepare

from dlrm_hybrid.data import profile, synthetic
from dlrm_hybrid.data.loader import START, Batch, Loader, sequential_batches
from dlrm_hybrid.data.shards import open_shards

ROWS = 5_000
TABLE_ROWS_XXH3 = {"all_days": "49b8e033e7f0e67d", "train_days": "25ef9213dfcf3f39"}
BATCHES_XXH3 = {
    ("all_days", True): "ff1bc99ac2f964fc",
    ("all_days", False): "1c7c223e6cdae307",
    ("train_days", True): "064318821fdb3973",
    ("train_days", False): "c948c78d7a365f85",
}
RULES = {
    "all_days": {},
    "train_days": {"vocabulary": "train_days", "min_count": 2, "max_ind_range": 10_000},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows, prepared by each of the rules."""
    folder = tmp_path_factory.mktemp("golden")
    raw = folder / "train.txt"
    synthetic.generate(raw, ROWS, 3, profile.builtin("criteo_kaggle"), lambda done: None)
    for name, rules in RULES.items():
        run_prepare(raw, folder / name, block_bytes=1 << 18, **rules)
    return {name: folder / name for name in RULES}


def add(digest: xxhash.xxh3_64, batch: Batch) -> None:
    for array in (batch.dense_BI, batch.bags.values, batch.label_B):
        digest.update(np.ascontiguousarray(array).data)


@pytest.mark.parametrize(("rules", "shuffle"), list(BATCHES_XXH3))
def test_batches_are_those_of_the_first_release(
    folders: dict[str, Path], rules: str, shuffle: bool
) -> None:
    shards = open_shards(folders[rules], None)
    table_rows = np.array(shards.table_rows, np.int64)
    assert xxhash.xxh3_64_hexdigest(table_rows.data) == TABLE_ROWS_XXH3[rules]
    loader = Loader(
        shards, batch_size=96, seed=5, shuffle=shuffle, shuffle_block_rows=700, shuffle_read_rows=70
    )
    digest, state = xxhash.xxh3_64(), START
    for _ in range(loader.steps_per_epoch + 7):
        batch, state = loader.read(state)
        add(digest, batch)
    for part in ("day", "first_half"):
        for batch in sequential_batches(shards, shards.test_rows(part), 100):
            add(digest, batch)
    assert digest.hexdigest() == BATCHES_XXH3[rules, shuffle]
