"""One `prepare` in a process of its own: time, CPU time and memory, all its processes counted."""

from __future__ import annotations

import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.prepare import prepare
from dlrm_hybrid.types import DlrmError

SAMPLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRun:
    """What one `prepare` took, from the call to its return; starting Python is not in it.

    Attributes:
        seconds: wall time.
        cpu_seconds: user and system time of the process and of its workers, their start included.
        ids: rows of all embedding tables together.
    """

    rows: int
    processes: int
    seconds: float
    cpu_seconds: float
    ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The largest sum over the processes of one `prepare`, of the moments it was looked at.

    Attributes:
        kind: `PSS` (a page shared by n processes counts 1/n in each) or, where the system does not
            tell it, `RSS`; pages of mapped files count in both.
    """

    rows: int
    processes: int
    kind: str
    peak_bytes: int


def run_prepare(raw: Path, output: Path, options: PrepareOptions) -> PrepareRun:
    """Prepare one raw file, undisturbed.

    Raises:
        DlrmError: `prepare` failed; the same error.
    """
    return _run(raw, output, options, watch=False)[0]


def watch_prepare(raw: Path, output: Path, options: PrepareOptions) -> Memory:
    """Prepare one raw file and look at the memory of its processes every 50 ms.

    Raises:
        DlrmError: `prepare` failed; the same error.
    """
    run, kind, peak_bytes = _run(raw, output, options, watch=True)
    return Memory(rows=run.rows, processes=run.processes, kind=kind, peak_bytes=peak_bytes)


def _run(
    raw: Path, output: Path, options: PrepareOptions, watch: bool
) -> tuple[PrepareRun, str, int]:
    # A new process each time: memory that an earlier run left behind does not count.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, raw, output, options))
    process.start()
    theirs.close()
    kind, peak_bytes = "PSS", 0
    try:
        while not ours.poll(SAMPLE_SECONDS if watch else None):
            kind, used_bytes = tree_memory(process.pid or 0)
            peak_bytes = max(peak_bytes, used_bytes)
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
    return result, kind, peak_bytes


def _child(connection: Connection, raw: Path, output: Path, options: PrepareOptions) -> None:
    before, started = _cpu_seconds(), time.perf_counter()
    try:
        manifest = prepare([raw], output, options, _nothing, _nothing).manifest
    except DlrmError as error:
        connection.send(error)
        return
    seconds = time.perf_counter() - started
    connection.send(
        PrepareRun(
            rows=manifest.rows,
            processes=options.processes,
            seconds=seconds,
            cpu_seconds=_cpu_seconds() - before,
            ids=sum(manifest.table_rows),
        )
    )


def _nothing(*_: object) -> None:
    """Nobody looks at the progress."""


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def tree_memory(pid: int) -> tuple[str, int]:
    """`PSS` or `RSS`, and its sum in bytes over a process and all below it; 0 once it is gone."""
    total_bytes, kind = 0, "PSS"
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return kind, 0
    for process in processes:
        try:
            used = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        if hasattr(used, "pss"):
            total_bytes += used.pss
        else:
            kind = "RSS"
            total_bytes += used.rss
    return kind, total_bytes
