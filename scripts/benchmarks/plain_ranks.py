"""Measures a plain DLRM on two or more gloo ranks, built like facebookresearch/dlrm.

    python scripts/benchmarks/plain_ranks.py --ranks 2 --batch-size 64 --steps 1000

No servers and no loader: every rank has the whole MLPs, averaged by DistributedDataParallel, and a
part of the tables, in which it looks up the rows of all ranks; pooled rows are sent all-to-all.
Prints CPU microseconds per sample of all ranks, without the first steps. Ids follow a power law
over tables of Kaggle's sizes, limited to 100,000 rows.

Shapes: B rows of a rank, G = B · ranks, F tables, T tables of a rank, D embedding dimension,
W = T · D.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from plain_dlrm import PAPER_SPEC, PlainBatch, PlainDlrm, draw_rows, interact, plain_loader
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS

LR = 0.1
TABLES = 26
BATCHES = 50  # drawn before, used again and again


def main() -> None:
    """Start the ranks, print what they needed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of each rank")
    parser.add_argument("--steps", type=int, default=1000, help="that are measured")
    options = parser.parse_args()
    print(f"{cpu_microseconds(options.ranks, options.batch_size, options.steps):.1f}")


def cpu_microseconds(ranks: int, batch_size: int, steps: int) -> float:
    """Per sample, of all ranks."""
    with TemporaryDirectory() as folder:
        arguments = [(rank, ranks, batch_size, steps, folder) for rank in range(ranks)]
        with multiprocessing.get_context("spawn").Pool(ranks) as pool:
            pool.starmap(be_rank, arguments, chunksize=1)
        seconds = [float(Path(folder, f"{rank}").read_text("ascii")) for rank in range(ranks)]
    return 1e6 * sum(seconds) / (steps * batch_size * ranks)


def be_rank(rank: int, ranks: int, batch_size: int, steps: int, folder: str) -> None:
    """Train, and leave the CPU seconds that it took in a file named as the rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    batches = global_batches(PAPER_SPEC.table_rows, batch_size * ranks)
    train = PlainRank(PlainDlrm(PAPER_SPEC, seed=0), rank, ranks)
    for step in range(WARMUP_STEPS):
        train.step(batches[step % BATCHES])
    start = time.process_time()
    for step in range(steps):
        train.step(batches[step % BATCHES])
    Path(folder, f"{rank}").write_text(repr(time.process_time() - start), "ascii")
    dist.barrier()
    dist.destroy_process_group()


def global_batches(table_rows: tuple[int, ...], num_rows: int) -> list[PlainBatch]:
    """Batches of all ranks together, the same on each."""
    return list(plain_loader(draw_rows(table_rows, BATCHES * num_rows, seed=0), num_rows))


class PlainRank:
    """One rank's replica of the MLPs and its tables.

    Args:
        model: with all tables; those of other ranks are not used.
        rank: of this process.
        ranks: of all.
    """

    def __init__(self, model: PlainDlrm, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._bottom = DistributedDataParallel(model.bottom)
        self._top = DistributedDataParallel(model.top)
        self._own = range(rank * TABLES // ranks, (rank + 1) * TABLES // ranks)
        self._tables = [model.tables[table] for table in self._own]
        self._widths = [
            model_dim(model) * ((one + 1) * TABLES // ranks - one * TABLES // ranks)
            for one in range(ranks)
        ]
        modules = (self._bottom, self._top, *self._tables)
        weights = [weight for module in modules for weight in module.parameters()]
        self._optimizer = torch.optim.SGD(weights, lr=LR)
        self._loss = nn.BCELoss(reduction="mean")

    def step(self, batch: PlainBatch) -> float:
        """Learn this rank's part of a batch of all; its loss before the update."""
        looked_up = [
            table(batch.ids_FB[place], batch.offsets_FB[place])
            for place, table in zip(self._own, self._tables, strict=True)
        ]
        pooled = all_to_all(torch.cat(looked_up, dim=1), self._widths)
        part = slice(self._rank * len(pooled), (self._rank + 1) * len(pooled))
        x_BD: Tensor = self._bottom(batch.dense_BI[part])
        loss: Tensor = self._loss(self._top(interact(x_BD, [pooled])), batch.label_B1[part])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def model_dim(model: PlainDlrm) -> int:
    """D."""
    table = model.tables[0]
    assert isinstance(table, nn.EmbeddingBag)
    return table.embedding_dim


class Exchange(Function):
    """Rows of all samples of own tables, (G, T·D), become those of own samples, (B, F·D)."""

    @staticmethod
    def forward(ctx: Any, own_GW: Tensor, widths: Sequence[int]) -> Tensor:
        """One message for each rank."""
        ctx.widths, ctx.own = widths, own_GW.shape
        rows = own_GW.shape[0] // len(widths)
        sizes = [rows * width for width in widths]
        received = own_GW.new_empty(sum(sizes))
        dist.all_to_all_single(
            received, own_GW.reshape(-1), sizes, [rows * own_GW.shape[1]] * len(widths)
        )
        starts = [0, *accumulate(sizes)]
        parts = [received[i:j].view(rows, -1) for i, j in pairwise(starts)]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The way back; the mean over ranks, as DistributedDataParallel takes it."""
        (gradient_BW,) = gradients
        starts = [0, *accumulate(ctx.widths)]
        sent = torch.cat([gradient_BW[:, i:j].reshape(-1) for i, j in pairwise(starts)])
        rows = gradient_BW.shape[0]
        received = sent.new_empty(ctx.own.numel())
        own = [received.numel() // len(ctx.widths)] * len(ctx.widths)
        dist.all_to_all_single(received, sent, own, [rows * width for width in ctx.widths])
        return received.view(ctx.own) / len(ctx.widths), None


def all_to_all(own_GW: Tensor, widths: Sequence[int]) -> Tensor:
    """See `Exchange`."""
    return cast("Tensor", Exchange.apply(own_GW, widths))


if __name__ == "__main__":
    main()
