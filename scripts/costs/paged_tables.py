"""Measures tables in files larger than memory: samples per second, pages read per sample.

    python scripts/costs/paged_tables.py --output docs/results/mmap.md
    python scripts/costs/paged_tables.py --rows 0.01 --limits 320 --batches 200 --warm-up 200

Every case is a process of its own in a memory control group, which needs root. It looks up and
updates rows as a table server does for one trainer, without sockets. Ids are drawn from the profile
of Criteo Kaggle. The files of up to 2.2 GB are unnamed and need no cleaning up.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.data.profile import Profile, Staircase
from dlrm_hybrid.model import row_storage
from dlrm_hybrid.model.row_storage import IN_MEMORY, InFiles
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.parallel.tables.lookups import split_batch
from dlrm_hybrid.run.assembly import build

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import SEED, Page, Part, Row, arguments, each, one_thread, publish

DIM = 16
BATCH = 128
LR = 0.01
BLOCK_BATCHES = 250  # whose ids are drawn at once
SCATTER = 2_654_435_761  # odd and prime: multiplying by it is a permutation of most tables
MIB = 1 << 20
NOTE = f"""
Batches of {BATCH}, SGD. "Limit" is the memory of the control group, all else of the process
included; "cached" is the share of the table that it held at the end. Pages read are major faults;
the disk also writes back what has changed. A lookup reads with so many threads. Ids are in order of
frequency, or multiplied by a large prime.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One process to measure.

    Attributes:
        limit_mib: of its control group; None for no limit.
        storage: of the rows.
        readers: threads of a lookup.
        is_scattered: whether ids are out of the order of frequency.
        share: of the rows of Criteo's tables.
        warm_up: batches before those that are measured.
        batches: that are measured.
    """

    limit_mib: int | None
    storage: str
    readers: int
    is_scattered: bool
    share: float
    warm_up: int
    batches: int


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=float, default=1.0, help="share of Criteo's rows")
    parser.add_argument("--limits", type=int, nargs="+", default=(768, 512), help="MiB")
    parser.add_argument("--warm-up", type=int, default=2000, help="batches before measuring")
    parser.add_argument("--batches", type=int, default=1000, help="that are measured")
    parser.add_argument("--case", help="measure only this one, here; JSON")
    options = parser.parse_args()
    if options.case is not None:
        with one_thread():
            print(json.dumps(measured(Case(**json.loads(options.case)))))
        return

    def measure() -> Page:
        rows = [row_of(case) for case in each("cases", list(cases(options)))]
        return {"Tables larger than memory": Part(rows, NOTE)}

    publish(measure, options.output, compiles=True)


def cases(options: Namespace) -> Iterator[Case]:
    """Memory, files with enough memory, and files with less and less of it."""
    same = {"share": options.rows, "warm_up": options.warm_up, "batches": options.batches}
    limits: tuple[int | None, ...] = (None, *options.limits)
    yield Case(limit_mib=None, storage="memory", readers=1, is_scattered=False, **same)
    for limit in limits:
        yield Case(limit_mib=limit, storage="mmap", readers=8, is_scattered=False, **same)
    least = options.limits[-1]
    yield Case(limit_mib=least, storage="mmap", readers=1, is_scattered=False, **same)
    yield Case(limit_mib=least, storage="mmap", readers=8, is_scattered=True, **same)


def row_of(case: Case) -> Row:
    """Measure a case in a process of its own."""
    with control_group(case.limit_mib) as enter:
        command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=enter)
    found = json.loads(done.stdout)
    return {
        "storage": case.storage,
        "limit, MiB": case.limit_mib,
        "readers": case.readers if case.storage == "mmap" else None,
        "ids": "scattered" if case.is_scattered else "by frequency",
        "table, MiB": round(found["table_bytes"] / MIB),
        "cached": f"{found['cached']:.0%}" if case.storage == "mmap" else None,
        "samples/s": round(found["samples_per_second"]),
        "pages read per sample": f"{found['faults_per_sample']:.2f}",
        "start, s": round(found["start_seconds"]),
    }


@contextmanager
def control_group(limit_mib: int | None) -> Generator[Callable[[], object] | None, None, None]:
    """What makes a process enter a memory control group with this limit, below our own."""
    if limit_mib is None:
        yield None
        return
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    if "memory" in groups:
        parent, key = Path(f"/sys/fs/cgroup/memory{groups['memory']}"), "memory.limit_in_bytes"
    else:
        parent, key = Path(f"/sys/fs/cgroup{groups['']}"), "memory.max"
    group = parent / f"paged_tables.{os.getpid()}"
    group.mkdir()
    try:
        (group / key).write_text(str(limit_mib * MIB), encoding="ascii")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    finally:
        group.rmdir()


def measured(case: Case) -> dict[str, float]:
    """What a table server would do for one trainer, in this process."""
    row_storage.READERS = case.readers
    profile = build.profile()
    table_rows = tuple(max(4, int(case.share * rows)) for rows in profile.cardinalities)
    spec = ModelSpec(embedding_dim=DIM, bottom=(13, DIM), top=(1,), table_rows=table_rows)
    storage = IN_MEMORY if case.storage == "memory" else InFiles(build.RAW_FOLDER)
    begun = time.perf_counter()
    options = Fused()
    rows = TableRows(spec, options, storage=storage)
    rows.draw(SEED)
    start_seconds = time.perf_counter() - begun
    rng = np.random.default_rng(SEED)
    learn(rows, profile, case, case.warm_up, rng)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    seconds = learn(rows, profile, case, case.batches, rng)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    table_bytes = sum(piece.view.nbytes for piece in rows.pieces())
    return {
        "samples_per_second": case.batches * BATCH / seconds,
        "faults_per_sample": faults / (case.batches * BATCH),
        "cached": resident_bytes(rows) / table_bytes,
        "table_bytes": table_bytes,
        "start_seconds": start_seconds,
    }


def learn(
    rows: TableRows, profile: Profile, case: Case, batches: int, rng: np.random.Generator
) -> float:
    """Seconds of the lookups and updates of so many batches; drawing them is not counted."""
    gradient_KD = torch.randn(26 * BATCH, DIM, generator=torch.Generator().manual_seed(SEED))
    seconds = 0.0
    for first in range(0, batches, BLOCK_BATCHES):
        count = min(BLOCK_BATCHES, batches - first)
        asked = list(distinct(rows, profile, case.is_scattered, count, rng))
        begun = time.perf_counter()
        for ids in asked:
            rows.look_up(ids)
            rows.update([(ids, gradient_KD[: len(ids.ids_K)])], LR)
        seconds += time.perf_counter() - begun
    return seconds


def distinct(
    rows: TableRows, profile: Profile, is_scattered: bool, batches: int, rng: np.random.Generator
) -> Iterator[Rows]:
    """The distinct ids of so many batches."""
    columns = [
        drawn(column, count, batches * BATCH, is_scattered, rng)
        for column, count in zip(profile.categoricals, rows.rows_F, strict=True)
    ]
    ids_FN = np.stack(columns)
    for first in range(0, ids_FN.shape[1], BATCH):
        ids_FB = np.ascontiguousarray(ids_FN[:, first : first + BATCH])
        yield split_batch(Bags(torch.from_numpy(ids_FB)), 1)[1].asked[0].ids


def drawn(
    column: Staircase, rows: int, count: int, is_scattered: bool, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Ids of one table; 0 is the most frequent one, a missing value the last."""
    edges = np.array([*column.starts, column.stop], np.int64)
    weights = np.array(column.weights, np.float64)
    step = rng.choice(len(weights), count, p=weights / weights.sum())
    ids = edges[step] + (rng.random(count) * (edges[step + 1] - edges[step])).astype(np.int64)
    ids[rng.random(count) < column.missing / 2**32] = column.stop
    ids %= rows
    return ids * SCATTER % rows if is_scattered else ids


def resident_bytes(rows: TableRows) -> int:
    """How much of the rows is in memory; they are one tensor."""
    address = rows.pieces()[0].view.data_ptr()
    is_it = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, end = (int(one, 16) for one in name.split("-"))
            is_it = first <= address < end
        elif is_it and name == "Rss:":
            return 1024 * int(rest[0])
    raise ValueError(f"no mapping at {address:#x}")


if __name__ == "__main__":
    main()
