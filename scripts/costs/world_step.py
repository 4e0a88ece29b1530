"""Prints the CPU time of `World.step`, of the program and all ranks, in microseconds a sample.

    python scripts/costs/world_step.py --steps 400

The program passes the batches itself, 128 rows for each of two trainers; they and a server are
processes. `checkouts.py` runs it in two checkouts by turns.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from dlrm_hybrid import ModelSpec, World
from dlrm_hybrid.compress import Dct

TRAINERS, BATCH_SIZE, WARM_UP = 2, 128, 50
SPEC = ModelSpec(
    embedding_dim=16, bottom=(13, 512, 256, 64, 16), top=(512, 256, 1), table_rows=(1000,) * 26
)


def session_seconds() -> float:
    """CPU time so far of all processes of this session, which this process leads."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text("utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if int(fields[3]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="that are counted; default 400")
    steps = parser.parse_args().steps
    if os.getsid(0) != os.getpid():
        os.setsid()  # what it starts is told from other programs by its session
    draw = torch.Generator().manual_seed(0)
    rows = (
        torch.randn(BATCH_SIZE, SPEC.num_dense, generator=draw),
        torch.randint(1000, (BATCH_SIZE, len(SPEC.table_rows)), generator=draw),
        torch.rand(BATCH_SIZE, generator=draw).round(),
    )
    with World.processes(
        SPEC, trainers=TRAINERS, servers=1, batch_size=BATCH_SIZE, gradient=Dct(density=0.01)
    ) as world:
        for _ in range(WARM_UP):
            world.step([rows] * TRAINERS)
        before = session_seconds()
        for _ in range(steps):
            world.step([rows] * TRAINERS)
        took = session_seconds() - before
    print(f"{1e6 * took / (steps * TRAINERS * BATCH_SIZE):.2f}")


if __name__ == "__main__":
    main()
