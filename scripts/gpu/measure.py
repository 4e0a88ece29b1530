"""Measures compression on a GPU: time, memory and waits of a step, beside torch's own methods.

    python scripts/gpu/measure.py docs/benchmarks

Writes gpu_<card>.md and gpu_<card>.json. `--device cpu` runs all of it with the CPU for a card, but
counts neither memory nor waits.

Times are medians of CUDA events around one encode and decode of a single trainer: gradients are
added to the residual, selected elements leave it, and the gradients are overwritten with them. As
after a backward pass, the device is busy before, so that the host is ahead until it waits; "from
idle" is the same without. Three draws of gradients take turns; thresholds settle in the 12 steps
before the measured 20. A step that takes long is measured less often, at least 3 times. The floor
is 12 bytes an element (gradient and residual are read, the residual is written) at the bandwidth of
a copy.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from math import isqrt
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid import compress
from dlrm_hybrid.compress.device.ops import Marks, Ranks, ops_for
from dlrm_hybrid.compress.device.sums import CHUNK, Blocks, Sums
from dlrm_hybrid.compress.library.compressor import ParameterCompressor

SIZES = (1_000_000, 10_000_000, 100_000_000)
DENSITIES = (0.01, 0.001)
WARM, STEPS, IDLE_STEPS, SOURCES = 12, 20, 10, 3
FEWEST, LONGEST_SECONDS = 3, {"cuda": 1.0, "cpu": 0.4}  # of each of these phases
BUSY_CYCLES = 20_000_000  # about 10 ms
SMALL_CHUNK = 1024  # elements of a program, beside those of the package
FLOOR_BYTES = 12  # an element: gradient and residual are read, the residual is written
FIGURE_ELEMENTS = 14_982_987  # of VGG16, in table 1 of SIDCo's paper
FIGURE_DENSITIES = (0.1, 0.01, 0.001)
MODEL_DENSITY = 0.01
TOPK, TOPK_STEP, SAMPLING = "torch.topk", "Top-k by torch.topk", "DGC's sampling"
FIGURE_TEXT = """\
Speed-up over Top-k, as in figure 1 of SIDCo's paper (Abdelmoniem et al., MLSys 2021): one tensor of
as many elements as its VGG16 has, drawn as above. Top-k is a whole step by torch.topk: residual and
magnitudes, selection, values, residual without them, gradients overwritten. On the CPU one thread
computes. The paper's figure (one V100, and a Xeon Silver 4112) has bars without numbers: the last
columns hold what its text says of them."""
PAPER = {
    SAMPLING: ("above 1", "below 1"),
    "RedSync": ("above DGC's", "above 1"),
    "Gaussian": ("above DGC's", "above 1"),
    "Sidco": ("at least twice DGC's", "above 1, over DGC's more than on the GPU"),
}

Step = Callable[[int], object]


def methods(density: float) -> dict[str, compress.GradientMethod]:
    """Those whose selection alone leaves the device."""
    return {
        "Dct": compress.Dct(density=density),
        "TopK": compress.TopK(density=density),
        "Sidco": compress.Sidco(density=density),
        "Dgc": compress.Dgc(density=density, warmup_steps=0),
        "Gaussian": compress.Gaussian(density=density),
        "RedSync": compress.RedSync(density=density),
    }


def agreeing_methods(density: float) -> dict[str, compress.GradientMethod]:
    """Those that compute on the device, too, but hand more over to the host."""
    return {
        "Dct, levels": compress.Dct(density=density, precision="levels"),
        "Dct, union": compress.Dct(density=density, aggregation="union"),
        "CltK": compress.CltK(density=density),
        "Deft": compress.Deft(density=density),
    }


def figure_methods(density: float) -> dict[str, compress.GradientMethod]:
    """The same, with DGC's sampling alone in the place of `Dgc`, whose momenta the paper left."""
    sampling = compress.Dct(density=density, threshold="dgc", lifespan=1, renewal="fixed")
    return {SAMPLING: sampling, **{k: v for k, v in methods(density).items() if k != "Dgc"}}


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


@dataclass(frozen=True)
class Pass:
    """An operation of which steps are made, over all elements.

    Attributes:
        name: of the operation.
        chunk: elements of one program.
        moved: bytes of each element that it reads and writes, sparse accesses left out.
        time: it takes.
    """

    name: str
    chunk: int
    moved: int
    time: Spread


@dataclass(frozen=True)
class Measured:
    """All that was measured in time.

    Attributes:
        by_size: with one tensor.
        passes: over the largest tensor.
        of_tensors: with those of a model.
        figure: for SIDCo's figure 1, by where it was computed.
        waits: of the host in steps of DDP, by method.
    """

    by_size: Sequence[Timing]
    passes: Sequence[Pass]
    of_tensors: Sequence[Timing]
    figure: Mapping[str, Sequence[Timing]]
    waits: Mapping[str, Sequence[int]]


def milliseconds(device: torch.device, run: Callable[[], object], *, busy: bool) -> float:
    """The time of a call, what it waits for the host included."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def timed(
    device: torch.device,
    step: Step,
    prepare: Step = lambda turn: None,
    settled: Callable[[], object] = lambda: None,
) -> Spread:
    """The time of a step; `prepare` comes before each, `settled` before the first that counts."""
    turns = count()

    def phase(most: int, *, busy: bool) -> list[float]:
        until, taken = time.monotonic() + LONGEST_SECONDS[device.type], list[float]()
        while len(taken) < most and (len(taken) < FEWEST or time.monotonic() < until):
            turn = next(turns)
            prepare(turn)
            taken.append(milliseconds(device, partial(step, turn), busy=busy))
        return taken

    phase(WARM, busy=True)
    settled()
    behind = phase(STEPS, busy=True)
    idle = phase(IDLE_STEPS, busy=False) if device.type == "cuda" else behind
    deciles = quantiles(behind, n=10)
    return Spread(middle=median(behind), low=deciles[0], high=deciles[-1], idle=median(idle))


@lru_cache(maxsize=SOURCES)  # on a CPU drawing takes longer than what is measured
def gradients_like(
    shapes: tuple[tuple[int, ...], ...], seed: int, device: torch.device
) -> list[Tensor]:
    """Gradients with heavy tails, to be read."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device=device)
    return [draw(shape).mul_(draw(shape).exp_()).mul_(1e-3) for shape in shapes]


def copy_bandwidth(device: torch.device, elements: int) -> float:
    """Bytes a second of a copy from the device to itself, read and written."""
    source, target = (torch.randn(elements, device=device) for _ in range(2))
    seconds = timed(device, lambda turn: target.copy_(source)).middle / 1e3
    return 2 * source.nbytes / seconds


def compressed(
    name: str,
    method: compress.GradientMethod,
    shapes: tuple[tuple[int, ...], ...],
    density: float | None,
    device: torch.device,
) -> Timing:
    """One encode and decode of a method by `reduce_gradients`, of a single trainer."""
    parameters = [
        (f"{index}", nn.Parameter(torch.zeros(shape, device=device)))
        for index, shape in enumerate(shapes)
    ]
    sources = [gradients_like(shapes, seed, device) for seed in range(SOURCES)]
    gradients = [torch.zeros_like(source) for source in sources[0]]
    on_card = device.type == "cuda"
    if on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_card else 0
    compressor: ParameterCompressor = method.for_parameters(parameters, last_layer="")

    def prepare(turn: int) -> None:
        for gradient, source in zip(gradients, sources[turn % SOURCES], strict=True):
            gradient.copy_(source)

    def step(turn: int) -> None:
        compressor.average(gradients, None, finds_unused=False)

    spread = timed(device, step, prepare, compressor.report)
    elements = sum(gradient.numel() for gradient in gradients)
    extra = (torch.cuda.max_memory_allocated() - before) / (4 * elements) if on_card else None
    reports = compressor.report().values()
    candidates = sum(report.elements for report in reports)
    share = sum(report.sent for report in reports) / candidates if candidates else None
    return Timing(
        elements=elements, density=density, name=name, extra=extra, sent=share, time=spread
    )


def torch_topk(elements: int, density: float, device: torch.device) -> Timing:
    """torch.topk of the magnitudes alone, without residual, selection of values and decoding."""
    magnitudes = gradients_like(((elements,),), 0, device)[0].abs()
    k = round(elements * density)
    spread = timed(device, lambda turn: torch.topk(magnitudes, k, sorted=False))
    return Timing(elements=elements, density=density, name=TOPK, time=spread)


def topk_step(elements: int, density: float, device: torch.device) -> Timing:
    """A whole step of Top-k with torch.topk: what a method does, encode and decode."""
    (source,) = gradients_like(((elements,),), 0, device)
    residual, gradient = torch.zeros_like(source), torch.empty_like(source)
    k = round(elements * density)

    def step(turn: int) -> None:
        residual.add_(gradient)
        index_K = torch.topk(residual.abs(), k, sorted=False).indices
        value_K = residual[index_K]
        residual.index_fill_(0, index_K, 0.0)
        gradient.zero_().index_copy_(0, index_K, value_K)

    spread = timed(device, step, lambda turn: gradient.copy_(source))
    return Timing(elements=elements, density=density, name=TOPK_STEP, time=spread)


def power_sgd(elements: int, device: torch.device) -> Timing:
    """The operations of torch's PowerSGD hook of rank 1 on a square matrix."""
    width = isqrt(elements)
    (matrix,) = gradients_like(((1, width, width),), 0, device)
    orthogonalize: Callable[[Tensor], None] = vars(powerSGD_hook)["_orthogonalize"]
    error, q = torch.zeros_like(matrix), torch.randn(1, width, 1, device=device)
    gradient = torch.empty_like(matrix)

    def step(turn: int) -> None:
        gradient.add_(error)
        error.copy_(gradient)
        orthogonalize(q)
        p = torch.bmm(gradient, q)
        orthogonalize(p)
        torch.bmm(gradient.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=gradient)
        error.sub_(gradient)

    spread = timed(device, step, lambda turn: gradient.copy_(matrix))
    name = "PowerSGD, rank 1 (operations)"
    return Timing(elements=elements, density=None, name=name, time=spread)


def half_precision(elements: int, device: torch.device) -> Timing:
    """The operations of torch's fp16 hook."""
    gradient = gradients_like(((elements,),), 0, device)[0].clone()
    spread = timed(device, lambda turn: gradient.copy_(gradient.to(torch.float16).div_(1)))
    return Timing(elements=elements, density=None, name="fp16 hook (operations)", time=spread)


def of_size(elements: int, device: torch.device) -> Iterator[Callable[[], Timing]]:
    """What is measured with one tensor of so many elements."""
    if device.type == "cuda":
        gradients_like.cache_clear()
        torch.cuda.empty_cache()
    yield partial(half_precision, elements, device)
    yield partial(power_sgd, elements, device)
    for density in DENSITIES:
        yield partial(torch_topk, elements, density, device)
        for name, method in methods(density).items():
            yield partial(compressed, name, method, ((elements,),), density, device)
    yield partial(compressed, "TernGrad", compress.TernGrad(), ((elements,),), None, device)


def passes_over(elements: int, device: torch.device, chunk: int) -> list[Pass]:
    """The operations of steps, each alone, by programs that take so many elements."""
    (source,) = gradients_like(((elements,),), 0, device)
    gradient, blocks = source.clone(), Blocks([elements], device, chunk)
    x, ops = Sums(blocks), ops_for(blocks)
    pointer_1 = torch.tensor([gradient.data_ptr()], device=device)
    due_1, ranks = pointer_1 != 0, Ranks(blocks, [round(elements * MODEL_DENSITY)])
    tau_1 = source.abs().topk(ranks.ks[0]).values[-1:]
    marks: list[Marks] = []

    def joining(turn: int) -> None:
        x.residual_N.zero_()
        gradient.copy_(source)
        x.begin([gradient], pointer_1)

    def joined(turn: int) -> None:
        joining(turn)
        x.residuals[0].copy_(source)
        x.join()

    def select(turn: int) -> None:
        marks[:] = [ops.mark(x, tau_1, [gradient], pointer_1)]

    def compact(turn: int) -> None:
        ops.compact(marks[0], ranks.ks[0], [gradient], pointer_1)

    operations: dict[str, tuple[int, Step, Step]] = {
        "gradients alone": (4, joined, lambda turn: ops.inspect(x)),
        "moments": (4, joined, lambda turn: ops.moments(x)),
        "moments, first look": (12, joining, lambda turn: ops.moments(x)),
        "excesses": (4, joined, lambda turn: ops.excesses(x, tau_1[:, None].double(), due_1)),
        "7 looks at once": (4, joined, lambda turn: ops.looks(x, tau_1.expand(1, 7), due_1)),
        "k-th magnitude": (12, joined, lambda turn: ops.kth(x, ranks, due_1)),
        "k-th magnitude of nothing": (0, joined, lambda turn: ops.kth(x, ranks, ~due_1)),
        "selection": (8, joined, select),
        "selection, first look": (16, joining, select),
        "list of the selected": (0, lambda turn: None, compact),
    }
    return [
        Pass(name, chunk, moved, timed(device, step, prepare))
        for name, (moved, prepare, step) in operations.items()
    ]


def of_figure(elements: int, device: torch.device) -> Iterator[Callable[[], Timing]]:
    """What SIDCo's figure 1 shows, and torch's hooks."""
    yield partial(half_precision, elements, device)
    yield partial(power_sgd, elements, device)
    for density in FIGURE_DENSITIES:
        yield partial(topk_step, elements, density, device)
        for name, method in figure_methods(density).items():
            yield partial(compressed, name, method, ((elements,),), density, device)


def of_model(device: torch.device) -> Iterator[Callable[[], Timing]]:
    """What is measured with the tensors of a model."""
    for name, method in (methods(MODEL_DENSITY) | agreeing_methods(MODEL_DENSITY)).items():
        yield partial(compressed, name, method, bert_shapes(), MODEL_DENSITY, device)


def bert_shapes() -> tuple[tuple[int, ...], ...]:
    """The shapes of a Transformer encoder of 12 layers and width 768 with its embeddings."""
    wide, norm = 768, [(768,), (768,)]
    layer: list[tuple[int, ...]] = 4 * [(wide, wide), (wide,)]
    layer += [*norm, (4 * wide, wide), (4 * wide,), (wide, 4 * wide), (wide,), *norm]
    return ((30522, wide), (512, wide), (2, wide), *norm, *(12 * layer))


def waits(method: compress.GradientMethod | None, device: torch.device) -> list[int]:
    """How often torch lets the host wait for the device, in each of some steps of DDP."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 1)).to(device))
    if method is not None:
        ddp.register_comm_hook(method.ddp_state(ddp), compress.ddp_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    counts: list[int] = []
    for _ in range(12):
        x = torch.randn(64, 1024, device=device)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
    return counts


def waits_of_all(device: torch.device) -> dict[str, list[int]]:
    """Waits of the host with each method, and without."""
    waits(compress.Dct(), device)  # what a process does once
    others = agreeing_methods(MODEL_DENSITY) | {"RandomK": compress.RandomK(density=MODEL_DENSITY)}
    counts = {n: waits(method, device) for n, method in (methods(MODEL_DENSITY) | others).items()}
    return {"no hook": waits(None, device), **counts}


def measured(device: torch.device, sizes: Sequence[int], figure: int, until: float) -> Measured:
    """All tables, the largest size first; ends early rather than late."""

    def timings(contestants: Iterator[Callable[[], Timing]]) -> list[Timing]:
        done: list[Timing] = []
        while time.monotonic() < until and (contestant := next(contestants, None)):
            done.append(contestant())
            print(done[-1], file=sys.stderr)
        return done

    host, threads = torch.device("cpu"), torch.get_num_threads()
    by_size = [timing for size in sorted(sizes)[::-1] for timing in timings(of_size(size, device))]
    passes = passes_over(max(sizes), device, CHUNK)
    counts = waits_of_all(device) if device.type == "cuda" else {}
    on_card = timings(of_figure(figure, device))
    torch.set_num_threads(1)
    on_host = timings(of_figure(figure, host))
    torch.set_num_threads(threads)
    # A model has the shapes of its own; where the sizes are small it would take far longer.
    of_tensors = timings(of_model(device)) if figure == FIGURE_ELEMENTS else []
    if time.monotonic() < until:
        passes += passes_over(max(sizes), device, SMALL_CHUNK)
    return Measured(by_size, passes, of_tensors, {"card": on_card, "CPU": on_host}, counts)


def rows_of(timings: Sequence[Timing], elements: int, bandwidth: float) -> list[list[str]]:
    """The rows of one size, with what its floor and torch.topk would take."""
    floor = 1e3 * FLOOR_BYTES * elements / bandwidth
    rows = [["floor: 12 bytes an element", "", f"{floor:.3f}", "", "1.00", "", "", "", ""]]
    own = [timing for timing in timings if timing.elements == elements]
    topk = {timing.density: timing.time.middle for timing in own if timing.name == TOPK}
    for timing in own:
        spread, density = timing.time, timing.density
        rows.append(
            [
                timing.name,
                "" if density is None else f"{density:g}",
                f"{spread.middle:.3f}",
                f"{spread.low:.3f} to {spread.high:.3f}",
                f"{spread.middle / floor:.2f}",
                f"{spread.idle:.3f}",
                f"{topk[density] / spread.middle:.1f}" if density in topk else "",
                "" if timing.sent is None else f"{timing.sent:.5f}",
                "" if timing.extra is None else f"{timing.extra:.3f}",
            ]
        )
    return rows


HEAD = (
    *("", "density", "ms", "deciles", "times the floor", "ms from idle"),
    *("torch.topk / this", "sent", "memory / gradients"),
)


def figure_table(figure: Mapping[str, Sequence[Timing]]) -> str:
    """Speed-ups over Top-k at each density on each device, and the paper's words."""
    names = dict.fromkeys(timing.name for timings in figure.values() for timing in timings)
    names.pop(TOPK_STEP, None)
    columns: list[tuple[str, Mapping[str, float]]] = []
    for place, timings in figure.items():
        for density in FIGURE_DENSITIES:
            middles = {t.name: t.time.middle for t in timings if t.density in (density, None)}
            topk = middles.get(TOPK_STEP)
            speeds = {name: topk / middle for name, middle in middles.items()} if topk else {}
            columns.append((f"{place}, {density:g}", speeds))
    rows = [
        [name, *(f"{speeds[name]:.2f}" if name in speeds else "" for _, speeds in columns)]
        + [*PAPER.get(name, ("", ""))]
        for name in names
    ]
    return table(["", *(head for head, _ in columns), "paper, GPU", "paper, CPU"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand to the right."""
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def passes_table(passes: Sequence[Pass], elements: int, bandwidth: float) -> str:
    """The passes with what they move, beside what a copy does in their time."""
    rows: list[list[str]] = []
    for look in passes:
        milliseconds = look.time.middle
        share = 1e3 * look.moved * elements / milliseconds / bandwidth
        moved = [f"{look.moved}", f"{share:.0%}"] if look.moved else ["", ""]
        rows.append([look.name, f"{look.chunk:,}", f"{milliseconds:.3f}", *moved])
    return table(["", "elements of a program", "ms", "bytes an element", "of a copy's speed"], rows)


def page(card: str, facts: Mapping[str, str], measures: Measured, bandwidth: float) -> str:
    """The page of Markdown."""
    parts = [f"# Gradient compression on one {card}\n\n```\nscripts/gpu/check.sh\n```\n"]
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n")
    parts.append(__doc__.split("\n\n")[3].replace("\n", " ").strip() + "\n" if __doc__ else "")
    sizes = sorted({timing.elements for timing in measures.by_size})
    for elements in sizes:
        text = table(HEAD, rows_of(measures.by_size, elements, bandwidth))
        parts.append(f"## {elements:,} elements in one tensor\n\n{text}")
    text = passes_table(measures.passes, sizes[-1], bandwidth)
    parts.append(f"## Passes over the largest tensor, each alone\n\n{text}")
    if measures.of_tensors:
        elements = measures.of_tensors[0].elements
        text = table(HEAD, rows_of(measures.of_tensors, elements, bandwidth))
        parts.append(f"## {elements:,} elements in {len(bert_shapes())} tensors\n\n{text}")
    if any(measures.figure.values()):
        text = FIGURE_TEXT.replace("\n", " ")
        parts.append(f"## Speed-up over Top-k\n\n{text}\n\n{figure_table(measures.figure)}")
    if measures.waits:
        rows = [[name, " ".join(map(str, counts))] for name, counts in measures.waits.items()]
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
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="elements")
    parser.add_argument("--figure", type=int, default=FIGURE_ELEMENTS, help="elements of its own")
    parser.add_argument("--seconds", type=float, default=70, help="no measurement begins later")
    options = parser.parse_args()
    until, folder = time.monotonic() + options.seconds, options.folder
    on_card, card = options.device == "cuda", "cpu"
    device = torch.device("cuda", 0) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
        card = torch.cuda.get_device_name(device)
    with tempfile.TemporaryDirectory() as store:
        backend, method = "nccl" if on_card else "gloo", f"file://{store}/s"
        dist.init_process_group(backend, init_method=method, rank=0, world_size=1)
        bandwidth = copy_bandwidth(device, 2**28 if on_card else 2**24)
        measures = measured(device, options.sizes, options.figure, until)
        dist.destroy_process_group()
    packages = [name for name in ("torch", "triton", "numpy", "numba") if find_spec(name)]
    facts = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "card": card,
        "copy bandwidth": f"{bandwidth / 1e12:.2f} TB/s, read and written",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {metadata.version(name)}" for name in packages),
    }
    name = "gpu_" + re.sub(r"\W+", "-", card.lower())
    text = page(card, facts, measures, bandwidth)
    written = json.dumps({"facts": facts, "bandwidth": bandwidth, **asdict(measures)}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(written + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
