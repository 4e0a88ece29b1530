"""What the ranks of test_ddp_edges do: two processes, gloo, and what goes wrong or is unusual."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import ddp_ranks
import torch
import torch.distributed as dist
from ddp_ranks import hooked, loss_of

from dlrm_hybrid.compress import CltK, TopK
from dlrm_hybrid.types import DivergedError


def run(rank: int, store: str, out: str) -> None:
    """One of two ranks; what the tasks return is written to a file."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )
    tasks: tuple[Callable[[int], object], ...] = (ddp_after_a_failure,)
    results = {task.__name__: task(rank) for task in tasks}
    Path(f"{out}.{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def ddp_after_a_failure(rank: int) -> list[tuple[list[str], list[float], list[bytes]]]:
    """What five steps in DDP said, one of them failing; its gradients, and the last weights."""
    found = []
    for method in (TopK(density=0.1), CltK(density=0.1)):
        for bad in (0, 1, 3):  # before DDP rebuilds its buckets, at once after it, later
            ddp, _ = hooked(method)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            said, left = [], [1.0]
            for step in range(5):
                optimizer.zero_grad()
                loss = loss_of(ddp, rank, step)
                try:
                    (loss * torch.nan if rank == 1 and step == bad else loss).backward()
                    said.append("")
                except DivergedError as error:
                    said.append(str(error))
                    left = [float(one.grad.abs().sum()) for one in ddp.parameters()]
                optimizer.step()
            found.append((said, left, ddp_ranks.weights(ddp)))
    return found
