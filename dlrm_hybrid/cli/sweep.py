"""Several jobs one after the other, and the table of what became of them."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.run.folder import is_complete, one_run, write_whole
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ExitCode

SUMMARY_NAME = "sweep_summary"
FOLDER_KEY = "hydra.sweep.dir"


@final
@dataclass(slots=True)
class Sweep:
    """The jobs that have been started so far.

    Attributes:
        folder: above those of all jobs.
        keys: what differs between jobs.
        terminal: for progress and results.
    """

    folder: Path
    keys: tuple[str, ...]
    terminal: Terminal = field(default_factory=Terminal)
    _jobs: list[tuple[compose.Job, int]] = field(default_factory=list[tuple[compose.Job, int]])
    _lock: ExitStack = field(default_factory=ExitStack)

    def begin(self, job: compose.Job) -> str:
        """Say that a job begins; returns what it is called: its number.

        Raises:
            ConfigError: another sweep runs in the same folder; names its process and host.
        """
        if not self._jobs:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(one_run(self.folder, FOLDER_KEY))
        own = [text for text in job.overrides if text.partition("=")[0].lstrip("+") in self.keys]
        self.terminal.line(f"job {job.folder.name}: {' '.join(own or job.overrides)}")
        return f"job {job.folder.name}"

    def skips(self, request: Request) -> bool:
        """Whether the job is to be left as it is, and say so."""
        skipped = request.config.skip_completed and is_complete(request)
        if skipped:
            self.terminal.line(f"job {request.folder.name}: already complete, skipped")
        return skipped

    def add(self, job: compose.Job, exit_code: int) -> None:
        """A job has ended."""
        self._jobs.append((job, exit_code))

    def close(self) -> None:
        """Write `sweep_summary.csv` and `.md`, show the table."""
        with self._lock:
            if self._jobs:
                self._sum_up()

    def _sum_up(self) -> None:
        from dlrm_hybrid.report.tables import sweep_frame, sweep_table  # pandas: 0.3 s

        folder, terminal = self.folder, self.terminal
        frame = sweep_frame(self._jobs)
        table = sweep_table(frame)
        failed = sum(code != ExitCode.DONE for _, code in self._jobs)
        path = folder / SUMMARY_NAME
        write_whole(path.with_suffix(".md"), table.markdown())
        write_whole(path.with_suffix(".csv"), frame.to_csv(index=False))
        terminal.table(table)
        if failed:
            again = shlex.quote(override_text(FOLDER_KEY, str(folder)))
            terminal.line(
                f"{failed} of {len(self._jobs)} jobs did not complete; to resume them, repeat the "
                f"command with\n  {again} skip_completed=true"
            )
        terminal.line(f"wrote {path}.md and {path}.csv; for plots run")
        runs = shlex.quote(override_text("report.runs", str(folder)))
        terminal.line(f"  python -m dlrm_hybrid report {runs}")
