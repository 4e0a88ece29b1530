"""Bags of ids: rows of batches taken apart and put together again, by lists of lists."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.bags import (
    Bags,
    expanded,
    in_order,
    jagged,
    joined,
    lengths_of,
    part,
    require_offsets,
    shares_of_means,
    table_offsets,
    with_first_ids,
)

Lists = list[list[list[int]]]  # by table and row
FOUR = np.arange(4), np.ones((2, 2), np.int64)


@st.composite
def batches(draw: st.DrawFn, tables: int, most: int = 4) -> Lists:
    rows = draw(st.integers(0, 6))
    bag = st.lists(st.integers(0, 2**31 - 1), max_size=most)
    return [[draw(bag) for _ in range(rows)] for _ in range(tables)]


def bags_of(lists: Lists, weighted: bool = False) -> Bags[np.ndarray]:
    rows = len(lists[0])
    values = np.array([one for table in lists for bag in table for one in bag], np.int64)
    lengths = np.array([[len(bag) for bag in table] for table in lists], np.int64)
    weights = weight_of(values) if weighted else None
    return jagged(values, lengths.reshape(len(lists), rows), (), weights)


def weight_of(values: np.ndarray) -> np.ndarray:
    """By which an id's weight is told from others'."""
    return (values % 8191 + 0.5).astype(np.float32)


def lists_of(bags: Bags[np.ndarray]) -> Lists:
    offsets = bags.offsets
    if offsets is None:
        return [[[one] for one in ids] for ids in bags.values.tolist()]
    require_offsets(bags)
    found = [bags.values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    return [found[t * bags.rows : (t + 1) * bags.rows] for t in range(bags.tables)]


@given(batches(3))
def test_a_record_says_what_it_holds(lists: Lists) -> None:
    bags = bags_of(lists)
    assert lists_of(bags) == lists
    assert (bags.tables, bags.rows) == (3, len(lists[0]))
    assert bags.num_ids == sum(len(bag) for table in lists for bag in table)
    assert lengths_of(bags).tolist() == [[len(bag) for bag in table] for table in lists]
    starts = table_offsets(bags).tolist()
    assert starts[0] == 0 and starts[-1] == bags.num_ids
    assert np.diff(starts).tolist() == [sum(map(len, table)) for table in lists]


@given(batches(2), st.integers(0, 7), st.integers(0, 7))
def test_a_part_has_the_bags_of_its_rows(lists: Lists, start: int, stop: int) -> None:
    rows = slice(start, stop)
    assert lists_of(part(bags_of(lists), rows)) == [table[rows] for table in lists]


@given(st.lists(batches(2), min_size=1, max_size=4))
def test_joined_batches_have_all_rows(several: Sequence[Lists]) -> None:
    expected = [[bag for lists in several for bag in lists[table]] for table in range(2)]
    assert lists_of(joined([bags_of(lists) for lists in several])) == expected


@given(batches(3), st.lists(st.integers(0, 2), max_size=5))
def test_tables_come_in_any_order_and_again(lists: Lists, order: list[int]) -> None:
    found = in_order(bags_of(lists), np.array(order, np.int64))
    assert found.tables == len(order)
    if order:
        assert lists_of(found) == [lists[table] for table in order]


@given(batches(3), st.sets(st.integers(0, 2)), st.permutations(range(3)), st.integers(0, 5))
def test_tables_that_are_averaged_stay_so(
    lists: Lists, averaged: set[int], order: list[int], cut: int
) -> None:
    bags = replace(bags_of(lists), averaged=tuple(sorted(averaged)))
    share_BF1 = shares_of_means(bags)
    assert (share_BF1 is None) is (not averaged)
    for table, row in product(range(3), range(bags.rows)):
        share = 1 / max(len(lists[table][row]), 1) if table in averaged else 1
        assert share_BF1 is None or share_BF1[row, table, 0] == np.float32(share)
    for same in (
        *(part(bags, slice(cut)), joined([bags, bags]), bags.map(np.copy)),
        *(expanded(bags, {}, lambda table, ids_B: ids_B), with_first_ids(bags, ())),
    ):
        assert same.averaged == bags.averaged
    found = in_order(bags, np.array(order, np.int64))
    assert {order[place] for place in found.averaged} == averaged


@given(batches(3), st.permutations(range(3)), st.integers(0, 5), st.integers(1, 5))
def test_each_id_keeps_its_weight(lists: Lists, order: list[int], cut: int, size: int) -> None:
    bags, bare = bags_of(lists, weighted=True), bags_of(lists)
    for one in (
        *(part(bags, slice(cut)), part(bags, slice(cut, None)), joined([bags, bags])),
        *(in_order(bags, np.array(order, np.int64)), bags.map(np.copy)),
    ):
        assert np.array_equal(one.weights, weight_of(one.values))
        require_offsets(one)
    of_tables = [np.array([one for bag in table for one in bag], np.int64) for table in lists]
    wanted = [w for ids_N in of_tables for w in (weight_of(ids_N), np.ones(len(ids_N)))]
    assert np.array_equal(joined([bags, bare]).weights, np.concatenate(wanted))
    ids_FB = np.arange(3 * size).reshape(3, size)
    ones = jagged(ids_FB.reshape(-1), np.ones_like(ids_FB), (), weight_of(ids_FB.reshape(-1)))
    found = expanded(ones, {1: 2}, lambda table, ids_B: np.stack([ids_B, ids_B + 99], 1))
    wanted = [weight_of(ids_FB[0]), np.ones(2 * size), weight_of(ids_FB[2])]
    assert np.array_equal(found.weights, np.concatenate(wanted))
    again = with_first_ids(found, (1,))
    assert np.array_equal(again.values, ones.values) and len(again.weights) == ones.num_ids


@given(batches(3), st.integers(1, 4))
def test_parts_joined_are_the_batch(lists: Lists, size: int) -> None:
    """As micro-batches, and as the batches of trainers."""
    bags, rows = bags_of(lists), len(lists[0])
    parts = [part(bags, slice(first, first + size)) for first in range(0, max(rows, 1), size)]
    again = joined(parts)
    assert np.array_equal(again.values, bags.values)
    assert again.offsets is not None and np.array_equal(again.offsets, bags.offsets)


@given(st.integers(0, 9), st.integers(0, 9))
def test_bags_of_one_id_are_the_same_without_offsets(rows: int, cut: int) -> None:
    ids_FB = np.random.default_rng(rows).integers(0, 99, (3, rows))
    plain, counted = Bags(ids_FB), jagged(ids_FB.reshape(-1), np.ones_like(ids_FB))
    assert (plain.tables, plain.rows, plain.num_ids) == (3, rows, 3 * rows)
    assert (counted.tables, counted.rows, counted.num_ids) == (3, rows, 3 * rows)
    order = np.array([2, 0, 0])
    for change in (
        lambda bags: bags,
        lambda bags: part(bags, slice(cut)),
        lambda bags: joined([bags, bags]),
        lambda bags: in_order(bags, order),
    ):
        one, other = change(plain), change(counted)
        assert one.offsets is None and one.values.flags.c_contiguous
        assert lists_of(one) == lists_of(other)
        assert np.array_equal(table_offsets(one), table_offsets(other))
        assert np.array_equal(lengths_of(one), lengths_of(other))
    assert lists_of(joined([plain, counted])) == lists_of(joined([plain, plain]))


@pytest.mark.parametrize(
    "offsets", [[0, 2, 1, 3, 4], [1, 2, 3, 3, 4], [0, 1, 2, 3, 3], [0, 1, 2, 4], []]
)
def test_offsets_that_are_none_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets of .* bags of 2 tables"):
        require_offsets(Bags(np.arange(4), np.array(offsets, np.int64), 2))


def test_weights_that_are_none_are_refused() -> None:
    three = np.ones(3, np.float32)
    for bags in (Bags(np.ones((2, 2), int), weights=np.ones((2, 2))), jagged(*FOUR, (), three)):
        with pytest.raises(ValueError, match="weights .* of bags of 4 ids"):
            require_offsets(bags)


def test_lengths_that_are_none_are_refused() -> None:
    for lengths in ([[1, -1], [1, 3]], [[1, 1], [1, 2]]):
        with pytest.raises(ValueError, match="bags of . ids, and 4 ids"):
            jagged(np.arange(4), np.array(lengths))
