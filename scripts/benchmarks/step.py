"""CPU time of a training step: this model and its loader against a plain DLRM and its loader.

Both run in one process, in turns of a second or less, so a busy machine slows both alike; the
ratio is taken turn by turn. Time is CPU time of the process: on a free core the same as wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from plain_dlrm import PlainBatch, PlainDlrm, PlainTraining, RowDataset
from plain_dlrm import plain_loader as loader_of_plain
from random_rows import RandomRows, draw_rows, write_shards
from table import Progress, Row, arguments, publish, render, silent, spread, told
from torch import Tensor

from dlrm_hybrid.data.loader import START, Loader
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions
from dlrm_hybrid.model.layers import Precision
from dlrm_hybrid.model.optimizer import Sgd
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.telemetry.machine import Machine, describe
from dlrm_hybrid.telemetry.spans import SpanClock

LR = 0.1
SEED = 0
BLOCK_ROWS = 65_536
READ_ROWS = 1024
NOTE = """\
CPU time of the process, one thread: median (lowest – highest) of the repeats. The two models train
in turns of a second or less in one process, and the ratio is taken turn by turn, so load on the
machine touches it little. Both learn with SGD; the paper's widths, 26 tables of Kaggle's sizes cut
at 100,000 rows, ids by a power law. The plain model is always float32, built like
facebookresearch/dlrm; its loader is cheaper than the one there (4.4 against 12.6 µs per sample), so
the ratio with loading is a cautious one."""
Batch = tuple[Tensor, Tensor, Tensor]
Turn = Callable[[], float]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What to measure.

    Attributes:
        spec: the model's shape; 26 tables.
        cases: measured one after the other.
        repeats: turns of each contestant in each case.
        turn_rows: rows of a turn, a multiple of every batch size.
        rows: rows in the shards; not fewer than a turn has.
    """

    spec: ModelSpec
    cases: tuple[Case, ...]
    repeats: int
    turn_rows: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Result of one case, with or without loading: CPU seconds per sample of every turn."""

    case: Case
    loading: bool
    ours_seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Plain over ours, turn by turn: how many times less CPU time this model takes."""
        pairs = zip(self.plain_seconds, self.ours_seconds, strict=True)
        return tuple(plain / ours for plain, ours in pairs)


# Kaggle's table sizes, the large ones cut at 100 000: 54 MB instead of 2.2 GB.
CRITEO_TABLE_ROWS = (
    *(1460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 100_000, 3194),
    *(27, 14_992, 100_000, 10, 5652, 2173, 4, 100_000, 18, 15, 100_000, 105, 100_000),
)


def criteo_bench(repeats: int) -> StepBench:
    """The benchmark that the documentation quotes: the paper's model on Criteo's shape."""
    return StepBench(
        spec=ModelSpec(
            embedding_dim=16,
            bottom=(13, 512, 256, 64, 16),
            top=(512, 256, 128, 1),
            table_rows=CRITEO_TABLE_ROWS,
        ),
        cases=(
            Case(batch_size=128, precision=Precision.FLOAT32, goal=1.3),
            Case(batch_size=128, precision=Precision.BFLOAT16, goal=1.7),
            Case(batch_size=2048, precision=Precision.FLOAT32, goal=None),
            Case(batch_size=2048, precision=Precision.BFLOAT16, goal=1.8),
        ),
        repeats=repeats,
        turn_rows=16_384,
        rows=2 * BLOCK_ROWS + 1,
    )


def measure_step(bench: StepBench, progress: Progress = silent) -> list[StepRow]:
    """Measure all cases; two rows for each, with loading and without. Uses one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = draw_rows(bench.spec.table_rows, bench.rows, SEED)
        with TemporaryDirectory(prefix="dlrm_hybrid-bench-") as folder:
            write_shards(Path(folder), rows, bench.spec.table_rows)
            shards = open_shards(Path(folder), expected=None)
            cases = [case for case in bench.cases for _ in range(1 + bench.repeats)]
            rounds = told("steps", cases, progress)
            return [
                row for case in bench.cases for row in _measure(bench, case, rows, shards, rounds)
            ]
    finally:
        torch.set_num_threads(threads)


def step_page(rows: list[StepRow], machine: Machine, command: str) -> str:
    """Markdown page of results; spreads are median (lowest – highest) of the turns."""
    cells = [_cells(row) for row in rows]
    return render("CPU time of a training step", machine, command, cells) + f"\n{NOTE}\n"


def _measure(
    bench: StepBench, case: Case, rows: RandomRows, shards: Shards, rounds: Iterator[object]
) -> list[StepRow]:
    steps = bench.turn_rows // case.batch_size
    ours = _our_step(bench.spec, case.precision)
    plain = _plain_step(bench.spec)
    our_batches = _our_batches(shards, case.batch_size)
    plain_batches = _plain_batches(rows, case.batch_size)
    our_kept = list(islice(our_batches, steps))
    plain_kept = list(islice(plain_batches, steps))
    turns: tuple[Turn, ...] = (
        lambda: _run(ours, islice(our_batches, steps)),
        lambda: _run(plain, islice(plain_batches, steps)),
        lambda: _run(ours, iter(our_kept)),
        lambda: _run(plain, iter(plain_kept)),
    )
    next(rounds)
    for turn in turns:
        turn()  # the first turn pages memory in and is not counted
    seconds: list[list[float]] = []
    for _ in range(bench.repeats):
        next(rounds)
        seconds.append([turn() / (steps * case.batch_size) for turn in turns])
    loaded, plain_loaded, kept, plain_without = (tuple(each) for each in zip(*seconds, strict=True))
    return [
        StepRow(case=case, loading=True, ours_seconds=loaded, plain_seconds=plain_loaded),
        StepRow(case=case, loading=False, ours_seconds=kept, plain_seconds=plain_without),
    ]


def _run(step: Callable[[AnyBatch], Tensor], batches: Iterator[AnyBatch]) -> float:
    """CPU seconds of all steps; the loss of every step is read, as a training loop does."""
    start = time.process_time()
    for batch in batches:
        step(batch).item()
    return time.process_time() - start


def _our_step(spec: ModelSpec, precision: Precision) -> Callable[[Batch], Tensor]:
    options = EmbeddingOptions(optimizer=EmbeddingOptimizer.SGD, eps=0.0)
    trainer = Trainer(Dlrm(spec, options, precision, SEED), Sgd(), SpanClock())
    return lambda batch: trainer.step(*batch, lr=LR, embedding_lr=LR).loss


def _plain_step(spec: ModelSpec) -> Callable[[PlainBatch], Tensor]:
    return PlainTraining(PlainDlrm(spec, SEED), LR).step


def _our_batches(shards: Shards, batch_size: int) -> Iterator[Batch]:
    loader = Loader(
        shards,
        batch_size=batch_size,
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
            torch.from_numpy(batch.ids_FB),
            torch.from_numpy(batch.label_B),
        )


def _plain_batches(rows: RandomRows, batch_size: int) -> Iterator[PlainBatch]:
    loader = loader_of_plain(RowDataset(rows.counts_RI, rows.ids_RF, rows.label_R), batch_size)
    while True:
        yield from loader


def _cells(row: StepRow) -> Row:
    goal = row.case.goal if row.loading else None
    return {
        "batch": row.case.batch_size,
        "precision": str(row.case.precision),
        "loading": "yes" if row.loading else "no",
        "this model, µs per sample": spread([1e6 * s for s in row.ours_seconds], 1),
        "plain DLRM float32, µs per sample": spread([1e6 * s for s in row.plain_seconds], 1),
        "ratio": spread(row.ratios, 2),
        "goal": goal,
        "reached": None if goal is None else ("yes" if median(row.ratios) >= goal else "no"),
    }


def main() -> None:
    """Measure, print the page."""
    options = arguments(__doc__ or "").parse_args()
    machine = describe()
    publish(
        lambda command: step_page(measure_step(criteo_bench(options.repeats)), machine, command),
        options.output,
    )


if __name__ == "__main__":
    main()
