"""Distinct ids against numpy.unique, sums in the order of the batch, bags by table and trainer."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.gaps import bag_offsets, sum_rows, unique_ids

SEEDS = st.integers(0, 2**32 - 1)
Int64s = NDArray[np.int64]


def distinct(ids_FB: Int64s, order_F: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    tables, rows = ids_FB.shape
    shift = rows.bit_length()
    keys_FB = np.sort(ids_FB << shift | np.arange(rows), axis=1)
    ids_K, counts_F = np.empty(ids_FB.size, np.int64), np.empty(tables, np.int64)
    inverse_BF = np.empty((rows, tables), np.int64)
    num_ids = unique_ids(keys_FB, shift, order_F, ids_K, counts_F, inverse_BF)
    return ids_K[:num_ids], counts_F, inverse_BF


@given(SEEDS, st.integers(0, 5), st.integers(0, 70))
def test_distinct_ids_are_those_of_numpy(seed: int, tables: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    limit_F1 = 2 ** rng.integers(0, 32, (tables, 1))
    ids_FB = rng.integers(0, limit_F1, (tables, rows))
    order_F = rng.permutation(tables)
    ids_K, counts_F, inverse_BF = distinct(ids_FB, order_F)
    expected = [np.unique(ids_FB[table]) for table in order_F]
    assert ids_K.tolist() == [row for part_K in expected for row in part_K.tolist()]
    assert counts_F.tolist() == [part_K.size for part_K in expected]
    assert (ids_K[inverse_BF] == ids_FB.T).all()
    # An id of two tables has a place in each.
    starts_F = np.empty(tables, np.int64)
    starts_F[order_F] = np.cumsum(counts_F) - counts_F
    ends_F = starts_F + counts_F[np.argsort(order_F)]
    assert ((inverse_BF >= starts_F) & (inverse_BF < ends_F)).all()


@given(SEEDS, st.integers(1, 4), st.integers(0, 40), st.integers(1, 9))
def test_gradients_are_summed_in_the_order_of_the_batch(
    seed: int, tables: int, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    ids_FB = rng.integers(0, 4, (tables, rows))
    ids_K, _, inverse_BF = distinct(ids_FB, np.arange(tables))
    scale_B11 = 10.0 ** rng.integers(-6, 6, (rows, 1, 1))
    gradient_BFD = (rng.standard_normal((rows, tables, columns)) * scale_B11).astype(np.float32)
    sum_KD = np.zeros((ids_K.size, columns), np.float32)
    sum_rows(gradient_BFD, inverse_BF, sum_KD)
    expected_KD = np.zeros_like(sum_KD)
    np.add.at(expected_KD, inverse_BF, gradient_BFD)  # unbuffered: one after the other
    assert sum_KD.tobytes() == expected_KD.tobytes()


def test_the_order_of_a_sum_shows() -> None:
    """Another order would give 0."""
    gradient_BFD = np.array([1.0, -1.0, 1e-8], np.float32).reshape(3, 1, 1)
    sum_KD = np.zeros((1, 1), np.float32)
    sum_rows(gradient_BFD, np.zeros((3, 1), np.int64), sum_KD)
    assert sum_KD[0, 0] == np.float32(1e-8)
    sum_KD[:] = 0
    sum_rows(gradient_BFD[[2, 0, 1]], np.zeros((3, 1), np.int64), sum_KD)
    assert sum_KD[0, 0] == 0


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_bags_come_by_table_then_trainer_and_point_back(counts: list[list[int]]) -> None:
    counts_TL = np.array(counts)
    trainers, tables = counts_TL.shape
    # An id says where it comes from: its trainer, its table, and how many came before.
    parts = [
        [100 * trainer + 10 * table + k for k in range(counts_TL[trainer, table])]
        for trainer in range(trainers)
        for table in range(tables)
    ]
    ids_K = np.array([row for part in parts for row in part], np.int64)
    most = int(counts_TL.sum(0).max())
    bag_ids_K, bags_K = np.full_like(ids_K, -1), np.full_like(ids_K, -1)
    offsets = np.full(tables * most + 1, -1)
    bag_offsets(ids_K, counts_TL, bag_ids_K, offsets, bags_K)
    expected = [row for table in range(tables) for part in parts[table::tables] for row in part]
    assert bag_ids_K.tolist() == expected
    sizes_LN = np.diff(offsets).reshape(tables, most)
    assert offsets[0] == 0
    for table in range(tables):
        full = counts_TL[:, table].sum()
        assert sizes_LN[table].tolist() == [1] * full + [0] * (most - full)
    # Where the lookup of an id lies in an array (N, L).
    looked_up_NL = np.full((most, tables), -1)
    for bag in np.flatnonzero(np.diff(offsets)):
        looked_up_NL[bag % most, bag // most] = bag_ids_K[offsets[bag]]
    assert looked_up_NL.reshape(-1)[bags_K].tolist() == ids_K.tolist()


def test_a_trainer_that_holds_no_table_has_no_bags() -> None:
    offsets, nothing = np.full(1, -1), np.empty(0, np.int64)
    bag_offsets(nothing, np.empty((2, 0), np.int64), nothing, offsets, nothing)
    assert offsets.tolist() == [0]
