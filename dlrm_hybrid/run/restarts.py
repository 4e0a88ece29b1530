"""Restarts of a run that has lost a rank: their number, and what each starts with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import final

from dlrm_hybrid.checkpoint.folder import saved_step
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.rank.process import Outcome, Rank
from dlrm_hybrid.run.request import Request, TrainTask
from dlrm_hybrid.types import DataError

Namespaces = Callable[[int], tuple[str, ...]]
"""The namespaces that the rank with this number enters before anything else."""


@final
@dataclass(slots=True)
class RestartBudget:
    """Limits the restarts of a run within a time window: after too many, another will not help.

    Attributes:
        limit: most restarts within a window.
        window_seconds: length of the window.
    """

    limit: int
    window_seconds: float
    _times: list[float] = field(default_factory=list[float])

    @property
    def made(self) -> int:
        """Number of restarts so far."""
        return len(self._times)

    def another(self, now_seconds: float) -> int | None:
        """Count a restart; returns its number within the window, None if it is one too many.

        Args:
            now_seconds: time of a monotonic clock.
        """
        recent = sum(made > now_seconds - self.window_seconds for made in self._times)
        if recent >= self.limit:
            return None
        self._times.append(now_seconds)
        return recent + 1


@final
@dataclass(slots=True, kw_only=True)
class RestartLoop:
    """Prepares the attempts of a run, and decides whether there is another.

    Attributes:
        request: the run.
        rows: folder of the run's shards.
        rendezvous: folder of this start of the program, with one below for each attempt.
        namespaces: those that ranks enter.
        say: shows the user a line.
    """

    request: Request
    rows: Path
    rendezvous: Path
    namespaces: Namespaces
    say: Callable[[str], None]
    _first: int = field(init=False)  # number of the first attempt
    _restarts: RestartBudget = field(init=False)
    _trainers: RestartBudget = field(init=False)  # of restarts of trainers
    _task: TrainTask | None = None

    def __post_init__(self) -> None:
        self._first = run_folder.attempts(self.request.folder)
        options = self.request.config.checkpoint
        limit = options.max_restarts, options.restart_window_seconds
        self._restarts, self._trainers = RestartBudget(*limit), RestartBudget(*limit)

    def ranks(self) -> list[Rank]:
        """Make the processes of the next attempt; a world of one process has one."""
        resume_from = run_folder.resume_point(self.request)
        attempt = self._first + self._restarts.made
        self._task = TrainTask(
            run_folder=str(self.request.folder),
            prepared=str(self.rows),
            resume_from=None if resume_from is None else str(resume_from),
            rank=0,
            attempt=attempt,
            rendezvous=str(self.rendezvous / str(attempt)),
        )
        return [self._rank(index) for index in range(len(build.rank_names(self.request.config)))]

    def instead(self, lost: Rank, message: str | None) -> list[Rank]:
        """Make the processes in place of a rank and its mates; see `run_attempts`."""
        if message is None:
            names = build.rank_names(self.request.config)
            left = ", ".join(names[mate] for mate in sorted(lost.mates))
            self.say(f"left after SIGTERM: {left}; started again, the others go on")
        else:
            number = self._trainers.another(time.monotonic())
            if number is None:
                return []
            self.say(
                f"{message}; its trainer is started again, {number} of {self._trainers.limit}, the "
                "others go on"
            )
        return [self._rank(one, lost.incarnation + 1) for one in sorted(lost.mates)]

    def _rank(self, index: int, incarnation: int = 0) -> Rank:
        assert self._task is not None
        task, config = replace(self._task, rank=index, incarnation=incarnation), self.request.config
        return Rank(
            index=index,
            name=build.rank_names(config)[index],
            argument=json.dumps(asdict(task)),
            log_folder=self.request.folder / "log",
            namespaces=self.namespaces(index),
            incarnation=incarnation,
            mates=build.mates(config, index),
        )

    def again(self, lost: Outcome) -> Outcome | None:
        """Decide on a run that has lost a rank: its outcome, or None to restart it."""
        number = self._restarts.another(time.monotonic())
        if number is not None:
            try:
                step = saved_step(run_folder.resume_point(self.request))
            except DataError as error:
                return Outcome(error.exit_code, f"{lost.message}; {error}")
            self.say(
                f"{lost.message}; restart {number} of {self._restarts.limit} from step {step:,}"
            )
            return None
        if not self._restarts.limit:
            return lost
        options = self.request.config.checkpoint
        reason = (
            f"no restarts left (checkpoint.max_restarts = {options.max_restarts} within "
            f"{options.restart_window_seconds:g} s)"
        )
        return replace(lost, message=f"{lost.message}; {reason}")
