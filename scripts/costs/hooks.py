"""Measures the cost of DDP communication hooks per step, beside torch's fp16 and PowerSGD.

    python scripts/costs/hooks.py
    python scripts/costs/hooks.py --links 10mbit 100mbit 1gbit --repeats 3

Two ranks on gloo train a plain network, each hook in processes of its own, in turns. On the
loopback bytes cost nothing, so only the hook's computing shows: the time of a step and the peak
memory of a rank, each less that of DDP without a hook. With `--links` each rank has a host of its
own behind a link of that rate (what this needs is what `network=emulated` needs), and fewer steps
are measured where one takes long. Bytes are those that TCP has sent (`struct tcp_info`), so include
gloo's headers.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.comm.netem.plan import bits_per_second
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
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.signals import StopRequest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import Page, Row, arguments, publish, spread
from hosts import LOOPBACK, told_on

RANKS, ROWS, WARM = 2, 64, 5
ENTRY = "hooks:be_rank"
LINK_SECONDS = 20.0  # about as long is measured over a link
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
UNCHANGING = (PLAIN, "torch fp16", "NoCompression")  # a first step tells as much as a later one


def register(name: str, ddp: DistributedDataParallel) -> None:
    """Give a model the hook of a contestant."""
    if name == "torch fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif name == POWER_SGD:
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif name != PLAIN:
        ddp.register_comm_hook(METHODS[name].ddp_state(ddp), ddp_hook)


def be_rank(argument: str, report: Report, __: StopRequest) -> None:
    """Train for some steps, and report what they took."""
    rank, folder, interface, _, name, width, steps, warm = json.loads(argument)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts have no names
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
    for step in range(warm + steps):
        if step == warm:
            sent = sent_bytes()
        x = torch.randn(ROWS, width)
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    found = {
        "seconds": median(seconds[warm:]),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sent": (sent_bytes() - sent) / steps,
    }
    if rank == 0:
        report(Event(Kind.TICK, 0, 0.0, found))
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


def measured(name: str, width: int, link: str, steps: int) -> dict[str, Any]:
    """What one contestant takes, in processes of its own; SystemExit says why a rank fails."""
    if link != LOOPBACK:
        at_least_seconds = 8 * sent_by(name, width) / bits_per_second(link)
        steps = max(1, min(steps, int(LINK_SECONDS / at_least_seconds)))
    warm = min(WARM, steps) if name in UNCHANGING else WARM
    return told_on(link, RANKS, ENTRY, name, width, steps, warm)[0]


def sent_by(name: str, width: int) -> int:
    """About as many bytes as a step sends, to tell how many steps a link has time for."""
    elements = 4 * width * (width + 1) + width + 1
    return {PLAIN: 4, "NoCompression": 4, "torch fp16": 2}.get(name, 0) * elements or elements // 10


def rows(width: int, link: str, steps: int, repeats: int, names: Sequence[str]) -> list[Row]:
    """A row for each contestant; the median of turns."""
    turns = [{name: measured(name, width, link, steps) for name in names} for _ in range(repeats)]

    def middle(name: str, key: str) -> float:
        return median(turn[name][key] for turn in turns)

    def above(name: str, key: str) -> float:
        return median(turn[name][key] - turn[PLAIN][key] for turn in turns)

    return [
        {
            f"{link}, {width:,} wide": name,
            "ms a step": spread([1000 * turn[name]["seconds"] for turn in turns], 1),
            "more than DDP": f"{1000 * above(name, 'seconds'):+,.1f}",
            "times as fast": f"{middle(PLAIN, 'seconds') / middle(name, 'seconds'):.2f}",
            "peak MB more than DDP": f"{above(name, 'peak') / 1e6:+.0f}",
            "bytes a step": f"{middle(name, 'sent'):,.0f}",
        }
        for name in names
    ]


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024], help="of the layers")
    parser.add_argument("--links", nargs="+", default=[LOOPBACK], help="default loopback")
    parser.add_argument("--hooks", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=30, help="of each measurement; default 30")
    options = parser.parse_args()
    names = [PLAIN, *(name for name in options.hooks if name != PLAIN)]

    def measure() -> Page:
        return {
            f"Communication hooks of DDP, {link}, width {width}": rows(
                width, link, options.steps, options.repeats, names
            )
            for link, width in product(options.links, options.widths)
        }

    publish(measure, options.output)


if __name__ == "__main__":
    main()
