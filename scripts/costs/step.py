"""Compares the CPU time of a training step, loader included, with that of a plain DLRM.

    python scripts/costs/step.py --output step.md
    python scripts/costs/step.py --products      a step's matrix products alone

Both models train in one process, in turns of a second or less, so a busy machine slows both alike;
the ratio is taken turn by turn. Time is CPU time of the process, on a free core equal to wall time.
`--products` measures a lower bound for a step on these libraries: the three products of every fully
connected layer of the paper's model, as training calls them, in a loop with warm caches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from torch import Tensor

from dlrm_hybrid.data.loader import START, Loader
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.layers.products import Precision, layer_inputs, multiply
from dlrm_hybrid.model.optimizer import Sgd
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.run.assembly.model import keep_freed_memory

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import Part, Row, arguments, each, one_thread, publish, reached, spread
from plain_dlrm import (
    PAPER_SPEC,
    PlainBatch,
    PlainDlrm,
    PlainTraining,
    RandomRows,
    draw_rows,
    plain_loader,
    write_shards,
)
from reference_step import Dlrm, Trainer

LR = 0.1
SEED = 0
BLOCK_ROWS = 65_536
READ_ROWS = 1024
PRODUCT_ROWS = 8192
NOTE = """
CPU time of the process, one thread: median (lowest – highest) of the repeats. The two models train
in turns of a second or less in one process, and the ratio is taken turn by turn, so load on the
machine touches it little. Both learn with SGD; the paper's widths, 26 tables of Kaggle's sizes cut
at 100,000 rows, ids by a power law. The plain model is always float32, built like
facebookresearch/dlrm; its loader is cheaper than the one there (4.4 against 12.6 µs per sample), so
the ratio with loading is a cautious one."""

Batch = tuple[Tensor, Tensor, Tensor]
AnyBatch = TypeVar("AnyBatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch size and a precision of this model; the plain model is always float32.

    Attributes:
        goal: ratio with loading that the project wants to reach; None for none.
    """

    batch_size: int
    precision: Precision
    goal: float | None


CASES = (
    Case(batch_size=128, precision=Precision.FLOAT32, goal=1.3),
    Case(batch_size=128, precision=Precision.BFLOAT16, goal=1.7),
    Case(batch_size=2048, precision=Precision.FLOAT32, goal=None),
    Case(batch_size=2048, precision=Precision.BFLOAT16, goal=1.8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        spec: the model's shape; 26 tables.
        turn_rows: rows of a turn, a multiple of every batch size.
        rows: rows in the shards; not fewer than a turn has.
    """

    spec: ModelSpec
    turn_rows: int
    rows: int


PAPER_SIZES = Sizes(spec=PAPER_SPEC, turn_rows=16_384, rows=2 * BLOCK_ROWS + 1)


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--products", action="store_true", help="matrix products alone")
    options = parser.parse_args()
    if options.products:
        measure, title, note = measure_products, "Matrix products alone", ""
    else:
        measure, title, note = measure_steps, "CPU time of a training step", NOTE
    with one_thread():
        publish(
            lambda: {title: Part(measure(options.repeats), note)}, options.output, compiles=True
        )


def measure_steps(
    repeats: int, cases: Sequence[Case] = CASES, sizes: Sizes = PAPER_SIZES
) -> list[Row]:
    """Two rows for each case, with loading and without."""
    rows = draw_rows(sizes.spec.table_rows, sizes.rows, SEED)
    with TemporaryDirectory(prefix="dlrm_hybrid-step-") as folder:
        write_shards(Path(folder), rows, sizes.spec.table_rows)
        shards = open_shards(Path(folder), expected=None)
        return [
            row
            for case in each("steps", cases)
            for row in _case(repeats, case, sizes, rows, shards)
        ]


def measure_products(repeats: int) -> list[Row]:
    """CPU time per sample of the products of all layers; the model's input needs no gradient."""
    widths = [pair for mlp in (PAPER_SPEC.bottom, PAPER_SPEC.top_widths) for pair in pairwise(mlp)]
    table: list[Row] = []
    for batch in (128, 2048):
        for dtype in (torch.float32, torch.bfloat16):
            layers = [layer_inputs(n, m, batch, dtype) for n, m in widths]
            times = PRODUCT_ROWS // batch
            spent: list[float] = []
            with torch.no_grad():
                for _ in range(1 + repeats):  # the first turn sets oneDNN up
                    start = time.process_time()
                    for _ in range(times):
                        multiply(layers, input_gradients_from=1)
                    spent.append(1e6 * (time.process_time() - start) / PRODUCT_ROWS)
            name = str(dtype).removeprefix("torch.")
            cell = spread(spent[1:], 1)
            table.append({"batch": batch, "precision": name, "products, µs per sample": cell})
    return table


def _case(
    repeats: int, case: Case, sizes: Sizes, rows: RandomRows, shards: Shards
) -> Iterator[Row]:
    steps = sizes.turn_rows // case.batch_size
    ours, plain = _our_step(sizes.spec, case.precision), _plain_step(sizes.spec)
    our_batches, plain_batches = _our_batches(shards, case), _plain_batches(rows, case)
    our_kept, plain_kept = list(islice(our_batches, steps)), list(islice(plain_batches, steps))
    seconds: list[tuple[float, float, float, float]] = [
        (
            _run(ours, islice(our_batches, steps)),
            _run(plain, islice(plain_batches, steps)),
            _run(ours, our_kept),
            _run(plain, plain_kept),
        )
        for _ in range(1 + repeats)  # the first turn pages memory in and is not counted
    ]
    turns = [[1e6 * one / sizes.turn_rows for one in turn] for turn in seconds[1:]]
    for loading, place in ((True, 0), (False, 2)):
        goal = case.goal if loading else None
        ratios = [turn[place + 1] / turn[place] for turn in turns]
        yield {
            "batch": case.batch_size,
            "precision": str(case.precision),
            "loading": "yes" if loading else "no",
            "this model, µs per sample": spread([turn[place] for turn in turns], 1),
            "plain DLRM float32, µs per sample": spread([turn[place + 1] for turn in turns], 1),
            "ratio": spread(ratios, 2),
            "goal": goal,
            "reached": reached(None if goal is None else median(ratios) >= goal),
        }


def _run(step: Callable[[AnyBatch], Tensor], batches: Iterable[AnyBatch]) -> float:
    """CPU seconds of all steps; the loss of every step is read, as a training loop does."""
    start = time.process_time()
    for batch in batches:
        step(batch).item()
    return time.process_time() - start


def _our_step(spec: ModelSpec, precision: Precision) -> Callable[[Batch], Tensor]:
    keep_freed_memory()
    options = Fused()
    trainer = Trainer(Dlrm(spec, options, precision, SEED), Sgd())
    return lambda batch: trainer.step(*batch, lr=LR, embedding_lr=LR).loss


def _plain_step(spec: ModelSpec) -> Callable[[PlainBatch], Tensor]:
    return PlainTraining(PlainDlrm(spec, SEED), LR).step


def _our_batches(shards: Shards, case: Case) -> Iterator[Batch]:
    loader = Loader(
        shards,
        batch_size=case.batch_size,
        seed=SEED,
        shuffle=True,
        shuffle_block_rows=BLOCK_ROWS,
        shuffle_read_rows=READ_ROWS,
    )
    state = START
    while True:
        batch, state = loader.read(state)
        yield (
            torch.from_numpy(batch.dense_BI),
            torch.from_numpy(batch.bags.values),
            torch.from_numpy(batch.label_B),
        )


def _plain_batches(rows: RandomRows, case: Case) -> Iterator[PlainBatch]:
    loader = plain_loader(rows, case.batch_size)
    while True:
        yield from loader


if __name__ == "__main__":
    main()
