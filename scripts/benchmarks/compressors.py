"""Every compressor of gradients on this processor: time, bytes and error (SIDCo, figure 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from compressors_fragments import measure_fragments
from compressors_methods import SETTLING, Drawn, Layers, measure_methods
from compressors_rules import measure_rules
from kernels_encode import dlrm_gradients
from table import Progress, Row, arguments, publish, render, section, silent

from dlrm_hybrid.telemetry.machine import Machine, describe

SIZES = (260_000, 2_600_000, 26_000_000)
RULES = """\
CPU time of the thread, one thread, medians; contestants take turns on the same numbers, other ones
at every turn. Time is that of finding the threshold alone. topk, kthvalue and partition are
`torch.topk`, `torch.kthvalue` and `np.partition` of the magnitudes, which they are given; a pass is
one `residual.add_(gradient)`. Zeros never leave and are not in k̂. The relative error is the norm of
what stays to that of all. SIDCo's goal is 2.5 times faster than topk with k̂ / k of 0.8 to 1.2."""
METHODS = """\
A whole step of one trainer, after 8 others: residual, threshold, selection, sections for the wire;
methods whose trainers agree first agree with themselves. Settings are those of `conf/gradient/`, so
thresholds of `dct` live on. The relative error is that of one step, the residual included."""
LAYERS = """\
The same on gradients of the paper's 8 layers, 508,753 parameters, of a plain DLRM that learns from
random rows, batch 128."""
FRAGMENTS = """\
DEFT on the same gradients: selecting k of all elements by `torch.topk`, which is given magnitudes,
against the time that the slowest of n trainers takes for its fragments, exactly. The last columns
compare the same way of selecting on both sides. Norms and allocation are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorsBench:
    """What to measure.

    Attributes:
        repeats: turns of each contestant in each case.
        sizes: elements of the made-up tensors.
    """

    repeats: int
    sizes: tuple[int, ...]


def documented_bench(repeats: int) -> CompressorsBench:
    """The benchmark that the documentation quotes."""
    return CompressorsBench(repeats=repeats, sizes=SIZES)


class Measured(NamedTuple):
    """Rows by what was measured."""

    rules: list[Row]
    drawn: list[Row]
    layers: list[Row]
    fragments: list[Row]


def measure_compressors(bench: CompressorsBench, progress: Progress = silent) -> Measured:
    """Rules, methods on made-up tensors and on the paper's layers, fragments; in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = SETTLING + bench.repeats
    try:
        rules = measure_rules(bench.sizes, bench.repeats, progress)
        drawn = [
            row
            for size in bench.sizes
            for row in measure_methods(Drawn(size, steps), bench.repeats, progress)
        ]
        gradients = dlrm_gradients(steps, progress)
        layers = measure_methods(Layers(gradients), bench.repeats, progress)
        fragments = measure_fragments(gradients, bench.repeats, progress)
        return Measured(rules, drawn, layers, fragments)
    finally:
        torch.set_num_threads(threads)


def compressors_page(measured: Measured, machine: Machine, command: str) -> str:
    """Markdown page of results."""
    page = render("CPU time of the compressors of gradients", machine, command, measured.rules)
    return (
        f"{page}\n{RULES}\n"
        + section("Methods on made-up gradients", measured.drawn, METHODS)
        + section("Methods on gradients of a DLRM", measured.layers, LAYERS)
        + section("Selecting in fragments", measured.fragments, FRAGMENTS)
    )


def main() -> None:
    """Measure, print the page."""
    options = arguments(__doc__ or "").parse_args()
    machine = describe()
    publish(
        lambda command: compressors_page(
            measure_compressors(documented_bench(options.repeats)), machine, command
        ),
        options.output,
    )


if __name__ == "__main__":
    main()
