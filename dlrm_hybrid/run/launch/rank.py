"""A rank started by a launcher: no parent listens to it, so it reports its own end.

Its counters go to the leader through the store. The leader (`build.leader`) shows the run in its
terminal, keeps the record and writes the summary.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.comm.rendezvous import Rendezvous
from dlrm_hybrid.output import TERMINAL_LOG, log_losses
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import TrainingView
from dlrm_hybrid.run.launch.environment import Launch
from dlrm_hybrid.run.rank.main import run_rank
from dlrm_hybrid.run.rank.process import (
    Outcome,
    PeerFailure,
    Rank,
    flush_log,
    outcome_of,
    root_cause,
    write_log,
)
from dlrm_hybrid.run.request import Request, TrainTask
from dlrm_hybrid.run.supervisor import GRACE_SECONDS, TOGETHER
from dlrm_hybrid.run.training import close
from dlrm_hybrid.telemetry.events import Event, Kind, from_json
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import DlrmError, ExitCode, RunFailedError

POLL_SECONDS = 0.02
# A restart by the launcher would end the same way.
FOR_GOOD = (ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.DIVERGED, ExitCode.RESOURCES)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's place, request and task in a run.

    Attributes:
        launch: place of the rank among the processes.
        request: the run; the network of its configuration is this machine's.
        task: number of the rank, and paths of its files.
        rendezvous: that of the ranks.
    """

    launch: Launch
    request: Request
    task: TrainTask
    rendezvous: Rendezvous

    @property
    def topology(self) -> Topology:
        """Roles and names of all ranks of the world."""
        return build.topology(self.request.config)

    @property
    def leads(self) -> bool:
        """Whether this is the leader."""
        return self.task.rank == build.leader(self.request.config)


def take_part(part: Part, view: TrainingView) -> int:
    """Run the rank until the run ends; returns the exit code.

    Args:
        part: the rank's.
        view: shows its events, and the result if it leads.

    Raises:
        RunFailedError: the rank failed; has the message for its standard error.
    """
    rank = Rank(
        index=part.task.rank,
        name=part.topology.name(part.task.rank),
        argument="",
        log_folder=part.request.folder / "log",
    )
    cores = len(os.sched_getaffinity(0))
    machine = {"node": part.launch.node, "cores": cores, "process": part.launch.rank}
    part.rendezvous.put(f"machine-{rank.index}.json", json.dumps(machine))
    told: list[Event] = []
    with _logged(rank):
        end = _train(part, rank, told, view)
    end, is_news = _cause(part, end)
    if part.leads:
        return _close(part, end, told, view)
    if end.exit_code == ExitCode.DONE:
        part.rendezvous.put(_told(rank.index), told[0].to_json())
    elif is_news and end.exit_code not in TOGETHER:
        raise RunFailedError(f"{rank.title}: {end.message}", end.exit_code)
    return end.exit_code


def tell_failure(rendezvous: Rendezvous, exit_code: int, message: str) -> None:
    """Report to the other ranks why the run failed; and to later attempts, if they would too."""
    with suppress(DlrmError):
        rendezvous.fail(exit_code, message)
        if exit_code in FOR_GOOD:
            rendezvous.for_all_attempts().fail(exit_code, message)


def _train(part: Part, rank: Rank, told: list[Event], view: TrainingView) -> Outcome:
    stop = StopRequest()
    stop.install()
    rendezvous = replace(part.rendezvous, check=stop.check)
    with view.live() as show:

        def report(event: Event) -> None:
            if event.kind is Kind.RANK:
                told.append(event)
            show(event)

        request = part.request
        return outcome_of(
            rank,
            lambda: run_rank(
                part.task, request.values, request.config, lambda: rendezvous, report, stop
            ),
        )


def _cause(part: Part, end: Outcome) -> tuple[Outcome, bool]:
    """Find why the run really ended, and whether this rank must report it.

    A rank that failed for a reason of its own reports it; others only see that it has left. A
    killed rank reports nothing.
    """
    rendezvous = part.rendezvous
    if end.exit_code == ExitCode.DONE:
        return end, False
    if end.lost is None:
        tell_failure(rendezvous, end.exit_code, end.message)
        return end, True
    first, cause = end.lost.ranks[0], end.lost.cause
    try:
        rendezvous.put(_lost(part.task.rank), json.dumps(asdict(end.lost)))
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            failure = rendezvous.failure()
            if failure is not None:
                return Outcome(failure.exit_code, str(failure)), False
            time.sleep(POLL_SECONDS)
        first = root_cause(end.lost, _failures(rendezvous, part.launch.size))
    except DlrmError:  # the store is no longer served
        first = 0 if part.launch.rank_0_serves else first
    if first not in end.lost.ranks:
        lost = end.lost.ranks[0]
        cause = f"{part.topology.name(lost)} (rank {lost}) left because of it"
    message = f"{part.topology.name(first)} (rank {first}) is gone: {cause}"
    return replace(end, message=message), True


def silent(rendezvous: Rendezvous, size: int) -> set[int]:
    """Processes whose ranks others miss and that report missing nobody: they have likely died."""
    failures = _failures(rendezvous, size)
    missed = {rank for one in failures.values() for rank in one.ranks} - failures.keys()
    return {_machine(rendezvous, rank).get("process", rank) for rank in missed}


def _failures(rendezvous: Rendezvous, size: int) -> dict[int, PeerFailure]:
    """Reports of ranks about others that they miss, by rank."""
    texts = {rank: rendezvous.read(_lost(rank)) for rank in range(size)}
    return {rank: PeerFailure.from_values(json.loads(text)) for rank, text in texts.items() if text}


def _close(part: Part, end: Outcome, told: list[Event], view: TrainingView) -> int:
    """Finish as the leader: collect all ranks' counters, write the summary, show the result."""
    request, rendezvous = part.request, part.rendezvous
    if end.exit_code == ExitCode.DONE:
        others = [rank for rank in range(part.launch.size) if rank != part.task.rank]
        seconds = request.config.network.patience_seconds
        told += [from_json(rendezvous.wait(_told(rank), seconds)) for rank in others]
        told.sort(key=lambda event: event.values["rank"])
        run_folder.append_events(request.folder, told)
    close(request, Path(part.task.prepared), end, _cores(part), view)
    return ExitCode.DONE


def _cores(part: Part) -> int:
    """Number of cores of all machines of the run, as far as their ranks have joined."""
    cores: dict[str, int] = {}
    with suppress(DlrmError):
        for rank in range(part.launch.size):
            if machine := _machine(part.rendezvous, rank):
                cores[machine["node"]] = machine["cores"]
    return sum(cores.values()) or len(os.sched_getaffinity(0))


def _machine(rendezvous: Rendezvous, rank: int) -> dict[str, Any]:
    """What a rank has said of its machine; nothing if it has not joined."""
    return json.loads(rendezvous.read(f"machine-{rank}.json") or "{}")


def _lost(rank: int) -> str:
    return f"lost-{rank}.json"


def _told(rank: int) -> str:
    return f"told-{rank}.json"


@contextmanager
def _logged(rank: Rank) -> Generator[None, None, None]:
    """Redirect output to the rank's log, except that of a display made before."""
    rank.log_folder.mkdir(parents=True, exist_ok=True)
    log_losses(rank.log_folder / TERMINAL_LOG)
    saved = [os.dup(number) for number in (1, 2)]
    # The program's display is not touched: it has its own descriptors.
    with redirect_stdout(sys.__stdout__), redirect_stderr(sys.__stderr__):
        write_log(rank)
        try:
            yield
        finally:
            flush_log()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
