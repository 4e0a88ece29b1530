"""A rank that a launcher has started: no parent listens to it, so it says itself how it ended.

What it has counted goes to the leader through the store. The leader (`build.leader`) shows the run
in its terminal, keeps the record and writes the summary.
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
from typing import final

from dlrm_hybrid.comm.rendezvous import Rendezvous
from dlrm_hybrid.output import TERMINAL_LOG, log_losses
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import TrainingView
from dlrm_hybrid.run.launch.environment import Launch
from dlrm_hybrid.run.rank.main import be_rank
from dlrm_hybrid.run.rank.process import (
    Ending,
    PeerFailure,
    Rank,
    ending,
    flush_log,
    root_cause,
    write_log,
)
from dlrm_hybrid.run.request import Request, TrainTask
from dlrm_hybrid.run.supervisor import GRACE_SECONDS, TOGETHER, Outcome
from dlrm_hybrid.run.training import close
from dlrm_hybrid.telemetry.events import Event, Kind, from_json
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import DlrmError, ExitCode, RunFailedError

POLL_SECONDS = 0.02
# A restart by the launcher would end in the same way.
FOR_GOOD = (ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.DIVERGED, ExitCode.RESOURCES)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank of a run needs to know.

    Attributes:
        launch: its place among the processes.
        request: the run; the network of its configuration is this machine's.
        task: which rank, and where its files are.
        rendezvous: where ranks leave texts for each other.
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
        return self.launch.rank == build.leader(self.request.config)


def take_part(part: Part, view: TrainingView) -> int:
    """Be the rank until the run ends; returns the exit code.

    Args:
        part: what the rank needs to know.
        view: for the events that it reports, and for the result if it leads.

    Raises:
        RunFailedError: it failed, with the message for this rank's standard error.
    """
    rank = Rank(
        index=part.launch.rank,
        name=part.topology.name(part.launch.rank),
        argument="",
        log_folder=part.request.folder / "log",
    )
    machine = {"node": part.launch.node, "cores": len(os.sched_getaffinity(0))}
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
        raise RunFailedError(f"{rank.name} (rank {rank.index}): {end.message}", end.exit_code)
    return end.exit_code


def tell_failure(rendezvous: Rendezvous, exit_code: int, message: str) -> None:
    """Let the other ranks know why the run cannot go on; and those to come, if it never can."""
    with suppress(DlrmError):
        rendezvous.fail(exit_code, message)
        if exit_code in FOR_GOOD:
            rendezvous.for_all_attempts().fail(exit_code, message)


def _train(part: Part, rank: Rank, told: list[Event], view: TrainingView) -> Ending:
    stop = StopRequest()
    stop.install()
    rendezvous = replace(part.rendezvous, check=stop.check)
    with view.live() as show:

        def report(event: Event) -> None:
            if event.kind is Kind.RANK:
                told.append(event)
            show(event)

        request = part.request
        return ending(
            rank,
            lambda: be_rank(
                part.task, request.values, request.config, lambda: rendezvous, report, stop
            ),
        )


def _cause(part: Part, end: Ending) -> tuple[Ending, bool]:
    """Why the run really ended, and whether this rank is the one to say so.

    A rank with a reason of its own tells the others, which only see that it is gone. One that was
    killed tells nothing.
    """
    rendezvous = part.rendezvous
    if end.exit_code == ExitCode.DONE:
        return end, False
    if end.lost is None:
        tell_failure(rendezvous, end.exit_code, end.message)
        return end, True
    first, cause = end.lost.ranks[0], end.lost.cause
    try:
        rendezvous.put(_lost(part.launch.rank), json.dumps(asdict(end.lost)))
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            failure = rendezvous.failure()
            if failure is not None:
                return Ending(failure.exit_code, str(failure)), False
            time.sleep(POLL_SECONDS)
        first = root_cause(end.lost, _failures(rendezvous, part.launch.size))
    except DlrmError:  # the store is gone
        first = 0 if part.launch.rank_0_serves else first
    if first not in end.lost.ranks:
        lost = end.lost.ranks[0]
        cause = f"{part.topology.name(lost)} (rank {lost}) left because of it"
    message = f"{part.topology.name(first)} (rank {first}) is gone: {cause}"
    return replace(end, message=message), True


def silent(rendezvous: Rendezvous, size: int) -> set[int]:
    """Ranks that others miss, and that have not said whom they miss: they are gone, most likely."""
    failures = _failures(rendezvous, size)
    return {rank for one in failures.values() for rank in one.ranks} - failures.keys()


def _failures(rendezvous: Rendezvous, size: int) -> dict[int, PeerFailure]:
    """What ranks have reported of others that they miss, by number."""
    texts = {rank: rendezvous.read(_lost(rank)) for rank in range(size)}
    return {rank: PeerFailure.from_values(json.loads(text)) for rank, text in texts.items() if text}


def _close(part: Part, end: Ending, told: list[Event], view: TrainingView) -> int:
    """The leader's last work: what all ranks have counted, the summary and the result."""
    request, rendezvous = part.request, part.rendezvous
    if end.exit_code == ExitCode.DONE:
        others = [rank for rank in range(part.launch.size) if rank != part.launch.rank]
        seconds = request.config.network.patience_seconds
        told += [from_json(rendezvous.wait(_told(rank), seconds)) for rank in others]
        told.sort(key=lambda event: event.values["rank"])
        run_folder.append_events(request.folder, told)
    outcome, rows = Outcome(end.exit_code, end.message), Path(part.task.prepared)
    close(request, rows, outcome, _cores(part), view)
    return ExitCode.DONE


def _cores(part: Part) -> int:
    """Of all machines of the run, as far as their ranks have come."""
    cores: dict[str, int] = {}
    with suppress(DlrmError):
        for rank in range(part.launch.size):
            text = part.rendezvous.read(f"machine-{rank}.json")
            if text is not None:
                machine = json.loads(text)
                cores[machine["node"]] = machine["cores"]
    return sum(cores.values()) or len(os.sched_getaffinity(0))


def _lost(rank: int) -> str:
    return f"lost-{rank}.json"


def _told(rank: int) -> str:
    return f"told-{rank}.json"


@contextmanager
def _logged(rank: Rank) -> Generator[None, None, None]:
    """Output goes to the rank's log, except that of a display that was made before."""
    rank.log_folder.mkdir(parents=True, exist_ok=True)
    log_losses(rank.log_folder / TERMINAL_LOG)
    saved = [os.dup(number) for number in (1, 2)]
    # What the program prints to is not touched: it has descriptors of its own.
    with redirect_stdout(sys.__stdout__), redirect_stderr(sys.__stderr__):
        write_log(rank)
        try:
            yield
        finally:
            flush_log()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
