"""Bags of ids: for each table and row of a batch, the ids whose embeddings are pooled.

Shapes: B rows of a batch, F tables, N ids of all bags, S runs of consecutive ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np

from dlrm_hybrid.arrays import Bools, Float32s, Int64s

BagOf = Callable[[int, Int64s], Int64s]
"""Maps a table and R of its ids (R,) to their bags (R, bag size), each id first in its bag."""
_AT_ONCE = 1 << 15  # ids expanded at a time, so that they stay in the processor's cache


class Shaped(Protocol):
    """An array of numpy or torch."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of each dimension."""
        ...


Array = TypeVar("Array", bound=Shaped)
Other = TypeVar("Other", bound=Shaped)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bags(Generic[Array]):
    """The ids of a batch in the layout of a KeyedJaggedTensor: by table, then by row.

    Attributes:
        values: int64, contiguous: (F, B) where every bag has one id, else (N,).
        offsets: int64 (F * B + 1,), where each bag begins in `values`, then N; a bag may be empty.
            None: every bag has one id.
        jagged_tables: F if there are offsets: those of a batch without rows do not tell it.
        averaged: tables whose bags are pooled to the mean of their rows; others to the sum.
        weights: float32 (N,), factor of the row of each id; None: 1 each.
    """

    values: Array
    offsets: Array | None = None
    jagged_tables: int = 0
    averaged: tuple[int, ...] = ()
    weights: Any = None

    @property
    def tables(self) -> int:
        """Number of tables, F."""
        return self.values.shape[0] if self.offsets is None else self.jagged_tables

    @property
    def rows(self) -> int:
        """Number of rows, B."""
        if self.offsets is None:
            return self.values.shape[1]
        return (self.offsets.shape[0] - 1) // max(self.jagged_tables, 1)

    @property
    def num_ids(self) -> int:
        """Number of ids with repetitions, N."""
        return prod(self.values.shape)

    def map(self, function: Callable[[Array], Other]) -> Bags[Other]:
        """Apply a conversion, such as numpy to torch, to all arrays."""
        offsets = None if self.offsets is None else function(self.offsets)
        weights = None if self.weights is None else function(self.weights)
        return Bags(function(self.values), offsets, self.jagged_tables, self.averaged, weights)


def lengths_of(bags: Bags[Int64s]) -> Int64s:
    """Number of ids in each bag (F, B)."""
    shape = bags.tables, bags.rows
    return (
        np.ones(shape, np.int64) if bags.offsets is None else np.diff(bags.offsets).reshape(shape)
    )


def shares_of_means(bags: Bags[Int64s]) -> Float32s | None:
    """Factors of sums of rows, and then of their gradients (B, F, 1); None: 1 each."""
    if not bags.averaged:
        return None
    tables = list(bags.averaged)
    share_BF = np.ones((bags.rows, bags.tables), np.float32)
    share_BF[:, tables] = 1 / np.maximum(lengths_of(bags)[tables].T, 1)
    return share_BF[:, :, None]


def table_offsets(bags: Bags[Int64s]) -> Int64s:
    """Positions of each table's first id in the flat ids, then N: (F + 1,)."""
    first_bags = np.arange(bags.tables + 1) * bags.rows
    return first_bags if bags.offsets is None else bags.offsets[first_bags]


def known(bags: Bags[Int64s], is_known: Sequence[Bools]) -> Bags[Int64s]:
    """The bags with 0 instead of each id that its table says is not known."""
    first_F = np.cumsum([0, *map(len, is_known)])[:-1]
    first_N = np.repeat(first_F, np.diff(table_offsets(bags))).reshape(bags.values.shape)
    is_known_N = np.concatenate(is_known)[first_N + bags.values]
    return replace(bags, values=np.where(is_known_N, bags.values, 0))


def require_offsets(bags: Bags[Int64s]) -> None:
    """Refuse offsets or weights that do not fit the ids.

    Raises:
        ValueError: they do not begin at 0, decrease, do not end at N, or are not F * B + 1 many; or
            there are weights, but not N.
    """
    offsets = bags.offsets
    if bags.weights is not None and (offsets is None or bags.weights.shape != bags.values.shape):
        raise ValueError(f"weights {bags.weights.shape} of bags of {bags.num_ids} ids")
    if offsets is None:
        return
    is_whole = (
        bags.jagged_tables > 0 and len(offsets) % bags.jagged_tables == 1 % bags.jagged_tables
    )
    if not is_whole or offsets[0] or offsets[-1] != bags.num_ids or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"offsets of {len(offsets) - 1} bags of {bags.jagged_tables} tables from "
            f"{offsets[:1].tolist()} to {offsets[-1:].tolist()}, and {bags.num_ids} ids"
        )


def jagged(
    values_N: Int64s,
    lengths_FB: Int64s,
    averaged: tuple[int, ...] = (),
    weights_N: Float32s | None = None,
) -> Bags[Int64s]:
    """Make bags of any size from their ids and lengths.

    Args:
        values_N: ids by table, then by row.
        lengths_FB: number of ids in each bag; their sum is N.

    Raises:
        ValueError: a length is below 0, or their sum is not N.
    """
    offsets = np.zeros(lengths_FB.size + 1, np.int64)
    np.cumsum(lengths_FB, out=offsets[1:])
    if lengths_FB.min(initial=0) < 0 or offsets[-1] != len(values_N):
        raise ValueError(f"bags of {offsets[-1]} ids, and {len(values_N)} ids")
    return Bags(values_N, offsets, len(lengths_FB), averaged, weights_N)


def part(bags: Bags[Int64s], rows: slice) -> Bags[Int64s]:
    """The bags of consecutive rows of a batch."""
    if bags.offsets is None:
        return replace(bags, values=np.ascontiguousarray(bags.values[:, rows]))
    starts_FB = bags.offsets[:-1].reshape(bags.tables, bags.rows)[:, rows]
    lengths_FB = lengths_of(bags)[:, rows]
    return _picked(bags, run_places(starts_FB, lengths_FB), lengths_FB)


def joined(batches: Sequence[Bags[Int64s]]) -> Bags[Int64s]:
    """Concatenate batches along the rows."""
    averaged = batches[0].averaged
    if all(batch.offsets is None for batch in batches):
        return Bags(np.concatenate([batch.values for batch in batches], axis=1), averaged=averaged)
    values_N = np.concatenate([batch.values.reshape(-1) for batch in batches])
    firsts_1X = np.cumsum([0, *(batch.num_ids for batch in batches)])[None, :-1]
    offsets_FX = np.stack([table_offsets(batch) for batch in batches], axis=1)
    places_N = run_places(offsets_FX[:-1] + firsts_1X, np.diff(offsets_FX, axis=0))
    lengths_FB = np.concatenate([lengths_of(batch) for batch in batches], axis=1)
    whole = Bags(values_N, averaged=averaged, weights=weights_of_all(batches))
    return _picked(whole, places_N, lengths_FB)


def weights_of_all(all_bags: Sequence[Bags[Int64s]]) -> Float32s | None:
    """Concatenate the weights of several bags; None if none has any."""
    if all(bags.weights is None for bags in all_bags):
        return None
    return np.concatenate(
        [
            np.ones(bags.num_ids, np.float32) if bags.weights is None else bags.weights
            for bags in all_bags
        ]
    )


def in_order(bags: Bags[Int64s], order_L: Int64s) -> Bags[Int64s]:
    """Select tables by index, in this order, also repeatedly; raises IndexError."""
    averaged = tuple(np.flatnonzero(np.isin(order_L, bags.averaged)).tolist())
    if bags.offsets is None:
        return Bags(bags.values[order_L], averaged=averaged)
    offsets = table_offsets(bags)
    places_N = run_places(offsets[:-1][order_L], np.diff(offsets)[order_L])
    return replace(_picked(bags, places_N, lengths_of(bags)[order_L]), averaged=averaged)


def expanded(bags: Bags[Int64s], sizes: Mapping[int, int], bag_of: BagOf) -> Bags[Int64s]:
    """Expand the one id of each row to a whole bag, in some tables.

    Args:
        bags: bags of one id, of weight 1, in the tables to expand.
        sizes: by table to expand, the new bag size.
        bag_of: makes a bag from an id.
    """
    if not sizes:
        return bags
    offsets, lengths_FB, values_N = table_offsets(bags), lengths_of(bags), bags.values.reshape(-1)
    pieces: list[Bags[Int64s]] = []
    for table, (first, stop) in enumerate(pairwise(offsets.tolist())):
        ids_B = values_N[first:stop]
        weights_N = None if bags.weights is None else bags.weights[first:stop]
        if size := sizes.get(table):
            assert (lengths_FB[table] == 1).all(), "a bag of one id is expanded"
            lengths_FB[table] = size
            ids_BS = np.empty((len(ids_B), size), np.int64)
            rows = max(1, _AT_ONCE // size)
            for start in range(0, len(ids_B), rows):
                ids_BS[start : start + rows] = bag_of(table, ids_B[start : start + rows])
            ids_B, weights_N = ids_BS.reshape(-1), None
        pieces.append(Bags(ids_B, weights=weights_N))
    values_N = np.concatenate([piece.values for piece in pieces])
    return jagged(values_N, lengths_FB, bags.averaged, weights_of_all(pieces))


def with_first_ids(bags: Bags[Int64s], tables: Collection[int]) -> Bags[Int64s]:
    """Undo `expanded`: keep only the first id of each bag of these tables."""
    if bags.offsets is None or not tables:
        return bags
    lengths_FB = lengths_of(bags)
    lengths_FB[list(tables)] = 1
    return _picked(bags, run_places(bags.offsets[:-1], lengths_FB), lengths_FB)


def _picked(bags: Bags[Int64s], places_N: Int64s, lengths_FB: Int64s) -> Bags[Int64s]:
    """Bags of the ids in some places of `bags`, with their weights."""
    weights_N = None if bags.weights is None else bags.weights[places_N]
    return jagged(bags.values[places_N], lengths_FB, bags.averaged, weights_N)


def run_places(starts_S: Int64s, lengths_S: Int64s) -> Int64s:
    """Places of S runs of consecutive values, given by their starts and lengths."""
    starts_S, lengths_S = starts_S.reshape(-1), lengths_S.reshape(-1)
    ends_S = np.cumsum(lengths_S)
    total = int(ends_S[-1]) if len(ends_S) else 0
    return np.repeat(starts_S - ends_S + lengths_S, lengths_S) + np.arange(total)
