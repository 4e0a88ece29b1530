"""Kernels are compiled before they are needed, on all cores, and a person is told."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.workers import Workers
from dlrm_hybrid.disk import locked
from dlrm_hybrid.kernels import ahead
from dlrm_hybrid.kernels.cache import kernel_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display

MOST_PROCESSES = 8  # each takes 200 MB; with more of them the longest file decides
LOCK_FILE = "compiling.lock"


def compile_for(config: Config, display: Display, *, trains: bool = True) -> None:
    """Compile what the verbs `train`, `evaluate` and `prepare` need for this configuration."""
    compile_ahead(build.kernel_files(config, trains=trains), display)


def compile_ahead(names: Iterable[str], display: Display) -> None:
    """Compile the kernels of these files that are not in the cache yet; most often none.

    Where they cannot be kept a line says so, and every process will compile its own.
    """
    found = kernel_folder()
    for line in found.refused:
        display.line_once(f"kernel cache: {line}")
    if found.path is None:
        display.line_once("compiled kernels cannot be cached: every process will compile its own")
        return
    if found.refused:
        display.line_once(f"kernel cache: {found.path} is used instead")
    wanted = frozenset(names)
    if not _missing(found.path, wanted, display):
        return
    try:
        with locked(
            found.path / LOCK_FILE,
            lambda holder: display.line(f"waiting for {holder}, which is compiling kernels"),
        ):
            ahead.tidy(found.path)
            _compile(found.path, _missing(found.path, wanted, display), display)
    except OSError as error:
        display.line(f"kernel cache: {found.path} cannot be used ({error.strerror})")


def _missing(folder: Path, names: frozenset[str], display: Display) -> tuple[str, ...]:
    state = ahead.look(folder, names)
    for line in state.damaged:
        display.line(f"kernel cache: {line}; removed and recompiled")
    return state.missing


def _compile(folder: Path, missing: tuple[str, ...], display: Display) -> None:
    if not missing:
        return
    processes = min(len(os.sched_getaffinity(0)), len(missing), MOST_PROCESSES)
    cores = "1 core" if processes == 1 else f"{processes} cores"
    display.line(f"compiling kernels for this processor on {cores}, once; cached in {folder}")
    done = 0
    with display.bar("compile") as bar, Workers(processes) as workers:

        def report(count: int) -> None:
            nonlocal done
            done += count
            bar.update(done, len(missing), f"{done} of {len(missing)} files")

        report(0)
        # Results come in order, reports at once: so all tasks may be drawn.
        for _ in workers.run(ahead.compile_file, missing, report, window=len(missing), queued=1):
            pass
