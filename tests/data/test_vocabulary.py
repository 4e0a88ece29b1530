from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.data import vocabulary
from dlrm_hybrid.data.format import Segment
from dlrm_hybrid.data.vocabulary import ColumnResult, ColumnTask, Table, encode

# Few values, neighbours, and the ends of the range: hits, clusters and the key 0 all occur.
keys = st.lists(
    st.one_of(st.integers(0, 20), st.integers(2**32 - 5, 2**32 - 1), st.integers(0, 2**32 - 1))
)


@given(st.lists(keys, max_size=4), st.sampled_from([0, 1]))
def test_numbers_equal_those_of_a_dict(blocks: list[list[int]], first_id: int) -> None:
    table = Table()
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
    table = Table()
    ids = drawn.copy()
    for part in np.array_split(ids, 7):
        table.insert(part, 0)
    unique, first = np.unique(drawn, return_index=True)
    in_order = unique[np.argsort(first)]
    assert table.slots.size * 3 // 4 >= table.used == in_order.size > 1 << 18
    np.testing.assert_array_equal(table.keys(), in_order)
    np.testing.assert_array_equal(in_order[ids], drawn)


def encoded(
    folder: Path, stored: list[int], task: dict[str, object]
) -> tuple[ColumnResult, list[int], list[int], int]:
    spilled, keys_file = folder / "C01.bin", folder / "keys.bin"
    np.array(stored, np.uint32).tofile(spilled)
    reported: list[int] = []
    column = ColumnTask(spilled=spilled, keys=keys_file, **task)  # type: ignore[arg-type]
    result = encode(column, reported.append)
    assert result.digest == xxhash.xxh3_128_digest(keys_file.read_bytes())
    ids = np.fromfile(spilled, np.uint32).tolist()
    return result, ids, np.fromfile(keys_file, np.uint32).tolist(), sum(reported)


@given(
    stored=st.lists(st.integers(0, 12), min_size=4, max_size=60),
    holes=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    min_count=st.integers(0, 4),
    split=st.booleans(),
    max_ind_range=st.sampled_from([0, 5, 2**32]),
    block_rows=st.sampled_from([1, 7, 1 << 18]),
)
def test_a_column_equals_a_plain_reading(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: list[int],
    holes: tuple[int, int],
    min_count: int,
    split: bool,
    max_ind_range: int,
    block_rows: int,
) -> None:
    monkeypatch.setattr(vocabulary, "_BLOCK_ROWS", block_rows)
    half = len(stored) // 2
    known = Segment(holes[0], half - holes[0] if half > holes[0] else 0)
    others = Segment(half + holes[1], max(0, len(stored) - half - holes[1]))
    shared = min_count > 1 or split
    result, ids, written, reported = encoded(
        tmp_path,
        stored,
        {
            "known": (known,) if split else (known, others),
            "others": (others,) if split else (),
            "shared_id": shared,
            "min_count": min_count,
            "max_ind_range": max_ind_range,
        },
    )
    read = [
        [
            key % max_ind_range if max_ind_range else key
            for key in stored[part.first : part.first + part.rows]
        ]
        for part in (known, others)
    ]
    counted = read[0] if split else read[0] + read[1]
    kept = [key for key in dict.fromkeys(counted) if counted.count(key) >= min_count]
    expected = {key: number + shared for number, key in enumerate(kept)}
    for part, values in zip((known, others), read, strict=True):
        assert ids[part.first : part.first + part.rows] == [expected.get(key, 0) for key in values]
    assert written == kept
    assert result.table_rows == len(kept) + shared
    assert reported == known.rows + others.rows
