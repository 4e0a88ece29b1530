"""The verb `bench`: measure, print the page, write it if asked."""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

from dlrm_hybrid.bench.table import Progress
from dlrm_hybrid.cli.compiling import compile_ahead
from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.kernels import ahead
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.types import ExitCode, ResourceError


def run(request: Request) -> int:
    """Run the benchmark that `bench.what` names."""
    options, terminal = request.config.bench, Terminal()
    arguments = [text for text in request.overrides if not text.startswith("bench.output=")]
    command = f"python -m dlrm_hybrid bench {shlex.join(arguments)}".rstrip()
    measure = {
        "step": _step,
        "prepare": _prepare,
        "kernels": _kernels,
        "compressors": _compressors,
    }[options.what]
    compile_ahead(ahead.ALL, terminal)  # so that nothing measured is a compiler
    with terminal.bar("bench", is_late=True) as bar:

        def progress(stage: str, done: float, total: float) -> None:
            bar.update(done, total, stage)

        page = measure(request.config, command, terminal, progress)
    terminal.line(page)
    if options.output is not None:
        try:
            Path(options.output).write_text(page, encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"bench.output = {options.output}: {error.strerror}") from error
    return ExitCode.DONE


def _step(config: Config, command: str, terminal: Terminal, progress: Progress) -> str:
    # Loads torch: only this verb's process needs it, and only here.
    from dlrm_hybrid.bench.step import criteo_bench, measure_step, step_page

    machine = describe()
    return step_page(measure_step(criteo_bench(config.bench.repeats), progress), machine, command)


def _kernels(config: Config, command: str, terminal: Terminal, progress: Progress) -> str:
    from dlrm_hybrid.bench.kernels import documented_bench, kernels_page, measure_kernels

    machine = describe()
    return kernels_page(
        measure_kernels(documented_bench(config.bench.repeats), progress), machine, command
    )


def _compressors(config: Config, command: str, terminal: Terminal, progress: Progress) -> str:
    from dlrm_hybrid.bench.compressors import (
        compressors_page,
        documented_bench,
        measure_compressors,
    )

    machine = describe()
    measured = measure_compressors(documented_bench(config.bench.repeats), progress)
    return compressors_page(measured, machine, command)


def _prepare(config: Config, command: str, terminal: Terminal, progress: Progress) -> str:
    from dlrm_hybrid.bench.prepare import LoaderSizes, PrepareBench, measure_prepare, prepare_page

    machine = describe()
    with TemporaryDirectory(prefix="bench-", dir=_bench_folder()) as folder:
        bench = PrepareBench(
            rows=config.bench.rows,
            repeats=config.bench.repeats,
            options=build.prepare_options(config, advice=""),
            profile=build.profile(),
            loader=LoaderSizes(
                block_rows=config.data.shuffle_block_rows,
                read_rows=config.data.shuffle_read_rows,
            ),
            folder=Path(folder),
        )
        return prepare_page(measure_prepare(bench, terminal.line, progress), machine, command)


def _bench_folder() -> Path:
    """Beside the other made-up rows: a temporary folder in memory would flatter the figures."""
    build.RAW_FOLDER.mkdir(parents=True, exist_ok=True)
    return build.RAW_FOLDER
