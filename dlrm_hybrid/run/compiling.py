"""Kernels are compiled before they are needed, on all cores, and this is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.disk import locked
from dlrm_hybrid.kernels.compiler import jit
from dlrm_hybrid.kernels.compiler.cache import kernel_folder
from dlrm_hybrid.process import masked, tie_to
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.threads import Report, Threads
from dlrm_hybrid.types import ResourceError

MOST_PROCESSES = 8  # each takes 200 MB; with more of them the longest file decides
LOCK_FILE = "compiling.lock"
Compiler = subprocess.Popen[str]


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
            jit.tidy(found.path)
            _compile(found.path, _missing(found.path, wanted, display), display)
    except OSError as error:
        display.line(f"kernel cache: {found.path} cannot be used ({error.strerror})")


def _missing(folder: Path, names: frozenset[str], display: Display) -> tuple[str, ...]:
    state = jit.cache_state(folder, names)
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
    idle: SimpleQueue[Compiler] = SimpleQueue()

    def compile_file(name: str, report: Report) -> None:
        compiler = idle.get()
        try:
            _compile_in(compiler, name)
        finally:
            idle.put(compiler)  # also one that has ended: others who wait shall hear of it
        report(1)

    with (
        display.bar("compile") as bar,
        Threads(processes) as threads,
        _compilers(processes) as compilers,
    ):

        def report(count: int) -> None:
            nonlocal done
            done += count
            bar.update(done, len(missing), f"{done} of {len(missing)} kernels")

        for compiler in compilers:
            idle.put(compiler)
        report(0)
        # Results come in order, reports at once: so all tasks may be drawn.
        for _ in threads.run(compile_file, missing, report, window=len(missing)):
            pass


@contextmanager
def _compilers(count: int) -> Generator[list[Compiler], None, None]:
    """Processes that compile, since numba holds the interpreter lock; they end with this one.

    Each is a process group of its own, so that what a terminal sends reaches only their parent.

    Raises:
        ResourceError: one cannot be started.
    """
    compilers: list[Compiler] = []
    try:
        for _ in range(count):
            compilers.append(_start())
        yield compilers
    finally:
        for compiler in compilers:
            compiler.kill()
        for compiler in compilers:
            # Closes its pipes, of which one may hold a name that nobody reads, and waits.
            with suppress(BrokenPipeError), compiler:
                pass


def _start() -> Compiler:
    # It must find the package, and kernels of it, where this process has found them.
    path = os.pathsep.join(folder or os.curdir for folder in sys.path)
    with masked():
        try:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from dlrm_hybrid.kernels.compiler.jit import serve; serve()",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
                preexec_fn=tie_to(os.getpid()),
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            raise ResourceError(f"cannot start a compiler process: {error.strerror}") from error


def _compile_in(compiler: Compiler, name: str) -> None:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    try:
        compiler.stdin.write(f"{name}\n")
        compiler.stdin.flush()
        answer = compiler.stdout.readline()
    except OSError:
        answer = ""
    if answer.strip() == name:
        return
    code = compiler.wait()
    ended = (
        f"was killed by signal {-code}; too little memory is the usual reason"
        if code < 0
        else f"ended with code {code}"
    )
    raise ResourceError(f"compiler process {compiler.pid} {ended} while it compiled {name}")
