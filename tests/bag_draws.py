"""Batches of bags for the tests of tables, and what torch makes of them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_hybrid.bags import Bags, jagged, table_offsets
from dlrm_hybrid.model.embeddings import tensor_bags

MOST = 4


def drawn_bags(
    seed: object, table_rows: Sequence[int], rows: int, weighted: bool = False
) -> Bags[np.ndarray]:
    """Of 0 to 4 ids; the first table's have one, the last one's are empty, some ids repeat."""
    rng = np.random.default_rng(seed)
    lengths_FB = rng.integers(0, MOST + 1, (len(table_rows), rows))
    lengths_FB[0], lengths_FB[-1] = 1, 0
    counts = lengths_FB.sum(1)
    ids = [rng.integers(0, limit, count) for limit, count in zip(table_rows, counts, strict=True)]
    weights_N = rng.normal(size=counts.sum()).astype(np.float32) if weighted else None
    return jagged(np.concatenate(ids), lengths_FB, (), weights_N)


def counted(ids_FB: Tensor) -> Bags[Tensor]:
    """One id a bag, with the offsets that say so."""
    ids = ids_FB.contiguous().numpy()
    return tensor_bags(jagged(ids.reshape(-1), np.ones_like(ids)))


def pooled_by_torch(
    weights: Mapping[str, Tensor], bags: Bags[Tensor], is_sparse: bool = False
) -> Tensor:
    """Sums or means of rows (B, F, D) of the tables in order; gradients may be sparse."""
    assert bags.offsets is not None
    starts = table_offsets(bags.map(Tensor.numpy)).tolist()
    offsets_FB = bags.offsets[:-1].view(bags.tables, bags.rows)
    pooled = [
        functional.embedding_bag(
            bags.values[starts[table] : starts[table + 1]],
            weight,
            offsets_FB[table] - starts[table],
            mode="mean" if table in bags.averaged else "sum",
            sparse=is_sparse,
            per_sample_weights=None
            if bags.weights is None
            else bags.weights[starts[table] : starts[table + 1]],
        )
        for table, weight in enumerate(weights.values())
    ]
    return torch.stack(pooled, 1)
