"""Which rows a cache keeps and fetches: laws, and a dictionary that does the same slowly."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.embeddings import distinct_ids
from dlrm_hybrid.model.tables import Served
from dlrm_hybrid.parallel.tables.cached import CacheTurn, RowCache
from dlrm_hybrid.parallel.tables.lookups import ids_of, keys_of

LIMITS = st.builds(Served, cache_rows=st.integers(1, 12), cache_batches=st.integers(1, 5))
BATCHES = st.lists(st.sets(st.integers(0, 20), min_size=1).map(sorted), max_size=25)


class Reference:
    """Keys to the batch they were fetched for and the last that used them."""

    def __init__(self, limits: Served) -> None:
        self.limits = limits
        self.kept: dict[int, tuple[int, int]] = {}

    def turn(self, batch: int, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """The keys that are fetched, and those that leave."""
        fetched = [key for key in keys if key not in self.kept]
        for key in keys:
            self.kept[key] = self.kept.get(key, (batch, batch))[0], batch
        old = [key for key, (at, _) in self.kept.items() if at + self.limits.cache_batches <= batch]
        left = {key: self.kept.pop(key) for key in old}
        by_use = sorted(self.kept, key=lambda key: (self.kept[key][1], key))
        for key in by_use[: max(len(by_use) - self.limits.cache_rows, 0)]:
            left[key] = self.kept.pop(key)
        return fetched, sorted(left)


def taken(cache: RowCache, batch: int, keys: Sequence[int]) -> CacheTurn:
    return cache.turn(batch, np.array(keys, np.int64))


@given(LIMITS, BATCHES)
def test_a_cache_does_what_a_dictionary_does(limits: Served, batches: list[list[int]]) -> None:
    """A row has one slot, its own, from when it is fetched to when it leaves."""
    cache, reference = RowCache(limits), Reference(limits)
    slots: dict[int, int] = {}
    for batch, keys in enumerate(batches):
        turn = taken(cache, batch, keys)
        fetched, left = reference.turn(batch, keys)
        assert [keys[one] for one in turn.fetched_M] == fetched
        assert turn.left_L4[:, 0].tolist() == left
        slots |= {keys[one]: int(turn.slots_K[one]) for one in turn.fetched_M}
        assert len({*slots.values()}) == len(slots)
        assert [slots[key] for key in keys] == turn.slots_K.tolist()
        assert all(slot < turn.slots for slot in turn.slots_K)
        assert [slots.pop(key) for key in left] == turn.left_L4[:, 3].tolist()
        assert cache.kept_N4.tolist() == [
            [key, *reference.kept[key], slots[key]] for key in sorted(reference.kept)
        ]
        assert len(slots) == len(reference.kept) <= limits.cache_rows


@given(LIMITS, BATCHES, st.integers(0, 25))
def test_a_cache_that_goes_on_asks_for_the_same(
    limits: Served, batches: list[list[int]], stop: int
) -> None:
    """Also from a turn back, and with other slots."""
    unbroken, resumed = RowCache(limits), RowCache(limits)
    for batch, keys in enumerate(batches):
        turn = taken(unbroken, batch, keys)
        if batch == stop:
            before_N4 = turn.before_N4.copy()
            before_N4[:, 3] = np.arange(len(before_N4))[::-1]
            resumed.restart(before_N4)
        again = taken(resumed, batch, keys)
        assert again.fetched_M.tolist() == turn.fetched_M.tolist()
        assert again.left_L4[:, :3].tolist() == turn.left_L4[:, :3].tolist()
        assert len({*again.slots_K, *again.left_L4[:, 3]}) == len({*keys, *again.left_L4[:, 0]})


@given(st.integers(0, 2**32 - 1))
def test_keys_stand_for_ids(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids_FB = torch.from_numpy(rng.integers(0, [[1], [5], [2**31 - 1]], (3, 9)))
    ids = distinct_ids(Bags(ids_FB), np.arange(3))
    keys_K = keys_of(Rows(ids.ids_K, ids.counts_F))
    assert (np.diff(keys_K) > 0).all()
    back = ids_of(keys_K, 3)
    assert back.ids_K.tolist() == ids.ids_K.tolist()
    assert back.counts_L.tolist() == ids.counts_F.tolist()
