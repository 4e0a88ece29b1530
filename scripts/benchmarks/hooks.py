"""Measures the cost of DDP communication hooks per step, beside torch's fp16 and PowerSGD.

    python scripts/benchmarks/hooks.py

Two ranks on gloo and the loopback train a plain network, each hook in processes of its own, in
turns. On the loopback bytes cost nothing, so only the hook's computing shows: the time of a step
and the peak memory of a rank, each less that of DDP without a hook. Bytes are those that TCP has
sent (`struct tcp_info`), so include gloo's headers.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Row, arguments, command, load, render
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.compress import (
    CltK,
    Dct,
    Deft,
    Dgc,
    NoCompression,
    RandomK,
    Sidco,
    TernGrad,
    TopK,
    ddp_hook,
)
from dlrm_hybrid.telemetry.machine import describe

RANKS, ROWS, WARM = 2, 64, 5
PLAIN = "DDP, no hook"
METHODS = {
    "NoCompression": NoCompression(),
    "Dct": Dct(density=0.01),
    "Dct levels": Dct(density=0.01, precision="levels"),
    "TopK": TopK(density=0.01),
    "Dgc": Dgc(density=0.01, warmup_steps=0),
    "Sidco": Sidco(density=0.01),
    "CltK": CltK(density=0.01),
    "Deft": Deft(density=0.01),
    "RandomK": RandomK(density=0.01),
    "TernGrad": TernGrad(),
}
POWER_SGD = "torch PowerSGD, rank 1"
CONTESTANTS = (PLAIN, "torch fp16", POWER_SGD, *METHODS)


def register(name: str, ddp: DistributedDataParallel) -> None:
    """Give a model the hook of a contestant."""
    if name == "torch fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif name == POWER_SGD:
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif name != PLAIN:
        ddp.register_comm_hook(METHODS[name].ddp_state(ddp), ddp_hook)


def rank_main(rank: int, folder: str, name: str, width: int, steps: int) -> None:
    """Train for some steps; the first rank writes what it has measured."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = [one for _ in range(4) for one in (nn.Linear(width, width), nn.ReLU())]
    # Reductions that PowerSGD starts for several buckets may cross on their way over gloo, which
    # ends the process: it gets one.
    bucket_mb = 1000 if name == POWER_SGD else None
    ddp = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(width, 1)), bucket_cap_mb=bucket_mb
    )
    register(name, ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seconds: list[float] = []
    sent = 0
    for step in range(WARM + steps):
        if step == WARM:
            sent = sent_bytes()
        x = torch.randn(ROWS, width)
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    found = {
        "seconds": median(seconds[WARM:]),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sent": (sent_bytes() - sent) / steps,
        "elements": sum(one.numel() for one in ddp.parameters()),
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def sent_bytes() -> int:
    """Payload that TCP has sent on all sockets of this process."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    bytes_sent, bytes_again = struct.unpack_from("QQ", info, 200)
                    total += bytes_sent - bytes_again
        except OSError:
            continue  # closed since it was listed, or no TCP
    return total


def measured(name: str, width: int, steps: int) -> dict[str, Any]:
    """What one contestant takes, in processes of its own."""
    spawn: Callable[..., object] = vars(mp)["spawn"]  # torch exports it, and does not say so
    with TemporaryDirectory() as folder:
        spawn(rank_main, (folder, name, width, steps), nprocs=RANKS)
        return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))


def rows(width: int, steps: int, repeats: int) -> list[Row]:
    """A row for each contestant; the median of turns."""
    turns = [{name: measured(name, width, steps) for name in CONTESTANTS} for _ in range(repeats)]

    def middle(name: str, key: str) -> float:
        return median(turn[name][key] for turn in turns)

    def above(name: str, key: str) -> float:
        return median(turn[name][key] - turn[PLAIN][key] for turn in turns)

    return [
        {
            "hook": name,
            "ms a step": f"{1000 * middle(name, 'seconds'):.1f}",
            "more than DDP": f"{1000 * above(name, 'seconds'):+.1f}",
            "peak MB more than DDP": f"{above(name, 'peak') / 1e6:+.0f}",
            "bytes a step": f"{middle(name, 'sent'):,.0f}",
        }
        for name in CONTESTANTS
    ]


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the layers; default 1024")
    parser.add_argument("--steps", type=int, default=30, help="of each measurement; default 30")
    options = parser.parse_args()
    found = rows(options.width, options.steps, options.repeats)
    page = render("Communication hooks of DDP", describe(), command(), found) + f"\n{load()}\n"
    print(page)
    if options.output is not None:
        options.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
