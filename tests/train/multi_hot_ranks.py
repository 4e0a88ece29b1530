"""Ranks that read bags of several ids; named by tests as the entry of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dlrm_hybrid.bags import jagged
from dlrm_hybrid.data.loader import Batch, Loader, LoaderState, sequential_batches
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.train import evaluation
from dlrm_hybrid.train.signals import StopRequest

ENTRY = "multi_hot_ranks:train_multi_hot"


def train_multi_hot(argument: str, report, stop: StopRequest) -> None:
    """Train and evaluate on bags that follow from the ids of the rows."""
    part = Loader.part

    def of_bags(loader: Loader, state: LoaderState, trainer: int) -> Batch:
        return multi_hot(part(loader, state, trainer), loader._shards.table_rows)

    def test_batches(shards: Shards, rows: range, batch_size: int) -> Iterator[Batch]:
        for batch in sequential_batches(shards, rows, batch_size):
            yield multi_hot(batch, shards.table_rows)

    Loader.part = of_bags
    evaluation.sequential_batches = test_batches
    train_rank(argument, report, stop)


def multi_hot(batch: Batch, table_rows: Sequence[int]) -> Batch:
    """Every second table's bags have 0 to 3 ids, which follow from the one that was there."""
    ids_FB = batch.bags.values
    lengths_FB = np.ones_like(ids_FB)
    lengths_FB[1::2] = (ids_FB[1::2] + np.arange(ids_FB.shape[1])) % 4
    limit_F11 = np.array(table_rows)[:, None, None]
    more_FBX = (ids_FB[..., None] * 7 + np.arange(4)) % limit_F11
    more_FBX[..., 0] = ids_FB
    is_there_FBX = np.arange(4) < lengths_FB[..., None]
    return replace(batch, bags=jagged(more_FBX[is_there_FBX], lengths_FB))
