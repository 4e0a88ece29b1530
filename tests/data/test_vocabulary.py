from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from criteo_rows import semantics
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.data.sources import criteo_ids
from dlrm_hybrid.data.sources.criteo_ids import ColumnTask, KeyTable, encode

# Few values, neighbours, and the ends of the range: hits, clusters and the key 0 all occur.
keys = st.lists(
    st.one_of(st.integers(0, 20), st.integers(2**32 - 5, 2**32 - 1), st.integers(0, 2**32 - 1))
)


@given(st.lists(keys, max_size=4), st.sampled_from([0, 1]))
def test_numbers_equal_those_of_a_dict(blocks: list[list[int]], first_id: int) -> None:
    table = KeyTable()
    known: dict[int, int] = {}
    for block in blocks:
        ids = np.array(block, np.uint32)
        table.insert(ids, first_id)
        expected = [known.setdefault(key, len(known)) + first_id for key in block]
        assert ids.tolist() == expected
    assert table.keys().tolist() == list(known)
    probes = [*known, 7, 2**31]
    found = np.array(probes, np.uint32)
    table.lookup(found)
    assert found.tolist() == [known.get(key, -1) + 1 for key in probes]


def test_numbers_survive_growth_and_full_probing() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 1 << 20, 1_000_000, np.uint32) * np.uint32(4096)
    table = KeyTable()
    ids = drawn.copy()
    for part in np.array_split(ids, 7):
        table.insert(part, 0)
    unique, first = np.unique(drawn, return_index=True)
    in_order = unique[np.argsort(first)]
    assert table.slots.size * 3 // 4 >= table.used == in_order.size > 1 << 18
    np.testing.assert_array_equal(table.keys(), in_order)
    np.testing.assert_array_equal(in_order[ids], drawn)


@given(
    stored=st.lists(st.integers(0, 12), min_size=4, max_size=60),
    min_count=st.integers(0, 4),
    split=st.booleans(),
    max_ind_range=st.sampled_from([0, 5, 2**32]),
    block_rows=st.sampled_from([1, 7, 1 << 18]),
)
def test_a_column_equals_a_plain_reading(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: list[int],
    min_count: int,
    split: bool,
    max_ind_range: int,
    block_rows: int,
) -> None:
    monkeypatch.setattr(criteo_ids, "_BLOCK_ROWS", block_rows)
    known_rows = len(stored) // 2 if split else len(stored)
    shared = min_count > 1 or split
    spilled, keys_file = tmp_path / "C01.bin", tmp_path / "1.npy"
    np.array(stored, np.uint32).tofile(spilled)
    meaning = semantics(
        vocabulary="train_days" if split else "all_days",
        min_count=min_count,
        max_ind_range=max_ind_range,
    )
    reported: list[int] = []
    task = ColumnTask(spilled, tmp_path, 1, len(stored), known_rows, meaning)
    result = encode(task, reported.append)
    read = [key % max_ind_range if max_ind_range else key for key in stored]
    counted = read[:known_rows]
    kept = [key for key in dict.fromkeys(counted) if counted.count(key) >= min_count]
    expected = {key: number + shared for number, key in enumerate(kept)}
    assert np.fromfile(spilled, np.uint32).tolist() == [expected.get(key, 0) for key in read]
    assert np.load(keys_file).tolist() == kept
    assert result.digest == xxhash.xxh3_128_digest(np.array(kept, np.uint32).tobytes())
    assert result.table_rows == len(kept) + shared
    assert sum(reported) == len(stored)
