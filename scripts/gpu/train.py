"""Compares `train device=cuda` with `device=cpu`, and its speed with a plain PyTorch DLRM's.

    python scripts/gpu/train.py docs/benchmarks

Writes gpu_train_<card>.md and gpu_train_<card>.json. Losses are those of the same batches, one
trainer and tables on the host. Speed is that of steps on batches in memory, without a loader: the
best of some rounds. The plain model (scripts/benchmarks/plain_dlrm.py) is on the card with all its
tables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from plain_dlrm import PAPER_SPEC, PlainBatch, PlainDlrm, PlainTraining, RandomRows, draw_rows

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.row_storage import IN_MEMORY
from dlrm_hybrid.parallel.dense.client import LocalClient
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.world.settings import settings_of

STEPS, ROWS = 200, 2048  # of the comparison of losses
BATCH_SIZES = (2048, 16_384, 65_536)
BATCHES = 4  # that take turns
ROUNDS, ROUND_SECONDS = 4, 0.6
BOUND = 1e-4  # of the difference of two losses


def engine(device: str, rows: int, threads: int) -> InProcessEngine:
    """One trainer with the paper's model; its tables need no FBGEMM."""
    torch.set_num_threads(threads)
    keys = {"device": device, "embedding.kernel": "numba", "train.batch_size": rows}
    named: dict[str, object] = {"parallel.trainers": 1, "parallel.cuts": [], "parallel.servers": 0}
    config = settings_of(PAPER_SPEC, "in_process", named, None, keys).config
    layout = build_world.layout(config, PAPER_SPEC, STEPS, attempt=0)
    return build_engine.engine_of(config, layout, None, IN_MEMORY, SpanClock())


def batches(drawn: RandomRows, rows: int) -> list[Batch]:
    """Batches of rows, as a loader makes them."""
    return [
        Batch(
            torch.from_numpy(drawn.counts_RI[one]).float().add(1).log().numpy(),
            Bags(drawn.ids_RF[one].T.astype("int64", order="C")),
            drawn.label_R[one].astype("float32"),
        )
        for one in (slice(at, at + rows) for at in range(0, len(drawn), rows))
    ]


def plain_batches(drawn: Sequence[Batch]) -> list[PlainBatch]:
    """The same batches as facebookresearch/dlrm gives them to its model, in pinned memory."""
    made: list[PlainBatch] = []
    for one in drawn:
        offsets_B = torch.arange(len(one.label_B))
        tensors = (
            torch.from_numpy(one.dense_BI),
            offsets_B.repeat(one.bags.tables, 1),
            torch.from_numpy(one.bags.values),
            torch.from_numpy(one.label_B).view(-1, 1),
        )
        made.append(PlainBatch(*(pinned.pin_memory() for pinned in tensors)))
    return made


def losses(device: str, drawn: Sequence[Batch]) -> tuple[list[float], float]:
    """Mean losses of the first steps, and how far the first layer has moved."""
    made = engine(device, ROWS, threads=1)
    (client,) = made.ranks.clients
    assert isinstance(client, LocalClient)
    weight = client.weights["bottom.1.weight"]
    before: torch.Tensor = weight.clone()
    found = [made.learn([one]).loss_sum / ROWS for one in islice(cycle(drawn), STEPS)]
    return found, float((weight - before).abs().max())


def samples_per_second(
    step: Callable[[int], object], rows: int, wait: Callable[[], object]
) -> float:
    """The best of some rounds."""
    best = 0.0
    for turn in range(ROUNDS + 1):  # the first one warms up
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < ROUND_SECONDS:
            step(done)
            done += 1
        wait()
        speed = done * rows / (time.perf_counter() - began)
        best = max(best, speed) if turn else 0.0
    return best


def speeds(device: str, rows: int) -> dict[str, float]:
    """Samples per second of the plain model and of ours."""
    drawn = batches(draw_rows(PAPER_SPEC.table_rows, BATCHES * rows, seed=1), rows)
    threads = len(os.sched_getaffinity(0))
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    found: dict[str, float] = {}
    for name, count in (("1 thread", 1), (f"{threads} threads", threads)):
        ours = engine(device, rows, count)
        found[name] = samples_per_second(
            lambda turn, ours=ours: ours.learn([drawn[turn % BATCHES]]), rows, wait
        )
    model = PlainDlrm(PAPER_SPEC, seed=0).to(device)
    training = PlainTraining(model, lr=0.1)
    plain = plain_batches(drawn) if device.startswith("cuda") else []

    def plain_step(turn: int) -> None:
        one = plain[turn % BATCHES]
        there = (
            part.to(device, non_blocking=True)
            for part in (one.dense_BI, one.offsets_FB, one.ids_FB, one.label_B1)
        )
        training.step(PlainBatch(*there))

    if plain:
        found["plain PyTorch"] = samples_per_second(plain_step, rows, wait)
    return found


def page(written: dict[str, Any]) -> str:
    """The page of Markdown."""
    head = list(next(iter(written["samples_per_second"].values())))
    lines = [["batch size", *head], ["---", *("--:" for _ in head)]]
    for rows, found in written["samples_per_second"].items():
        lines.append([f"{rows:,}", *(f"{found[name]:,.0f}" for name in head)])
    facts = "\n".join(f"- {name}: {value}" for name, value in written["facts"].items())
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# Training on one {written['card']}\n\n```\nscripts/gpu/check.sh\n```\n\n{facts}\n\n"
        f"Losses of {STEPS} steps of {ROWS:,} rows differ from those on the CPU by up to "
        f"{written['largest_difference']:.1e}; the first layer has moved by up to "
        f"{written['moved']:.1e}.\n\n## Samples per second\n\n"
        f"One trainer, tables on the host; plain PyTorch with its tables on the card.\n\n{table}\n"
    )


def main() -> int:
    """Compare, and write both files; 1 if the losses differ or no weight has moved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=BATCH_SIZES)
    options = parser.parse_args()
    device: str = options.device
    card = torch.cuda.get_device_name() if device.startswith("cuda") else device
    drawn = batches(draw_rows(PAPER_SPEC.table_rows, BATCHES * ROWS, seed=0), ROWS)
    (there, moved), (here, _) = losses(device, drawn), losses("cpu", drawn)
    written: dict[str, Any] = {
        "card": card,
        "facts": describe().facts(),
        "largest_difference": max(abs(a - b) for a, b in zip(there, here, strict=True)),
        "moved": moved,
        "losses": {device: there, "cpu": here},
        "samples_per_second": {rows: speeds(device, rows) for rows in options.batch_sizes},
    }
    folder, name = options.folder, "gpu_train_" + re.sub(r"\W+", "-", card.lower())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page(written), encoding="utf-8")
    print(page(written))
    return int(written["largest_difference"] > BOUND or not moved)


if __name__ == "__main__":
    sys.exit(main())
