"""Restarts of a run that has lost a rank: their number, and what each starts with."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import final

from typing_extensions import override

from dlrm_hybrid.checkpoint.folder import saved_step
from dlrm_hybrid.parallel.topology import WorkerRole
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.rank.process import Rank
from dlrm_hybrid.run.request import Request, TrainTask
from dlrm_hybrid.run.supervisor import Outcome, Revival
from dlrm_hybrid.telemetry.events import Event, Kind
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
class RestartLoop(Revival):
    """Prepares the attempts of a run, and decides whether there is another.

    Attributes:
        request: the run.
        rows: folder of the run's shards.
        rendezvous: folder of this start of the program, with one below for each attempt.
        namespaces: those that ranks enter.
        restarts: budget of restarts of the run.
        first: number of the first attempt.
        say: shows the user a line.
        reported: events of the present attempt's ranks at their end.
        revivals: budget of restarts of trainers.
    """

    request: Request
    rows: Path
    rendezvous: Path
    namespaces: Namespaces
    restarts: RestartBudget
    first: int
    say: Callable[[str], None]
    revivals: RestartBudget
    reported: list[Event] = field(default_factory=list[Event])
    _task: TrainTask | None = None
    _incarnations: Counter[int] = field(default_factory=Counter[int])
    _begun: bool = False
    _finished: bool = False

    def note(self, event: Event) -> None:
        """Note an event that a rank reports."""
        if event.kind is Kind.RANK:
            self.reported.append(event)
        self._begun |= event.kind is Kind.STARTED
        self._finished |= event.kind is Kind.FINISHED

    @property
    @override
    def is_over(self) -> bool:
        return self._finished

    @override
    def mates(self, index: int) -> frozenset[int]:
        config = self.request.config
        if not config.parallel.elastic:
            return frozenset()
        topology = build.topology(config)
        role = topology.role(index)
        if not isinstance(role, WorkerRole):
            return frozenset()
        return frozenset(topology.worker(role.trainer, one) for one in range(topology.stages))

    @override
    def revive(self, index: int, message: str) -> list[Rank]:
        mates = self.mates(index)
        # Before all have connected, a rank that has not is missed by all others.
        number = self.revivals.another(time.monotonic()) if mates and self._begun else None
        if number is None:
            return []
        self.say(
            f"{message}; its trainer is started again, {number} of {self.revivals.limit}, the "
            "others go on"
        )
        return self._next_incarnation(mates)

    @override
    def rejoin(self, index: int) -> list[Rank]:
        mates = self.mates(index)
        names = build.rank_names(self.request.config)
        left = ", ".join(names[mate] for mate in sorted(mates))
        self.say(f"left after SIGTERM: {left}; started again, the others go on")
        return self._next_incarnation(mates)

    def _next_incarnation(self, mates: frozenset[int]) -> list[Rank]:
        self._incarnations.update(mates)
        return [self._rank(one) for one in sorted(mates)]

    def ranks(self) -> list[Rank]:
        """Make the processes of the next attempt; a world of one process has one."""
        self.reported.clear()  # events of ranks that were done when another was lost
        self._incarnations.clear()
        self._begun = self._finished = False
        resume_from = run_folder.resume_point(self.request)
        attempt = self.first + self.restarts.made
        self._task = TrainTask(
            run_folder=str(self.request.folder),
            prepared=str(self.rows),
            resume_from=None if resume_from is None else str(resume_from),
            rank=0,
            attempt=attempt,
            rendezvous=str(self.rendezvous / str(attempt)),
        )
        return [self._rank(index) for index in range(len(build.rank_names(self.request.config)))]

    def _rank(self, index: int) -> Rank:
        assert self._task is not None
        task = replace(self._task, rank=index, incarnation=self._incarnations[index])
        return Rank(
            index=index,
            name=build.rank_names(self.request.config)[index],
            argument=json.dumps(asdict(task)),
            log_folder=self.request.folder / "log",
            namespaces=self.namespaces(index),
            incarnation=task.incarnation,
        )

    def again(self, lost: Outcome) -> Outcome | None:
        """Decide on a run that has lost a rank: its outcome, or None to restart it."""
        number = self.restarts.another(time.monotonic())
        if number is not None:
            try:
                step = saved_step(run_folder.resume_point(self.request))
            except DataError as error:
                return Outcome(error.exit_code, f"{lost.message}; {error}")
            self.say(
                f"{lost.message}; restart {number} of {self.restarts.limit} from step {step:,}"
            )
            return None
        if not self.restarts.limit:
            return lost
        options = self.request.config.checkpoint
        reason = (
            f"no restarts left (checkpoint.max_restarts = {options.max_restarts} within "
            f"{options.restart_window_seconds:g} s)"
        )
        return replace(lost, message=f"{lost.message}; {reason}")
