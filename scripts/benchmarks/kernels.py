"""CPU time of the compiled loops and of what is built of them, one table per group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernels_activation import measure_activation
from kernels_encode import accumulated, dlrm_gradients, measure_encode
from kernels_gradient import SELECT_SIZES, measure_select, measure_threshold
from kernels_wire import measure_wire
from table import Progress, Row, arguments, publish, render, section, silent

from dlrm_hybrid.telemetry.machine import Machine, describe

NOTE = """\
CPU time of the thread, one thread, medians. Contestants take turns on the same numbers, and every
ratio is taken turn by turn, so load on the machine touches it little. A pass is one
`residual.add_(gradient)`. Selecting adds the gradient, looks for values that are not finite, and
moves what reaches a given threshold from the residual into indices and values."""
THRESHOLD = """\
The threshold that k elements reach, from values, against `torch.topk`, `torch.kthvalue` and
`np.partition`, which are given magnitudes. The goal is against `torch.topk`."""
ENCODE = """\
The paper's 8 layers, 508,753 parameters, sparsity 0.99, on gradients of a plain DLRM that learns
from random rows, batch 128: add, select, round, encode for the wire."""
WIRE = """\
Sections of random indices among 4 M elements. Entropy is that of indices drawn one by one; indices
are the coder alone, a section is all of a push from chosen float32 values to bytes, and back."""
ACTIVATION = """\
Rows of 256 activations. The layer is the product of the rows with 256 x 256 weights."""


@dataclass(frozen=True, slots=True)
class Group:
    """One table."""

    heading: str
    rows: list[Row]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsBench:
    """What to measure.

    Attributes:
        repeats: turns of each contestant in each case.
        steps: of training whose gradients are compressed; at least 2.
        select_sizes: elements of the tensors in which elements are selected.
    """

    repeats: int
    steps: int
    select_sizes: tuple[int, ...]


def documented_bench(repeats: int) -> KernelsBench:
    """The benchmark that the documentation quotes."""
    return KernelsBench(repeats=repeats, steps=100, select_sizes=SELECT_SIZES)


def measure_kernels(bench: KernelsBench, progress: Progress = silent) -> list[Group]:
    """Measure all groups, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gradients = dlrm_gradients(bench.steps, progress)
        thresholds = measure_threshold(accumulated(gradients), bench.repeats, progress)
        return [
            Group("Select", measure_select(bench.select_sizes, bench.repeats, progress), NOTE),
            Group("Threshold", thresholds, THRESHOLD),
            Group("Gradients of a step", measure_encode(gradients, progress), ENCODE),
            Group("Sections", measure_wire(bench.repeats, progress), WIRE),
            Group("Activations", measure_activation(bench.repeats, progress), ACTIVATION),
        ]
    finally:
        torch.set_num_threads(threads)


def kernels_page(groups: list[Group], machine: Machine, command: str) -> str:
    """Markdown page of results."""
    first, *others = groups
    page = render("CPU time of the kernels", machine, command, first.rows) + f"\n{first.text}\n"
    return page + "".join(section(group.heading, group.rows, group.text) for group in others)


def main() -> None:
    """Measure, print the page."""
    options = arguments(__doc__ or "").parse_args()
    machine = describe()
    publish(
        lambda command: kernels_page(
            measure_kernels(documented_bench(options.repeats)), machine, command
        ),
        options.output,
    )


if __name__ == "__main__":
    main()
