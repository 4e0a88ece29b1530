"""Measures speed and memory of `prepare` on synthetic rows, and CPU time of the loader.

    python scripts/costs/prepare.py --repeats 3 --output prepare.md
    python scripts/costs/prepare.py --rows 20000 --repeats 1 data.vocabulary=train_days

Other arguments are overrides of keys of `data`. Makes and removes raw files and shards in data/raw,
550 bytes per row: a temporary folder in memory would flatter the figures.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data import synthetic
from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.loader import Loader, LoaderState
from dlrm_hybrid.data.prepare import prepare
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.types import DlrmError

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import Page, Part, Row, arguments, each, publish, silent, spread

KAGGLE_ROWS = 45_840_617
PARTS = (4, 2, 1)  # the file, and how memory grows up to it
PROCESSES = (1, 2)
BATCH_SIZES = (128, 512, 2048)
LOADER_ROWS = 1_000_000
SEED = 0
SAMPLE_SECONDS = 0.05
RUNS_NOTE = """
CPU time counts all threads. Raw text and shards lie in the page cache. Goals on two idle cores:
250,000 rows/s, 300,000 rows per CPU-second (facebookresearch/dlrm: 13,400).
"""
MEMORY_NOTE = f"""\
Peak of the {{kind}} of the process, looked at every 50 ms in a run that is not timed. An
extrapolated row continues the line through the two rows above it: too high where memory follows
ids, which grow ever more slowly, and rough where those two hardly differ. Goal: 2,000 MB at
{KAGGLE_ROWS:,} rows."""
LOADER_NOTE = """\
The whole loader: contiguous block reads, shuffle, batch arrays. Goal: 1.5 µs per sample at batch
128 (facebookresearch/dlrm: 12.7)."""

Case = tuple[int, int]
"""Rows and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRun:
    """What one `prepare` took, from the call to its return; starting Python is not in it.

    Attributes:
        seconds: wall time.
        cpu_seconds: user and system time of all its threads.
        ids: rows of all embedding tables together.
    """

    seconds: float
    cpu_seconds: float
    ids: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The largest sum over the processes of one `prepare`, of the moments it was looked at.

    Attributes:
        peak_bytes: of that sum.
        kind: `PSS` (a page shared by n processes counts 1/n in each) or, where the system does not
            tell it, `RSS`; pages of mapped files count in both.
    """

    peak_bytes: int = 0
    kind: str = "PSS"


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the largest raw file")
    options, overrides = parser.parse_known_args()
    config = validate(values_of(overrides))

    def measure() -> Page:
        build.RAW_FOLDER.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="bench-", dir=build.RAW_FOLDER) as folder:
            return page(config, options.rows, options.repeats, Path(folder))

    publish(measure, options.output, compiles=True)


def page(config: Config, rows: int, repeats: int, folder: Path) -> Page:
    """Generate rows, prepare them in all ways, read the last shards; minutes long.

    Args:
        config: how rows are prepared and read; the number of processes is set here.
        rows: of the largest raw file; a half and a quarter of it are prepared as well.
        repeats: of every figure but memory, which is watched once, in a run of its own.
        folder: where raw files and shards are made.

    Raises:
        DlrmError: no room on the disk, or `prepare` failed.
    """
    raw, output = folder / "train.txt", folder / "shards"
    options = build.prepare_options(config, advice="")
    runs: dict[Case, list[PrepareRun]] = {}
    memory: dict[Case, Memory] = {}
    cases = [(rows // part, processes) for part in PARTS for processes in PROCESSES]
    last = 0
    for size, processes in each("prepare", cases):
        if size != last:
            synthetic.generate(raw, size, SEED, build.profile(), lambda done: None)
            last = size
        own = replace(options, processes=processes)
        runs[size, processes] = [run_prepare(raw, _fresh(output), own)[0] for _ in range(repeats)]
        memory[size, processes] = run_prepare(raw, _fresh(output), own, watches=True)[1]
    loader = list(loader_rows(open_shards(output, None), config, repeats))
    kind = next(iter(memory.values())).kind
    return {
        "Preparing raw rows": Part(run_rows(runs), RUNS_NOTE),
        "Memory": Part(memory_rows(runs, memory), MEMORY_NOTE.format(kind=kind)),
        "Loader": Part(loader, LOADER_NOTE),
    }


def run_rows(runs: Mapping[Case, Sequence[PrepareRun]]) -> list[Row]:
    """Speed of each case; spreads are median (lowest – highest) of the repeats."""
    return [
        {
            "rows": rows,
            "threads": processes,
            "1000 rows/s": spread([rows / run.seconds / 1000 for run in own], 0),
            "1000 rows per CPU-second": spread([rows / run.cpu_seconds / 1000 for run in own], 0),
            "seconds": median(run.seconds for run in own),
        }
        for (rows, processes), own in runs.items()
    ]


def memory_rows(
    runs: Mapping[Case, Sequence[PrepareRun]], memory: Mapping[Case, Memory]
) -> list[Row]:
    """Memory of each size, and of Kaggle's where that is larger."""
    ids = {rows: own[0].ids for (rows, _), own in runs.items()}
    columns = {n: f"peak MB, {n} thread{'s' if n > 1 else ''}" for n in PROCESSES}
    peaks = {
        n: [(rows, memory[rows, n].peak_bytes / 1e6) for rows in sorted(ids)] for n in PROCESSES
    }
    table: list[Row] = [
        {"rows": f"{rows:,}", "ids": ids[rows]}
        | {column: peaks[n][number][1] for n, column in columns.items()}
        for number, rows in enumerate(sorted(ids))
    ]
    if max(ids) < KAGGLE_ROWS:
        expected = {column: extrapolate(peaks[n], KAGGLE_ROWS) for n, column in columns.items()}
        table.append({"rows": f"{KAGGLE_ROWS:,} (extrapolated)", "ids": None, **expected})
    return table


def extrapolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """The straight line through the last two of (rows, value), at `at` rows.

    Memory grows with the vocabulary, which grows ever more slowly: the line lies above it.
    """
    (rows_before, before), (rows, value) = points[-2:]
    return value + (value - before) * (at - rows) / (rows - rows_before)


def loader_rows(shards: Shards, config: Config, repeats: int) -> Iterator[Row]:
    """CPU time per sample of the training loader at several batch sizes, page cache warm."""
    sizes = [size for size in BATCH_SIZES if size <= len(shards.train_rows)]
    for batch_size, shuffle in each("loader", [(b, s) for b in sizes for s in (True, False)]):
        loader = Loader(
            shards,
            batch_size=batch_size,
            seed=SEED,
            shuffle=shuffle,
            shuffle_block_rows=config.data.shuffle_block_rows,
            shuffle_read_rows=config.data.shuffle_read_rows,
        )
        loader.read(LoaderState(0, 0, 0))  # compiles, and reads the first block
        epochs = -(-LOADER_ROWS // (loader.steps_per_epoch * batch_size))
        steps = epochs * loader.steps_per_epoch
        microseconds: list[float] = []
        for repeat in range(repeats):
            state = LoaderState(1 + repeat * epochs, 0, 0)
            start = time.process_time()
            for _ in range(steps):
                _, state = loader.read(state)
            microseconds.append(1e6 * (time.process_time() - start) / (steps * batch_size))
        yield {
            "batch": batch_size,
            "order": "shuffled" if shuffle else "file",
            "CPU µs per sample": spread(microseconds, 3),
        }


def _fresh(output: Path) -> Path:
    if output.exists():
        shutil.rmtree(output)
    return output


def run_prepare(
    raw: Path, output: Path, options: PrepareOptions, *, watches: bool = False
) -> tuple[PrepareRun, Memory]:
    """Prepare one raw file in a process of its own, undisturbed or with its memory watched.

    Raises:
        DlrmError: `prepare` failed; the same error.
    """
    # A new process each time: memory that an earlier run left behind does not count.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, raw, output, options))
    process.start()
    theirs.close()
    peak = Memory()
    try:
        while not ours.poll(SAMPLE_SECONDS if watches else None):
            now = tree_memory(process.pid or 0)
            peak = Memory(max(peak.peak_bytes, now.peak_bytes), now.kind)
        result: PrepareRun | DlrmError = ours.recv()
        process.join()
    except EOFError:
        process.join()
        raise DlrmError(f"the measured prepare ended with code {process.exitcode}") from None
    finally:
        process.kill()  # Ctrl-C; does nothing to one that has ended
        process.join()
        ours.close()
    if isinstance(result, DlrmError):
        raise result
    return result, peak


def _child(connection: Connection, raw: Path, output: Path, options: PrepareOptions) -> None:
    before, started = _cpu_seconds(), time.perf_counter()
    try:
        manifest = prepare([raw], output, options, silent, silent).manifest
    except DlrmError as error:
        connection.send(error)
        return
    run = PrepareRun(
        seconds=time.perf_counter() - started,
        cpu_seconds=_cpu_seconds() - before,
        ids=sum(manifest.table_rows),
    )
    connection.send(run)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def tree_memory(pid: int) -> Memory:
    """What a process and all below it hold together; nothing once it is gone."""
    total_bytes, kind = 0, "PSS"
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return Memory()
    for process in processes:
        try:
            used = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        if not hasattr(used, "pss"):
            kind = "RSS"
        total_bytes += getattr(used, "pss", used.rss)
    return Memory(total_bytes, kind)


if __name__ == "__main__":
    main()
