"""Sums of bags, for files that take one id where this program makes a bag of it.

The bag of an id never changes, so its rows are added up once for all.

Shapes: R rows of a table, S ids of a bag, D embedding dimension, B rows at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.model.spec import ModelSpec

BLOCK_ELEMENTS = 1 << 24  # of rows that are added up at once


def with_sums(
    tensors: Mapping[str, Tensor],
    spec: ModelSpec,
    preprocessing: Preprocessing,
    tables: Collection[int],
) -> Mapping[str, Tensor]:
    """The tensors of a model with the sum of a whole bag in each row of some expanded tables.

    Args:
        tensors: by the names of a checkpoint; none is changed.
        spec: the model.
        preprocessing: its own, which says what the bags are.
        tables: from 0.
    """
    found = dict(tensors)
    for table in tables:
        name = f"{spec.table_names[table]}.weight"
        rows_RD = tensors[name]
        sums_RD = torch.empty_like(rows_RD)
        size = preprocessing.schema.categorical[table].expand_to
        block = max(1, BLOCK_ELEMENTS // (size * rows_RD.shape[1]))
        for first in range(0, len(rows_RD), block):
            id_B = np.arange(first, min(first + block, len(rows_RD)))
            ids_BS = torch.from_numpy(preprocessing.bag_of(table, id_B))
            sums_RD[first : first + block] = rows_RD[ids_BS].sum(1)
        found[name] = sums_RD
    return found
