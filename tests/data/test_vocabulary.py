from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.data.sources.criteo_ids import KeyTable

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
