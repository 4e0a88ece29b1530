"""Signals as stop requests, which the training loop checks between steps.

SIGTERM: save a checkpoint, exit 75. SIGINT: the same, exit 130; a second one ends the process at
once, unless a supervisor decides that.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType

from dlrm_hybrid.process import STOP_SIGNALS, unshield
from dlrm_hybrid.types import ExitCode, InterruptedRunError, PreemptedError

PREEMPTION, INTERRUPTION = 1, 2
"""Severities of SIGTERM and of SIGINT."""


@dataclass(slots=True)
class StopRequest:
    """The stop that signals have requested so far.

    Attributes:
        supervised: whether a signal may come twice, to all processes and again from the
            supervisor, which kills its ranks at a second Ctrl-C itself.
        severity: 0: go on; 1 after SIGTERM; 2 after SIGINT. The highest of several processes wins.
    """

    supervised: bool = False
    severity: int = 0

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        unshield()

    def check(self) -> None:
        """Stop here if a signal has requested it.

        Raises:
            InterruptedRunError: after SIGINT.
            PreemptedError: after SIGTERM.
        """
        obey(self.severity)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.severity == INTERRUPTION and not self.supervised:
            os._exit(ExitCode.INTERRUPTED)
        # Without a call, at whose end the other signal could be handled and then forgotten.
        if number == signal.SIGINT:
            self.severity = INTERRUPTION
        elif not self.severity:
            self.severity = PREEMPTION


def obey(severity: int) -> None:
    """Stop here if the severity says so; see `StopRequest.check`."""
    if severity == INTERRUPTION:
        raise InterruptedRunError("stopped by Ctrl-C")
    if severity == PREEMPTION:
        raise PreemptedError("stopped by SIGTERM")
