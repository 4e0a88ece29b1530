"""Trains a DLRM on batches of PyTorch's own DataLoader, with two trainers and a parameter server.

    python scripts/examples/own_batches.py                # ranks are objects of this process
    python scripts/examples/own_batches.py processes      # ranks are processes

Replace `Clicks`, whose rows are random, by your own data set.
"""

import math
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from dlrm_hybrid import ModelSpec, World
from dlrm_hybrid.compress import Dct

ROWS, TEST_ROWS, BATCH, EPOCHS = 40_000, 8_000, 128, 2
TABLES = (1000, 200, 50, 20)  # rows of each embedding table
SPEC = ModelSpec(embedding_dim=8, bottom=(6, 32, 8), top=(32, 1), table_rows=TABLES)

Row = tuple[Tensor, Tensor, Tensor]


class Clicks(Dataset[Row]):
    """6 dense columns, an id of each of 4 tables, and whether it was clicked."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        count = ROWS + TEST_ROWS
        self.dense = torch.randn(count, SPEC.num_dense, generator=draw)
        ids = [torch.randint(rows, (count,), generator=draw) for rows in TABLES]
        tastes = [torch.randn(rows, generator=draw) for rows in TABLES]
        liked = torch.stack([taste[one] for taste, one in zip(tastes, ids, strict=True)]).sum(0)
        self.logit = self.dense @ torch.randn(SPEC.num_dense, generator=draw) / 2 + liked - 1
        self.ids = torch.stack(ids, dim=1)
        self.label = torch.bernoulli(self.logit.sigmoid(), generator=draw)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, row: int) -> Row:
        return self.dense[row], self.ids[row], self.label[row]


def load(trainer: int, trainers: int) -> Iterator[Row]:
    """The batches of one trainer for one epoch: every T-th of an order that all draw alike."""
    order = torch.Generator().manual_seed(1)
    rows = Subset(Clicks(), range(ROWS))
    batches = DataLoader(rows, BATCH, shuffle=True, generator=order, drop_last=True)
    even = len(batches) // trainers * trainers  # every trainer has as many
    return islice(batches, trainer, even, trainers)


def main(make: str) -> None:
    """Train, score, save, and go on from what was saved."""
    clicks = Clicks()
    test = DataLoader(Subset(clicks, range(ROWS, ROWS + TEST_ROWS)), 1000)
    world_of = World.processes if make == "processes" else World.in_process
    options = {"optimizer": "adam", "embedding.optimizer": "rowwise_adagrad", "embedding.lr": 0.05}
    with (
        tempfile.TemporaryDirectory() as folder,
        world_of(
            SPEC,
            load,
            trainers=2,
            cuts=["bottom.1"],
            gradient=Dct(density=0.05),
            batch_size=BATCH,
            config=options,
        ) as world,
    ):
        for epoch in range(EPOCHS):
            losses = [one.loss for one in world.epoch() if one.loss is not None]
            scores = world.evaluate(test)
            print(
                f"epoch {epoch}: loss {math.fsum(losses) / len(losses):.4f}, "
                f"test log-loss {scores.log_loss:.4f}, AUC {scores.auc:.4f}"
            )
        push, dense = world.bytes["gradient_push"], world.dense_bytes["gradient_push"]
        print(f"gradients: {push / 1e6:.1f} MB sent, {dense / push:.0f} times fewer than float32")
        before = world.predict(test)
        world.load(world.save(folder))
        assert (world.predict(test) == before).all()
        print(f"{sum(one.numel() for one in world.state_dict().values()):,} numbers saved and read")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["in_process"])
