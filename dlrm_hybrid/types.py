"""Types shared by every layer: positions in a run, exit codes, and errors with their code."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NewType

BatchNumber = NewType("BatchNumber", int)
"""Position of a batch among those a trainer reads, from 0 at the beginning of the run."""

Tick = NewType("Tick", int)
"""Iteration of the training loop, from 0 at the beginning of the run: the step in reports."""

Version = NewType("Version", int)
"""Number of updates of one bucket of dense weights since the beginning of the run."""


class ScoredPart(StrEnum):
    """A part of the prepared rows that evaluations score."""

    VALIDATION = "validation"
    TEST = "test"


class Group(StrEnum):
    """What a tensor of a checkpoint is: of the model and its optimizers, or of a run's state."""

    DENSE = "dense"
    EMBEDDINGS = "embeddings"
    STATISTICS = "statistics"
    VERSIONS = "versions"
    COMPRESSOR = "compressor"
    LOOKUPS = "lookups"
    LEVELS = "levels"
    FLIGHT = "flight"


class ExitCode(IntEnum):
    """Exit codes of the program."""

    DONE = 0
    FAILED = 1
    CONFIGURATION = 2
    DATA = 3
    DIVERGED = 4
    RESOURCES = 5
    PREEMPTED = 75
    INTERRUPTED = 130

    @classmethod
    def of_signal(cls, number: int) -> ExitCode:
        """The code of a program that SIGINT or SIGTERM has stopped."""
        return cls.INTERRUPTED if number == signal.SIGINT else cls.PREEMPTED


def printable(text: str) -> str:
    """Escape what a terminal would obey or cannot show, line ends excepted.

    Names and texts of other people's files may contain anything.
    """
    return "".join(x if x.isprintable() or x == "\n" else ascii(x)[1:-1] for x in text)


class DlrmError(Exception):
    """An error with a message for a person and an exit code for the shell."""

    exit_code: int = ExitCode.FAILED

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(DlrmError):
    """The configuration is wrong: one line for each fault, each naming its key."""

    exit_code = ExitCode.CONFIGURATION


class DataError(DlrmError):
    """Raw rows, shards or a checkpoint are not what they should be; names file, line and column."""

    exit_code = ExitCode.DATA


class DivergedError(DlrmError):
    """A loss, gradient or weight is not finite; names the step and, where known, the tensor."""

    exit_code = ExitCode.DIVERGED


class ResourceError(DlrmError):
    """The machine lacks disk, memory, a port or a right."""

    exit_code = ExitCode.RESOURCES


class PreemptedError(DlrmError):
    """SIGTERM was received; whatever could be saved has been saved."""

    exit_code = ExitCode.PREEMPTED


class InterruptedRunError(DlrmError):
    """Ctrl-C ended the command before it was done."""

    exit_code = ExitCode.INTERRUPTED


class StoppedLateError(DlrmError):
    """A signal came after a run was complete: the run is valid, but no other begins.

    Attributes:
        number: of the signal.
    """

    exit_code = ExitCode.DONE

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class RunFailedError(DlrmError):
    """A run ended early for a reason that its ranks have reported; carries their exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerLostError(DlrmError):
    """Another rank has disconnected without a goodbye.

    Attributes:
        cause: how this was noticed.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} is gone: {cause}")
        self.rank = rank
        self.cause = cause


class DeadlineError(DlrmError):
    """Something awaited did not come in time; names it and the time.

    Attributes:
        ranks: in training, the ranks that did not send it; empty otherwise.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
