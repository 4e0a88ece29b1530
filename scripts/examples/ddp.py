"""Trains a small torch model in DDP on two gloo ranks, with a hundredth of its bytes.

    python scripts/examples/ddp.py
    python scripts/examples/ddp.py --methods Dct TopK --steps 1000

Needs torch, numpy and numba only. `train` is the tutorial; all else is a data set and a table of
methods. The loss is that of rows that no rank has trained on, over some seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.compress import (
    CltK,
    Dct,
    Deft,
    Dgc,
    Gaussian,
    GradientMethod,
    Hard,
    NoCompression,
    RandomK,
    RedSync,
    Sidco,
    TernGrad,
    TopK,
    Traffic,
    ddp_hook,
)

RANKS, ROWS = 2, 64
METHODS: dict[str, GradientMethod] = {
    "NoCompression": NoCompression(),
    "Dct": Dct(density=0.01),
    "Dct levels": Dct(density=0.01, precision="levels"),
    "TopK": TopK(density=0.01),
    "Dgc": Dgc(density=0.01, warmup_steps=25),  # of each of four densities: training is short
    "RedSync": RedSync(density=0.01),
    "Gaussian": Gaussian(density=0.01),
    "Hard": Hard(density=0.01),
    "Sidco": Sidco(density=0.01),
    "CltK": CltK(density=0.01),
    "Deft": Deft(density=0.01),
    "RandomK": RandomK(density=0.01),
    "TernGrad": TernGrad(),
}


def train(rank: int, method: GradientMethod, steps: int, seed: int) -> tuple[float, Traffic]:
    """Train a model in DDP; gives its loss, and what this rank has sent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model.append(nn.Linear(128, 1))
    ddp = DistributedDataParallel(model)
    state = method.ddp_state(ddp)
    ddp.register_comm_hook(state, ddp_hook)
    # DGC has its momentum before it compresses; with another one here it would count twice.
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.005 if method.name == "dgc" else 0.05)
    for step in range(steps):
        x, y = rows(seed, RANKS * step + rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x)[:, 0], y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = rows(seed, 2**40, count=4096)
        return float(nn.functional.mse_loss(ddp(x)[:, 0], y)), state.traffic


def rows(seed: int, number: int, count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Batch `number` of a task: what a small network of random weights says of random rows."""
    truth = torch.Generator().manual_seed(1000 + seed)
    first, second = torch.randn(16, 8, generator=truth), torch.randn(8, generator=truth)
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(7 * number + 1))
    return x, torch.tanh(x @ first / 4) @ second


def rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    """One of the ranks; the first prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    if rank == 0:
        print("| method | loss, mean | lowest to highest | bytes a step | of float32 |")
        print("|---|--:|--:|--:|--:|")
    for name in options.methods:
        method = METHODS[name]
        ends = [train(rank, method, options.steps, seed) for seed in range(options.seeds)]
        if rank == 0:
            print(table_row(name, [loss for loss, _ in ends], ends[0][1]), flush=True)
    dist.destroy_process_group()


def table_row(name: str, losses: Sequence[float], traffic: Traffic) -> str:
    """A line of the table."""
    mean = sum(losses) / len(losses)
    spread = f"{min(losses):.4f} to {max(losses):.4f}"
    sent = f"{traffic.sent / traffic.steps:,.0f} | 1/{traffic.dense / traffic.sent:.0f}"
    return f"| {name} | {mean:.4f} | {spread} | {sent} |"


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--steps", type=int, default=400, help="default 400")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), options)
        mp.spawn(rank_main, arguments, nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
