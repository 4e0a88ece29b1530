"""Measures compression on a GPU: time, memory and waits of a step, beside torch's own methods.

    python scripts/gpu/measure.py docs/benchmarks

Writes gpu_<card>.md and gpu_<card>.json.

Times are medians of CUDA events around one encode and decode of a single trainer: gradients are
added to the residual, selected elements leave it, and the gradients are overwritten with them. As
after a backward pass, the device is busy before, so that the host is ahead until it waits; "from
idle" is the same without. Three draws of gradients take turns; thresholds settle in the 12 steps
before the measured 20. The floor is 12 bytes an element (gradient and residual are read, the
residual is written) at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from math import isqrt
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.compress import (
    Dct,
    Dgc,
    Gaussian,
    GradientMethod,
    RedSync,
    Sidco,
    TopK,
    ddp_hook,
)
from dlrm_hybrid.compress.library.compressor import ParameterCompressor

DEVICE = torch.device("cuda", 0)
SIZES = (1_000_000, 10_000_000, 100_000_000)
DENSITIES = (0.01, 0.001)
WARM, STEPS, SOURCES = 12, 20, 3
BUSY_CYCLES = 20_000_000  # about 10 ms
FLOOR_BYTES = 12  # an element: gradient and residual are read, the residual is written

Step = Callable[[int], object]


def methods(density: float) -> dict[str, GradientMethod]:
    """The methods that compute on the device."""
    return {
        "Dct": Dct(density=density),
        "TopK": TopK(density=density),
        "Sidco": Sidco(density=density),
        "Dgc": Dgc(density=density, warmup_steps=0),
        "Gaussian": Gaussian(density=density),
        "RedSync": RedSync(density=density),
    }


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Milliseconds of one step.

    Attributes:
        middle, low, high: median, first and last decile.
        idle: median where the device was idle before.
    """

    middle: float
    low: float
    high: float
    idle: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One step of a contestant.

    Attributes:
        elements: of all gradients.
        density: aimed at; None where there is none.
        name: of the contestant.
        time: it takes.
        extra: peak memory above the gradients and what was there, as part of the gradients' bytes.
        sent: part of the elements that were sent in the measured steps; None where it is no such
            method.
    """

    elements: int
    density: float | None
    name: str
    time: Spread
    extra: float | None = None
    sent: float | None = None


def timed(step: Step, prepare: Step = lambda turn: None) -> Spread:
    """The time of a step, what it waits for the host included."""
    taken: list[float] = []
    for turn in range(WARM + 2 * STEPS):
        prepare(turn)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if turn < WARM + STEPS:
            torch.cuda._sleep(BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
        begin.record()
        step(turn)
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    busy = taken[WARM : WARM + STEPS]
    deciles = quantiles(busy, n=10)
    return Spread(
        middle=median(busy), low=deciles[0], high=deciles[-1], idle=median(taken[WARM + STEPS :])
    )


def gradients_like(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Gradients with heavy tails."""
    drawn = torch.Generator(DEVICE).manual_seed(seed)
    made: list[Tensor] = []
    for shape in shapes:
        one = torch.randn(shape, generator=drawn, device=DEVICE)
        made.append(one.mul_(torch.randn(shape, generator=drawn, device=DEVICE).exp_()).mul_(1e-3))
    return made


def copy_bandwidth() -> float:
    """Bytes a second of a large copy from the device to itself, read and written."""
    given, taken = (torch.randn(2**28, device=DEVICE) for _ in range(2))
    seconds = timed(lambda turn: taken.copy_(given)).middle / 1e3
    return 2 * given.numel() * given.element_size() / seconds


def compressed(
    name: str, method: GradientMethod, shapes: Sequence[tuple[int, ...]], density: float | None
) -> Timing:
    """One encode and decode of a method by `reduce_gradients`, of a single trainer over nccl."""
    parameters = [
        (f"{index}", nn.Parameter(torch.zeros(shape, device=DEVICE)))
        for index, shape in enumerate(shapes)
    ]
    sources = [gradients_like(shapes, seed) for seed in range(SOURCES)]
    gradients = [torch.zeros_like(one) for one in sources[0]]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compressor: ParameterCompressor = method.for_parameters(parameters)

    def prepare(turn: int) -> None:
        if turn == WARM:
            compressor.report()
        for own, source in zip(gradients, sources[turn % SOURCES], strict=True):
            own.copy_(source)

    taken = timed(lambda turn: compressor.average(gradients, None, finds_unused=False), prepare)
    elements = sum(one.numel() for one in gradients)
    extra = (torch.cuda.max_memory_allocated() - before) / (4 * elements)
    reports = compressor.report().values()
    share = sum(one.sent for one in reports) / sum(one.elements for one in reports)
    return Timing(
        elements=elements, density=density, name=name, extra=extra, sent=share, time=taken
    )


def torch_topk(elements: int, density: float) -> Timing:
    """torch.topk of the magnitudes alone, without residual, selection of values and decoding."""
    magnitudes = gradients_like([(elements,)], 0)[0].abs_()
    k = round(elements * density)
    taken = timed(lambda turn: torch.topk(magnitudes, k, sorted=False))
    return Timing(elements=elements, density=density, name="torch.topk", time=taken)


def power_sgd(elements: int) -> Timing:
    """The operations of torch's PowerSGD hook of rank 1 on a square matrix."""
    width = isqrt(elements)
    matrix = gradients_like([(1, width, width)], 0)[0]
    orthogonalize: Callable[[Tensor], None] = vars(powerSGD_hook)["_orthogonalize"]
    error, q = torch.zeros_like(matrix), torch.randn(1, width, 1, device=DEVICE)
    given = torch.empty_like(matrix)

    def step(turn: int) -> None:
        given.add_(error)
        error.copy_(given)
        orthogonalize(q)
        p = torch.bmm(given, q)
        orthogonalize(p)
        torch.bmm(given.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=given)
        error.sub_(given)

    taken = timed(step, lambda turn: given.copy_(matrix))
    return Timing(elements=elements, density=None, name="PowerSGD, rank 1 (operations)", time=taken)


def half_precision(elements: int) -> Timing:
    """The operations of torch's fp16 hook."""
    given = gradients_like([(elements,)], 0)[0]
    taken = timed(lambda turn: given.copy_(given.to(torch.float16).div_(1)))
    return Timing(elements=elements, density=None, name="fp16 hook (operations)", time=taken)


def bert_shapes() -> list[tuple[int, ...]]:
    """The shapes of a Transformer encoder of 12 layers and width 768 with its embeddings."""
    wide, norm = 768, [(768,), (768,)]
    layer: list[tuple[int, ...]] = [one for _ in range(4) for one in ((wide, wide), (wide,))]
    layer += [*norm, (4 * wide, wide), (4 * wide,), (wide, 4 * wide), (wide,), *norm]
    return [(30522, wide), (512, wide), (2, wide), *norm, *(12 * layer)]


def waits(method: GradientMethod | None) -> list[int]:
    """How often torch lets the host wait for the device, in each of some steps of DDP."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 1)).to(DEVICE))
    if method is not None:
        ddp.register_comm_hook(method.ddp_state(ddp), ddp_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    counts: list[int] = []
    for _ in range(12):
        x = torch.randn(64, 1024, device=DEVICE)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        found = [one for one in caught if "synchroniz" in str(one.message)]
        counts.append(len(found))
    return counts


def measured(until: float) -> tuple[list[Timing], dict[str, Any]]:
    """All tables, the largest first; ends early rather than late."""
    timings: list[Timing] = []
    for elements in reversed(SIZES):
        torch.cuda.empty_cache()
        timings += [half_precision(elements), power_sgd(elements)]
        for density in DENSITIES:
            timings.append(torch_topk(elements, density))
            for name, method in methods(density).items():
                if time.monotonic() < until:
                    timings.append(compressed(name, method, [(elements,)], density))
                    print(f"{timings[-1]}", file=sys.stderr)
    shapes = bert_shapes()
    for name, method in methods(0.01).items():
        if time.monotonic() < until:
            timings.append(compressed(name, method, shapes, 0.01))
    waits(Dct())  # what a process does once
    counts = {name: waits(method) for name, method in methods(0.01).items()}
    return timings, {"waits": {"no hook": waits(None), **counts}, "tensors": len(shapes)}


def rows_of(timings: Sequence[Timing], elements: int, bandwidth: float) -> list[list[str]]:
    """The rows of one size, with what its floor and torch.topk would take."""
    floor = 1e3 * FLOOR_BYTES * elements / bandwidth
    topk = {
        one.density: one.time.middle
        for one in timings
        if one.name == "torch.topk" and one.elements == elements
    }
    rows = [["floor: 12 bytes an element", "", f"{floor:.3f}", "", "1.00", "", "", "", ""]]
    for one in timings:
        if one.elements == elements:
            beside = topk[one.density] / one.time.middle if one.density in topk else None
            rows.append(
                [
                    one.name,
                    "" if one.density is None else f"{one.density:g}",
                    f"{one.time.middle:.3f}",
                    f"{one.time.low:.3f} to {one.time.high:.3f}",
                    f"{one.time.middle / floor:.2f}",
                    f"{one.time.idle:.3f}",
                    "" if beside is None else f"{beside:.1f}",
                    "" if one.sent is None else f"{one.sent:.5f}",
                    "" if one.extra is None else f"{one.extra:.3f}",
                ]
            )
    return rows


HEAD = [
    "",
    "density",
    "ms",
    "deciles",
    "times the floor",
    "ms from idle",
    "torch.topk / this",
    "sent",
    "memory / gradients",
]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand to the right."""
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page(
    card: str, facts: Mapping[str, str], found: Mapping[str, Any], timings: Sequence[Timing]
) -> str:
    """The page of Markdown."""
    bandwidth = found["bandwidth"]
    parts = [f"# Gradient compression on one {card}\n\n```\nscripts/gpu/check.sh\n```\n"]
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n")
    parts.append(__doc__.split("\n\n")[3].replace("\n", " ").strip() + "\n" if __doc__ else "")
    for elements in SIZES:
        rows = rows_of(timings, elements, bandwidth)
        parts.append(f"## {elements:,} elements in one tensor\n\n{table(HEAD, rows)}")
    many = {one.elements for one in timings} - {*SIZES}
    for elements in many:
        rows = rows_of(timings, elements, bandwidth)
        parts.append(
            f"## {elements:,} elements in {found['tensors']} tensors\n\n{table(HEAD, rows)}"
        )
    rows = [[name, " ".join(map(str, counts))] for name, counts in found["waits"].items()]
    parts.append(
        "## Waits of the host\n\nHow often torch lets the host wait for the device in each "
        "of the first 12 steps of DDP (one rank, nccl, three layers of width 1,024).\n\n"
        + table(["", "waits in steps 1 to 12"], rows)
    )
    return "\n".join(parts)


def main() -> None:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as store:
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", init_method=f"file://{store}/s", rank=0, world_size=1)
        card = torch.cuda.get_device_name(DEVICE)
        bandwidth = copy_bandwidth()
        timings, found = measured(began + 70)
        dist.destroy_process_group()
    found["bandwidth"] = bandwidth
    facts = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "card": card,
        "copy bandwidth": f"{bandwidth / 1e12:.2f} TB/s, read and written",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(
            f"{name} {metadata.version(name)}" for name in ("torch", "triton", "numpy", "numba")
        ),
    }
    name = "gpu_" + re.sub(r"\W+", "-", card.lower())
    written = {"facts": facts, **found, "timings": [asdict(one) for one in timings]}
    text = page(card, facts, found, timings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
