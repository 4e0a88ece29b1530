"""Ranks of a gloo group, each a process, that all do the same tasks."""

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from patience import HANG_SECONDS

from dlrm_hybrid.run.supervisor import ensure_forkserver

LIMIT = timedelta(seconds=HANG_SECONDS)
Tasks = Sequence[Callable[[int], object]]


def results(tasks: Tasks, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank has found, by the names of the tasks; these are functions of the rank."""
    ensure_forkserver()  # torch takes seconds to import: it is there for ranks of worlds, too
    mp.start_processes(_run, (ranks, tasks, folder), nprocs=ranks, start_method="forkserver")
    return [pickle.loads((folder / f"result.{rank}").read_bytes()) for rank in range(ranks)]


def _run(rank: int, ranks: int, tasks: Tasks, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=LIMIT)
    found = {task.__name__: task(rank) for task in tasks}
    (folder / f"result.{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
