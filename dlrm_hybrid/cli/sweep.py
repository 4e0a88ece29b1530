"""Jobs of a sweep, in sequence, in parallel or under SLURM, and the table of their results."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from rich.progress import Progress, TaskID, TextColumn
from rich.table import Column

from dlrm_hybrid.cli.terminal import PLAIN_LINE_SECONDS, REFRESH_SECONDS, Terminal, duration
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.identity import CONFIG_FILE
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.disk import SWEEP_FOLDER_KEY, refusals
from dlrm_hybrid.run.folder import claim, is_complete, one_run, with_base, write_whole
from dlrm_hybrid.run.jobs import slurm
from dlrm_hybrid.run.jobs.pool import Pool
from dlrm_hybrid.run.jobs.process import JobProcess
from dlrm_hybrid.run.readiness import no_empty_folder
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, DataError, DlrmError, ExitCode, printable

SUMMARY_NAME = "sweep_summary"
SUBMITTED_SUFFIX = ".slurm.json"  # of files with SLURM's job numbers, beside the jobs' folders
HEAD_COLUMNS = 16  # of a line, for `job 1234` and what the terminal may add
LEAST_COLUMNS = 20


@final
@dataclass(slots=True)
class Sweep:
    """A sweep in progress: reports its jobs and collects their exit codes.

    Attributes:
        folder: folder that contains those of all jobs.
        keys: keys whose values differ between jobs.
    """

    folder: Path
    keys: tuple[str, ...]
    count: int
    terminal: Terminal = field(default_factory=Terminal)
    _jobs: list[tuple[compose.Job, int]] = field(default_factory=list[tuple[compose.Job, int]])
    _lock: ExitStack = field(default_factory=ExitStack)
    _has_begun: bool = False

    def begin(self, job: compose.Job) -> str:
        """Report that a job begins; returns its name for messages.

        Raises:
            ConfigError: the folder is a run's, or another sweep runs in it: names process and host.
        """
        if not self._has_begun:
            if (self.folder / CONFIG_FILE).exists():
                fault = f"{SWEEP_FOLDER_KEY} = {self.folder}: is the folder of a run; name another"
                raise ConfigError(faults_text([fault]))
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(one_run(self.folder, SWEEP_FOLDER_KEY))
            self._has_begun = True
        varied = [text for text in job.overrides if head_of(text) in self.keys]
        self.terminal.line(f"job {job.folder.name}: {' '.join(varied or job.overrides)}")
        return f"job {job.folder.name}"

    def skips(self, request: Request) -> bool:
        """Whether to skip a job that is complete already; reports it."""
        skipped = request.config.skip_completed and is_complete(request)
        if skipped:
            self.terminal.line(f"job {request.folder.name}: already complete, skipped")
        return skipped

    def add(self, job: compose.Job, exit_code: int) -> None:
        """Note the exit code of a job that has ended."""
        self._jobs.append((job, exit_code))

    def close(self) -> None:
        """Write `sweep_summary.csv` and `.md`, and show the table."""
        with self._lock:
            if self._jobs:
                self._sum_up()

    def _sum_up(self) -> None:
        from dlrm_hybrid.report.tables import sweep_frame, sweep_means, sweep_table  # pandas: 0.3 s

        folder, terminal = self.folder, self.terminal
        frame = sweep_frame(self._jobs)
        table = sweep_table(frame)
        failed = sum(code != ExitCode.DONE for _, code in self._jobs)
        path = folder / SUMMARY_NAME
        shown = [table, means] if (means := sweep_means(frame)) else [table]
        write_whole(path.with_suffix(".md"), "\n".join(part.markdown() for part in shown))
        write_whole(path.with_suffix(".csv"), frame.to_csv(index=False))
        for part in shown:
            terminal.table(part)
        missing = self.count - len(self._jobs)
        if failed or missing:
            again = shlex.quote(override_text(SWEEP_FOLDER_KEY, str(folder)))
            terminal.line(
                f"{failed} of {self.count} jobs did not complete"
                + (f", {missing} did not begin" if missing else "")
                + f"; to resume them, repeat the command with\n  {again} skip_completed=true"
            )
        terminal.line(f"wrote {path}.md and {path}.csv; for plots run")
        runs = shlex.quote(override_text("report.runs", str(folder)))
        terminal.line(f"  python -m dlrm_hybrid report {runs}")


def run_beside(sweep: Sweep, points: compose.Sweep) -> int:
    """Run the jobs of a sweep in parallel, each in a process of its own.

    Returns:
        the exit code of the failed job with the lowest number, or that of a signal.
    """
    count = len(points.points)
    jobs: dict[int, compose.Job] = {}
    with _lines(sweep.terminal, count) as lines:

        def begin(number: int) -> JobProcess | int:
            job = jobs[number] = points.job(number)
            sweep.begin(job)
            try:
                with refusals():
                    request = Request(validate(job.values), job.values, job.folder, job.overrides)
                    if sweep.skips(request):
                        lines.count_one(ExitCode.DONE)
                        return ExitCode.DONE
                    _require_place(request)
                    begun = JobProcess.start(job.overrides, job.folder)
            except DlrmError as error:
                lines.ended(number, error.exit_code, str(error))
                return error.exit_code
            lines.begun(number)
            return begun

        pool = Pool(points.jobs, begin, lines)
        try:
            return pool.run(count)
        finally:
            for number in sorted(pool.exit_codes):
                sweep.add(jobs[number], pool.exit_codes[number])


def submit_each(sweep: Sweep, points: compose.Sweep) -> int:
    """Submit the jobs of a sweep to SLURM; makes the table only when all are complete.

    Returns:
        the exit code of the first job that is refused here, else 0.

    Raises:
        ResourceError: SLURM is missing or refuses a job; earlier ones are submitted.
    """
    terminal, done = sweep.terminal, list[compose.Job]()
    first_failed, submitted = int(ExitCode.DONE), 0
    for number in range(len(points.points)):
        job = points.job(number)
        title = sweep.begin(job)
        record = sweep.folder / f"{job.folder.name}{SUBMITTED_SUFFIX}"
        try:
            request = Request(validate(job.values), job.values, job.folder, job.overrides)
            if sweep.skips(request):
                done.append(job)
            elif (queued := slurm.state(record)) is not None:
                terminal.line(f"{title}: job {queued[0]} of SLURM is {queued[1]}; left as it is")
            else:
                _require_place(request)
                submitted += 1
                terminal.line(f"{title}: {slurm.submit(request, points.sbatch, record)}")
        except (ConfigError, DataError) as error:
            print(f"{title}: {error}", file=sys.stderr)
            first_failed = first_failed or error.exit_code
    if len(done) == len(points.points):
        for job in done:
            sweep.add(job, ExitCode.DONE)
        return ExitCode.DONE
    again = shlex.quote(override_text(SWEEP_FOLDER_KEY, str(sweep.folder)))
    terminal.line(
        f"submitted {submitted} of {len(points.points)} jobs; for the table of results, and to "
        "submit again what did not complete, repeat the command with\n"
        f"  {again} skip_completed=true"
    )
    return first_failed


def _require_place(request: Request) -> None:
    """Refuse a folder that the job would refuse: of another run, or in use."""
    with no_empty_folder(request.folder), one_run(request.folder):
        claim(with_base(request))


@contextmanager
def _lines(terminal: Terminal, count: int) -> Generator[_Lines, None, None]:
    if not terminal.console.is_terminal:
        yield _Lines(terminal, count, None)
        return
    # Leave room at the edge: the ^C of a terminal would begin a line that rich does not know of.
    width = max(LEAST_COLUMNS, terminal.console.width - HEAD_COLUMNS)
    text = Column(no_wrap=True, overflow="ellipsis", max_width=width)
    with Progress(
        TextColumn("{task.description}"),
        TextColumn("{task.fields[text]}", markup=False, table_column=text),
        console=terminal.console,
        refresh_per_second=1 / REFRESH_SECONDS,
        transient=True,
    ) as progress:
        yield _Lines(terminal, count, progress)


@final
class _Lines:
    """Shows a line for each running job, with its latest output, and one for the sweep.

    In a file or a pipe a job's line is printed every few seconds, if it has changed.
    """

    def __init__(
        self,
        terminal: Terminal,
        count: int,
        progress: Progress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal
        self._count = count
        self._progress = progress
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._shown: dict[int, tuple[float, str]] = {}
        self._tasks: dict[int, TaskID] = {}
        self._codes: list[int] = []
        self._is_stopping = False
        self._all = None if progress is None else progress.add_task("sweep", text="", total=None)

    def begun(self, number: int) -> None:
        """Add the line of a job that has started."""
        self._begun[number] = self._clock()
        self._shown[number] = self._clock(), ""
        if self._progress is not None:
            self._tasks[number] = self._progress.add_task(f"job {number}", text="", total=None)
        self._sum_up()

    def runs(self, number: int, line: str) -> None:
        """See `PoolView`."""
        shown, before = self._shown[number]
        if self._progress is not None:
            self._progress.update(self._tasks[number], text=printable(line))
        elif self._is_stopping:
            return  # its latest output may be older than the signal
        elif line != before and self._clock() - shown >= PLAIN_LINE_SECONDS:
            self._shown[number] = self._clock(), line
            self._terminal.line(f"job {number}: {line}")

    def ended(self, number: int, exit_code: int, message: str) -> None:
        """See `PoolView`."""
        if self._progress is not None and number in self._tasks:
            self._progress.remove_task(self._tasks.pop(number))
        begun = self._begun.pop(number, None)
        if exit_code == ExitCode.DONE and begun is not None:
            self._terminal.line(f"job {number}: complete after {duration(self._clock() - begun)}")
        elif exit_code != ExitCode.DONE:
            text = message or f"ended with exit code {exit_code}"
            print(printable(f"job {number}: {text}"), file=sys.stderr)
        self.count_one(exit_code)

    def stopping(self, number: int) -> None:
        """See `PoolView`."""
        self._is_stopping = True
        jobs = ", ".join(map(str, self._begun)) or "none"
        hint = " (Ctrl-C again to quit without saving)" if number == signal.SIGINT else ""
        text = f"stopping: jobs that run save a checkpoint ({jobs}), no other begins{hint}"
        self._terminal.line(text)

    def count_one(self, exit_code: int) -> None:
        """Count a job that has ended or was skipped."""
        self._codes.append(exit_code)
        self._sum_up()

    def _sum_up(self) -> None:
        if self._progress is not None and self._all is not None:
            failed = sum(code != ExitCode.DONE for code in self._codes)
            text = f"{len(self._codes)} of {self._count} jobs ended, {len(self._begun)} running"
            self._progress.update(self._all, text=text + (f", {failed} failed" if failed else ""))
