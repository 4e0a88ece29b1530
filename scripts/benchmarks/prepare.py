"""Speed and memory of `prepare` on made-up rows, and the CPU time of the loader on its shards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from prepare_run import Memory, PrepareRun, run_prepare, watch_prepare
from table import Progress, Row, arguments, publish, render, section, silent, spread, told

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data import synthetic
from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.loader import Loader, LoaderState
from dlrm_hybrid.data.profile import Profile
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.telemetry.machine import Machine, describe

KAGGLE_ROWS = 45_840_617
PARTS = (4, 2, 1)  # the file, and how memory grows up to it
PROCESSES = (1, 2)
BATCH_SIZES = (128, 512, 2048)
LOADER_ROWS = 1_000_000
SEED = 0
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSizes:
    """Rows shuffled together and rows read in one piece, as in `data`."""

    block_rows: int
    read_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareBench:
    """What to measure.

    Attributes:
        rows: of the largest raw file; a half and a quarter of it are prepared as well.
        repeats: of every figure but memory, which is watched once, in a run of its own.
        options: as for the verb `prepare`; the number of processes is set here.
        profile: what the made-up rows look like.
        loader: what the loader reads and shuffles at a time.
        folder: where raw files and shards are made and removed; 550 bytes per row.
    """

    rows: int
    repeats: int
    options: PrepareOptions
    profile: Profile
    loader: LoaderSizes
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """CPU seconds per sample of a number of passes over at least a million rows."""

    batch_size: int
    shuffle: bool
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareMeasured:
    """All figures of one benchmark."""

    runs: tuple[PrepareRun, ...]
    memory: tuple[Memory, ...]
    loader: tuple[LoaderRun, ...]


def measure_prepare(
    bench: PrepareBench, note: Note, progress: Progress = silent
) -> PrepareMeasured:
    """Generate rows, prepare them in all ways, read the last shards; minutes long.

    Args:
        bench: what to do.
        note: told in a few words what begins.
        progress: hears how far it is.

    Raises:
        DlrmError: no room on the disk, or `prepare` failed.
    """
    runs: list[PrepareRun] = []
    memory: list[Memory] = []
    loader: tuple[LoaderRun, ...] = ()
    passes = 1 + len(PROCESSES) * (bench.repeats + 1)
    sizes = [bench.rows // part for part in PARTS for _ in range(passes)]
    rounds = told("prepare", sizes, progress, cost=float)
    bench.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-prepare-", dir=bench.folder) as name:
        raw, output = Path(name) / "train.txt", Path(name) / "shards"
        for part in PARTS:
            rows = bench.rows // part
            note(f"generate {rows:,} rows")
            next(rounds)
            synthetic.generate(raw, rows, SEED, bench.profile, lambda done: None)
            if part == PARTS[0]:
                note("compile the kernels")
                run_prepare(raw, output, replace(bench.options, processes=max(PROCESSES)))
            for processes in PROCESSES:
                note(f"prepare {rows:,} rows with {processes} process(es)")
                options = replace(bench.options, processes=processes)
                for _ in range(bench.repeats):
                    next(rounds)
                    runs.append(run_prepare(raw, _fresh(output), options))
                next(rounds)
                memory.append(watch_prepare(raw, _fresh(output), options))
        note("read batches")
        loader = measure_loader(open_shards(output, None), bench.loader, bench.repeats)
    return PrepareMeasured(runs=tuple(runs), memory=tuple(memory), loader=loader)


def measure_loader(shards: Shards, sizes: LoaderSizes, repeats: int) -> tuple[LoaderRun, ...]:
    """CPU time per sample of the training loader at several batch sizes, page cache warm."""
    return tuple(
        _measure_loader(shards, sizes, repeats, batch_size, shuffle)
        for batch_size in BATCH_SIZES
        if batch_size <= len(shards.train_rows)
        for shuffle in (True, False)
    )


def extrapolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """The straight line through the last two of (rows, value), at `at` rows.

    Memory grows with the vocabulary, which grows ever more slowly: the line lies above it.
    """
    (rows_before, before), (rows, value) = points[-2:]
    return value + (value - before) * (at - rows) / (rows - rows_before)


def prepare_page(measured: PrepareMeasured, machine: Machine, command: str) -> str:
    """Markdown page of results; spreads are median (lowest – highest) of the repeats."""
    kind = measured.memory[0].kind
    return (
        render("Preparing raw rows", machine, command, _run_rows(measured))
        + "\nCPU time counts all processes and the start of the workers. Raw text and shards lie in"
        " the page cache.\nGoals on two idle cores: 250,000 rows/s, 300,000 rows per CPU-second"
        " (facebookresearch/dlrm: 13,400).\n"
        + section("Memory", _memory_rows(measured), _memory_text(kind))
        + section(
            "Loader",
            _loader_rows(measured.loader),
            "The whole loader: contiguous block reads, shuffle, batch arrays. Goal: 1.5 µs per"
            " sample at batch 128\n(facebookresearch/dlrm: 12.7).",
        )
    )


def _fresh(output: Path) -> Path:
    if output.exists():
        shutil.rmtree(output)
    return output


def _measure_loader(
    shards: Shards, sizes: LoaderSizes, repeats: int, batch_size: int, shuffle: bool
) -> LoaderRun:
    loader = Loader(
        shards,
        batch_size=batch_size,
        seed=SEED,
        shuffle=shuffle,
        shuffle_block_rows=sizes.block_rows,
        shuffle_read_rows=sizes.read_rows,
    )
    loader.read(LoaderState(0, 0, 0))  # compiles, and reads the first block
    epochs = -(-LOADER_ROWS // (loader.steps_per_epoch * batch_size))
    rows = epochs * loader.steps_per_epoch * batch_size
    seconds: list[float] = []
    for repeat in range(repeats):
        state = LoaderState(1 + repeat * epochs, 0, 0)
        start = time.process_time()
        for _ in range(rows // batch_size):
            _, state = loader.read(state)
        seconds.append((time.process_time() - start) / rows)
    return LoaderRun(batch_size=batch_size, shuffle=shuffle, seconds=tuple(seconds))


def _run_rows(measured: PrepareMeasured) -> list[Row]:
    table: list[Row] = []
    for memory in measured.memory:
        same = (memory.rows, memory.processes)
        runs = [run for run in measured.runs if (run.rows, run.processes) == same]
        table.append(
            {
                "rows": memory.rows,
                "processes": memory.processes,
                "1000 rows/s": spread([run.rows / run.seconds / 1000 for run in runs], 0),
                "1000 rows per CPU-second": spread(
                    [run.rows / run.cpu_seconds / 1000 for run in runs], 0
                ),
                "seconds": median(run.seconds for run in runs),
            }
        )
    return table


def _memory_rows(measured: PrepareMeasured) -> list[Row]:
    ids = {run.rows: run.ids for run in measured.runs}
    peaks = {(seen.rows, seen.processes): seen.peak_bytes / 1e6 for seen in measured.memory}
    table: list[Row] = [
        {
            "rows": f"{rows:,}",
            "ids": ids[rows],
            **{_peak(processes): peaks[rows, processes] for processes in PROCESSES},
        }
        for rows in sorted(ids)
    ]
    if max(ids) >= KAGGLE_ROWS:
        return table
    expected = {
        _peak(processes): extrapolate(
            [(rows, peaks[rows, processes]) for rows in sorted(ids)], KAGGLE_ROWS
        )
        for processes in PROCESSES
    }
    return [*table, {"rows": f"{KAGGLE_ROWS:,} (extrapolated)", "ids": None, **expected}]


def _peak(processes: int) -> str:
    return f"peak MB, {processes} process{'es' if processes > 1 else ''}"


def _memory_text(kind: str) -> str:
    return (
        f"Peak of the sum of {kind} over all processes, looked at every 50 ms in a run that is not"
        " timed.\nAn extrapolated row continues the line through the two rows above it: too high"
        " where memory follows ids,\nwhich grow ever more slowly, and rough where those two hardly"
        f" differ. Goal: 2,000 MB at {KAGGLE_ROWS:,} rows."
    )


def _loader_rows(runs: Sequence[LoaderRun]) -> list[Row]:
    return [
        {
            "batch": run.batch_size,
            "order": "shuffled" if run.shuffle else "file",
            "CPU µs per sample": spread([1e6 * seconds for seconds in run.seconds], 3),
        }
        for run in runs
    ]


def main() -> None:
    """Measure, print the page. What follows the flags are overrides of keys of `data`."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the largest raw file")
    options, overrides = parser.parse_known_args()
    config = validate(values_of(overrides))
    bench = PrepareBench(
        rows=options.rows,
        repeats=options.repeats,
        options=build.prepare_options(config, advice=""),
        profile=build.profile(),
        loader=LoaderSizes(
            block_rows=config.data.shuffle_block_rows, read_rows=config.data.shuffle_read_rows
        ),
        folder=build.RAW_FOLDER,  # a temporary folder in memory would flatter the figures
    )
    machine = describe()
    publish(
        lambda command: prepare_page(measure_prepare(bench, print), machine, command),
        options.output,
    )


if __name__ == "__main__":
    main()
