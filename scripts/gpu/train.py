"""Compares `train device=cuda` with `device=cpu`, and its speed with a plain PyTorch DLRM's.

    python scripts/gpu/train.py docs/benchmarks

Writes gpu_train_<card>.md and gpu_train_<card>.json, after each stage what is known so far. Losses
are those of one trainer on the same batches, with tables on the host and on the card
(`embedding.device=cuda`). Speed is that of steps on batches in memory, without a loader: the best
of some rounds. The plain model (scripts/benchmarks/plain_dlrm.py) is on the card with all its
tables, its batches in pinned memory. `--device cpu` runs all of it with the CPU for a card.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from plain_dlrm import PAPER_SPEC, PlainBatch, PlainDlrm, PlainTraining, RandomRows, draw_rows

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.placement import HOST, Placement, matrix_products
from dlrm_hybrid.model.row_storage import IN_MEMORY
from dlrm_hybrid.parallel.dense.client import LocalClient
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.world.settings import settings_of

STEPS, ROWS = 200, 2048  # of the comparison of losses
BATCH_SIZES = (2048, 65_536, 16_384)
BATCHES = 4  # that take turns
ROUNDS, ROUND_SECONDS = 3, 0.5
BOUND = 1e-4  # of the difference of two losses
WATCHED_STEPS = 6
PLAIN, ON_HOST, ON_CARD = "plain PyTorch", "tables on the host", "tables on the card"
THREADS = len(os.sched_getaffinity(0))


def engine(place: Placement, tables: Placement, rows: int, threads: int) -> InProcessEngine:
    """One trainer with the paper's model; its tables need no FBGEMM."""
    torch.set_num_threads(threads)
    keys = {"embedding.kernel": "numba", "train.batch_size": rows}
    named: dict[str, object] = {"parallel.trainers": 1, "parallel.cuts": [], "parallel.servers": 0}
    config = settings_of(PAPER_SPEC, "in_process", named, None, keys).config
    layout = build_world.layout(config, PAPER_SPEC, STEPS, attempt=0)
    layout = replace(layout, placement=place, tables=tables)
    return build_engine.engine_of(layout, None, IN_MEMORY)


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


def plain_batches(drawn: Sequence[Batch], pins: bool) -> list[PlainBatch]:
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
        made.append(PlainBatch(*(part.pin_memory() if pins else part for part in tensors)))
    return made


def losses(
    place: Placement, tables: Placement, drawn: Sequence[Batch]
) -> tuple[list[float], dict[str, float]]:
    """Mean losses of the first steps, and how far the first layer and a table have moved."""
    made = engine(place, tables, ROWS, threads=1)
    (learner,) = made.ranks.learners
    client = learner.client
    assert isinstance(client, LocalClient)
    held = {"layer": client.weights["bottom.1.weight"], "table": made.ranks.tables[0].view}
    before = {name: one.detach().clone() for name, one in held.items()}
    found = [made.learn([one]).loss_sum / ROWS for one in islice(cycle(drawn), STEPS)]
    return found, {name: float((one - before[name]).abs().max()) for name, one in held.items()}


class Crossings(TorchDispatchMode):
    """Counts the copies between host and device, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device != made.device:
                self.copies, self.bytes = self.copies + 1, self.bytes + source.nbytes
        return made


def watched(made: InProcessEngine, drawn: Sequence[Batch], device: str) -> dict[str, float]:
    """Per step: how often torch lets the host wait, and copies between host and device."""
    for one in drawn:
        made.learn([one])
    waits: list[Any] = []
    with warnings.catch_warnings(record=True) as caught, Crossings() as crossings:
        warnings.simplefilter("always")
        for one in islice(cycle(drawn), WATCHED_STEPS):
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            made.learn([one])
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in caught if "synchroniz" in str(one.message)]
    return {
        "waits": len(waits) / WATCHED_STEPS,
        "copies": crossings.copies / WATCHED_STEPS,
        "bytes": crossings.bytes / WATCHED_STEPS,
    }


def samples_per_second(step: Callable[[int], object], rows: int, device: str) -> float:
    """The best of some rounds."""
    best = 0.0
    for turn in range(ROUNDS + 1):  # the first one warms up
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < ROUND_SECONDS:
            step(done)
            done += 1
        if device == "cuda":
            torch.cuda.synchronize()
        speed = done * rows / (time.perf_counter() - began)
        best = max(best, speed) if turn else 0.0
    return best


def plain_steps(rows: int, device: str) -> Callable[[int], object]:
    """The steps of plain PyTorch."""
    training = PlainTraining(PlainDlrm(PAPER_SPEC, seed=0).to(device), lr=0.1)
    plain = plain_batches(timed_batches(rows), pins=device == "cuda")

    def step(turn: int) -> None:
        one = plain[turn % len(plain)]
        parts = (one.dense_BI, one.offsets_FB, one.ids_FB, one.label_B1)
        training.step(PlainBatch(*(part.to(device, non_blocking=True) for part in parts)))

    return step


def own_steps(name: str, rows: int, device: str) -> Callable[[int], object]:
    """Our steps, with tables where the contestant's name says."""
    place = Placement(torch.device(device), is_apart=True)
    threads = 1 if "1 thread" in name else THREADS
    made = engine(place, place if name.startswith(ON_CARD) else HOST, rows, threads)
    drawn = timed_batches(rows)
    return lambda turn: made.learn([drawn[turn % len(drawn)]])


def timed_batches(rows: int) -> list[Batch]:
    """The batches of all contestants, which take turns."""
    return batches(draw_rows(PAPER_SPEC.table_rows, BATCHES * rows, seed=1), rows)


def speed(name: str, rows: int, device: str) -> float:
    """Samples per second of a contestant: its name begins with PLAIN, ON_HOST or ON_CARD."""
    is_plain = name.startswith(PLAIN)
    step = plain_steps(rows, device) if is_plain else own_steps(name, rows, device)
    with matrix_products(device, tf32="TF32" in name):
        return samples_per_second(step, rows, device)


def page(written: Mapping[str, Any]) -> str:
    """The page of Markdown."""
    speeds: Mapping[int, Mapping[str, float]] = written["samples_per_second"]
    names = list(dict.fromkeys(name for found in speeds.values() for name in found))
    lines = [["batch size", *names], ["---", *("--:" for _ in names)]]
    for rows, found in sorted(speeds.items()):
        lines.append([f"{rows:,}"])
        for name in names:
            one, plain = found.get(name), found.get(f"{PLAIN}, TF32" if "TF32" in name else PLAIN)
            beside = f" ({one / plain:.2f})" if one and plain else ""
            lines[-1].append("" if one is None else f"{one:,.0f}{beside}")
    facts = "\n".join(f"- {name}: {value}" for name, value in written["facts"].items())
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    compared = "\n".join(
        f"- {name}: losses differ by up to {written['differences'][name]:.1e}; the first layer has "
        f"moved by up to {moved['layer']:.1e}, the first table by {moved['table']:.1e}; a step "
        f"waits {each['waits']:g} times for the card, and copies {each['copies']:g} times between "
        f"host and card, {each['bytes']:,.0f} bytes"
        for name, moved, each in (
            (name, written["moved"][name], written["each_step"][name]) for name in written["moved"]
        )
    )
    return (
        f"# Training on one {written['card']}\n\n```\nscripts/gpu/check.sh\n```\n\n{facts}\n\n"
        f"Losses of {STEPS} steps of {ROWS:,} rows beside those on the CPU:\n\n{compared}\n\n"
        f"## Samples per second\n\nOne trainer, {THREADS} threads unless it says 1; in "
        f"brackets times plain PyTorch, which has its tables on the card.\n\n{table}\n"
    )


def compare(written: dict[str, Any], device: str, show: Callable[[], None]) -> None:
    """Losses beside the CPU's, with the tables on either side."""
    place = Placement(torch.device(device), is_apart=True)
    drawn = batches(draw_rows(PAPER_SPEC.table_rows, BATCHES * ROWS, seed=0), ROWS)
    here, _ = losses(HOST, HOST, drawn)
    written["losses"]["cpu"] = here
    for name, tables in ((ON_CARD, place), (ON_HOST, HOST)):
        there, moved = losses(place, tables, drawn)
        made = engine(place, tables, ROWS, THREADS)
        written["each_step"][name] = watched(made, drawn, device)
        written["losses"][name], written["moved"][name] = there, moved
        pairs = zip(there, here, strict=True)
        written["differences"][name] = max(abs(a - b) for a, b in pairs)
        show()


def main() -> int:
    """Compare, and write both files; 1 if losses differ, weights stay, or no speed is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=BATCH_SIZES)
    parser.add_argument("--seconds", type=float, default=90, help="no measurement begins later")
    options = parser.parse_args()
    until, device, folder = time.monotonic() + options.seconds, options.device, options.folder
    card = torch.cuda.get_device_name() if device == "cuda" else device
    facts = {**describe().facts(), "torch": torch.__version__}
    written: dict[str, Any] = {"card": card, "facts": facts, "samples_per_second": {}}
    written |= {name: {} for name in ("differences", "moved", "each_step", "losses")}
    name = "gpu_train_" + re.sub(r"\W+", "-", card.lower())
    folder.mkdir(parents=True, exist_ok=True)

    def show() -> None:
        text = json.dumps(written, indent=1) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
        (folder / f"{name}.md").write_text(page(written), encoding="utf-8")

    compare(written, device, show)
    more = [f"{ON_HOST}, 1 thread", f"{ON_CARD}, TF32", f"{PLAIN}, TF32"]
    for contestants in ([PLAIN, ON_CARD, ON_HOST], more):
        for rows in options.batch_sizes:
            for one in contestants:
                if time.monotonic() < until:
                    found = written["samples_per_second"].setdefault(rows, {})
                    found[one] = speed(one, rows, device)
                    show()
    print(page(written))
    still = any(not moved for both in written["moved"].values() for moved in both.values())
    far = any(one > BOUND for one in written["differences"].values())
    return int(far or still or not written["samples_per_second"])


if __name__ == "__main__":
    sys.exit(main())
