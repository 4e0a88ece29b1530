"""Ids of a batch that repeat: each once, gradients of equal ones summed, and the bags to look up.

Shapes: B rows of a batch, F tables, D embedding dimension, K distinct ids of all tables, T trainers
that ask, L tables that are looked up, N most distinct ids of all trainers in one table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


@kernel
def collapse(
    keys_FB: Int64s,
    shift: int,
    order_F: Int64s,
    ids_K: Int64s,
    counts_F: Int64s,
    places_BF: Int64s,
) -> int:
    """List the distinct ids of every table, ascending, and where each id of the batch is listed.

    Args:
        keys_FB: id << shift | row of the batch, ascending in each table.
        shift: 2**shift is more than B.
        order_F: tables in the order in which they are listed.
        ids_K: receives the ids; has room for F * B.
        counts_F: receives how many there are, in the order of `order_F`.
        places_BF: receives indices into `ids_K`.

    Returns:
        K.
    """
    num_rows = keys_FB.shape[1]
    mask = (1 << shift) - 1
    listed = 0
    for place in range(order_F.size):
        table = order_F[place]
        first = listed
        for row in range(num_rows):
            key = keys_FB[table, row]
            if row == 0 or key >> shift != ids_K[listed - 1]:
                ids_K[listed] = key >> shift
                listed += 1
            places_BF[key & mask, table] = listed - 1
        counts_F[place] = listed - first
    return listed


@kernel
def sum_rows(gradient_BFD: Float32s, places_BF: Int64s, sum_KD: Float32s) -> None:
    """Add every gradient to the row of its id, in the order of the batch."""
    for row in range(places_BF.shape[0]):
        for table in range(places_BF.shape[1]):
            place = places_BF[row, table]
            for column in range(sum_KD.shape[1]):
                sum_KD[place, column] += gradient_BFD[row, table, column]


@kernel
def lay_out(
    ids_K: Int64s, counts_TL: Int64s, bag_ids_K: Int64s, offsets: Int64s, bags_K: Int64s
) -> None:
    """Order ids by table, then by trainer; every id is a bag, and every table has N bags.

    Args:
        ids_K: by trainer, then by table.
        counts_TL: how many of them each trainer wants of each table.
        bag_ids_K: receives the ids by table.
        offsets: (L * N + 1,), receives where in `bag_ids_K` each bag begins; the last of a table
            are empty.
        bags_K: receives for each of `ids_K` its place in an array (N, L) of bags.
    """
    trainers, tables = counts_TL.shape
    bags = (offsets.size - 1) // max(tables, 1)
    laid = 0
    offsets[0] = 0
    for table in range(tables):
        bag = 0
        source = np.int64(0)
        for earlier in range(table):
            source += counts_TL[0, earlier]
        for trainer in range(trainers):
            for _ in range(counts_TL[trainer, table]):
                bag_ids_K[laid] = ids_K[source]
                bags_K[source] = bag * tables + table
                source += 1
                bag += 1
                laid += 1
                offsets[table * bags + bag] = laid
            if trainer + 1 < trainers:
                for later in range(table + 1, tables):
                    source += counts_TL[trainer, later]
                for earlier in range(table):
                    source += counts_TL[trainer + 1, earlier]
        while bag < bags:
            bag += 1
            offsets[table * bags + bag] = laid
