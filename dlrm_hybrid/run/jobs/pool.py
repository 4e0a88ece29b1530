"""A pool of jobs: several runs at a time, with signals forwarded to them."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol, final

from dlrm_hybrid.process import stop_signals
from dlrm_hybrid.run.jobs.process import JobProcess, listen
from dlrm_hybrid.types import ExitCode

POLL_SECONDS = 0.1
PATIENT_INTERRUPTS = 2  # number of Ctrl-C: the first saves, the second quits, a third kills


class PoolView(Protocol):
    """Shows the state of jobs."""

    def runs(self, number: int, line: str) -> None:
        """Show the last line that a job printed."""
        ...

    def ended(self, number: int, exit_code: int, message: str) -> None:
        """Show that a job has ended, with its message."""
        ...

    def stopping(self, number: int) -> None:
        """Show that this signal has arrived, so that no further job begins."""
        ...


@final
@dataclass(slots=True)
class Pool:
    """Runs jobs, `width` at a time.

    Attributes:
        width: number running at a time.
        begin: starts a job, or returns an exit code if there is nothing to start.
        view: shows the jobs.
        exit_codes: exit codes of ended jobs, by number.
    """

    width: int
    begin: Callable[[int], JobProcess | int]
    view: PoolView
    exit_codes: dict[int, int] = field(default_factory=dict[int, int])
    _running: dict[int, JobProcess] = field(default_factory=dict[int, JobProcess])
    _received: list[int] = field(default_factory=list[int])
    _forwarded: int = 0

    def run(self, count: int) -> int:
        """Run jobs 0 to `count` - 1; returns the first failure's exit code, or that of a signal.

        A failing job does not stop the others. After SIGTERM or Ctrl-C no job begins, and running
        ones save and end; a second Ctrl-C ends them without saving.
        """
        waiting = deque(range(count))
        with stop_signals(self._note):
            try:
                while self._running or (waiting and not self._received):
                    if waiting and len(self._running) < self.width and not self._received:
                        self._begin(waiting.popleft())
                    else:
                        listen(self._running.values(), POLL_SECONDS)
                    self._forward()
                    self._reap()
            finally:
                for job in self._running.values():
                    job.kill()
        if self._received:
            is_interrupt = signal.SIGINT in self._received
            return ExitCode.INTERRUPTED if is_interrupt else ExitCode.PREEMPTED
        failures = (self.exit_codes[number] for number in sorted(self.exit_codes))
        return next((code for code in failures if code != ExitCode.DONE), ExitCode.DONE)

    def _begin(self, number: int) -> None:
        begun = self.begin(number)
        if isinstance(begun, JobProcess):
            self._running[number] = begun
        else:
            self.exit_codes[number] = begun

    def _forward(self) -> None:
        new = self._received[self._forwarded :]
        if new and not self._forwarded:
            self.view.stopping(new[0])
        self._forwarded += len(new)
        in_haste = self._received.count(signal.SIGINT) > PATIENT_INTERRUPTS
        for number in new:
            for job in self._running.values():
                job.send(signal.SIGKILL if in_haste else number)

    def _reap(self) -> None:
        for number, job in list(self._running.items()):
            job.hear()
            if (code := job.ended()) is None:
                self.view.runs(number, job.last_line())
                continue
            del self._running[number]
            job.close()
            self.exit_codes[number] = code
            self.view.ended(number, code, job.message)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
