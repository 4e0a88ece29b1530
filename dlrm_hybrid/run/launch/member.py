"""The verb `train` in a process started by torchrun or SLURM: one rank of a world.

Rank 0 composes the configuration, claims the run folder and prepares the rows; the others wait for
its announcement. Then each runs its rank. No parent listens to it, so it reports its own end; its
counters go to the leader (`build.leader`) through the store. The leader shows the run in its
terminal, keeps the record and writes the summary.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.checkpoint.folder import lost_latest, saved_step
from dlrm_hybrid.comm.rendezvous import Rendezvous, reach_store, serve_store
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.outside import GROUPS, load_chosen, load_typed
from dlrm_hybrid.config.overrides import override_fault, override_text, read_override
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.disk import RUN_FOLDER_KEY, refusals
from dlrm_hybrid.output import TERMINAL_LOG, log_losses
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display, TrainingView
from dlrm_hybrid.run.launch.environment import Launch
from dlrm_hybrid.run.launch.rules import (
    check_versions,
    check_world,
    in_plain_text,
    own_rank,
    own_versions,
)
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
from dlrm_hybrid.run.readiness import no_empty_folder, ready_rows, require_memory
from dlrm_hybrid.run.request import Arguments, Request, TrainTask
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.run.supervisor import GRACE_SECONDS, TOGETHER
from dlrm_hybrid.run.training import close
from dlrm_hybrid.telemetry.events import Event, Kind, from_json
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import ConfigError, DataError, DlrmError, ExitCode, RunFailedError, printable

CONNECT_SECONDS = 300.0  # machines of a cluster do not start at one time
PREPARE_SECONDS = 86_400.0  # preparing many rows takes long; deaths are noticed otherwise
LEAVE_SECONDS = 60.0
FAREWELL_SECONDS = 2.0  # for a rank that has most likely died
LATE_SECONDS = 10.0  # for a rank that may not have noticed another's death yet
POLL_SECONDS = 0.02
RUN_FOLDER = "run_folder"
OWN_KEYS = ("network.bind", "network.keys")
# A restart by the launcher would end the same way.
FOR_GOOD = (ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.DIVERGED, ExitCode.RESOURCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Rank 0's announcement of a run to the other ranks, which use it as it stands.

    Attributes:
        values: configuration of the run.
        overrides: those on rank 0's command line.
        run_folder: folder of the run.
        resume_from: run folder or checkpoint to resume from, or None.
        attempt: how often the run has been started before.
        rows: checksums of rank 0's shards.
    """

    values: Mapping[str, Any]
    overrides: Sequence[str]
    run_folder: str
    resume_from: str | None
    attempt: int
    rows: Sequence[str]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's place, request and task in a run.

    Attributes:
        launch: place of the rank among the processes.
        request: the run; the network of its configuration is this machine's.
        task: number of the rank, and paths of its files.
        rendezvous: rendezvous of the ranks.
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


def run(launch: Launch, arguments: Arguments, display: Display, view: TrainingView) -> int:
    """Run one of several processes of a run; returns its exit code.

    Args:
        launch: the place of this process among them.
        arguments: those after the verb. Rank 0's are the run's; of other ranks' arguments only
            `network.bind` and `network.keys` count, each for its own machine.
        display: for all before training; a quiet one except on rank 0.
        view: view of the run, for the leader.

    Raises:
        DlrmError: the run failed, for a reason not reported on this machine yet.
    """
    die_with_parent(os.getppid())
    gc.freeze()  # imported objects stay: collecting them at the end took 1 s of CPU
    rendezvous = open_rendezvous(launch)
    patience_seconds = LEAVE_SECONDS
    lock = ExitStack()
    try:
        try:
            with refusals():
                part = _prepared(launch, arguments, rendezvous, lock, display)
        except RunFailedError as error:
            return _other_failure(launch, error)
        except DlrmError as error:
            tell_failure(rendezvous, error.exit_code, str(error))
            raise
        if part is None:
            return ExitCode.DONE
        patience_seconds = LATE_SECONDS
        code = take_part(part, view)
        patience_seconds = LEAVE_SECONDS
        return code
    finally:
        with lock:  # held until nobody writes to the run folder any more
            _leave(launch, rendezvous, patience_seconds)


def _other_failure(launch: Launch, failure: RunFailedError) -> int:
    """The exit code for another rank's failure; its message is shown once per machine."""
    if launch.local_rank == 0:
        raise failure
    return failure.exit_code


def open_rendezvous(launch: Launch) -> Rendezvous:
    """Open the rendezvous of this start's ranks, which rank 0 may have to serve.

    Raises:
        ConfigError: other machines cannot reach it, or another job uses it.
        ResourceError: it cannot be served.
        DeadlineError: no process serves it in time.
    """
    prefix = f"dlrm_hybrid/{launch.restarts}"
    if launch.serves_store:
        rendezvous = serve_store(launch.host, launch.port, prefix)
        if launch.num_nodes > 1 and socket.gethostbyname(launch.host).startswith("127."):
            raise ConfigError(
                f"MASTER_ADDR = {launch.host}: is loopback on rank 0's machine, which other "
                "machines cannot reach; set it to an address of the network between them"
            )
    else:
        rendezvous = reach_store(launch.host, launch.port, prefix, CONNECT_SECONDS)
    _join(launch, rendezvous)
    return rendezvous


def _join(launch: Launch, rendezvous: Rendezvous) -> None:
    """Join as this rank, without a trace if the store is another job's."""
    mine = {"job": launch.job, "size": launch.size}
    if launch.rank == 0:
        rendezvous.put("job.json", json.dumps(mine))
    # Rank 0 may have failed by now: one that has joined learns it next, and leaves as others do.
    with suppress(RunFailedError):
        rendezvous.wait("job.json", CONNECT_SECONDS)
    theirs = json.loads(rendezvous.read("job.json") or "null")
    if theirs != mine:
        conflict = f"{_job_name(theirs['job'])} with {theirs['size']} processes uses this port"
    elif not rendezvous.put(f"member-{launch.rank}.json", secrets.token_hex(8)):
        conflict = f"another rank {launch.rank} has already joined"
    else:
        return
    raise ConfigError(
        f"MASTER_ADDR = {launch.host}, MASTER_PORT = {launch.port}: this is rank {launch.rank} of "
        f"{launch.size} of {_job_name(launch.job)}, but {conflict}; give each job its own port"
    )


def _job_name(job: str) -> str:
    return f"job {job}" if job else "a job without a name"


def _prepared(
    launch: Launch, arguments: Arguments, rendezvous: Rendezvous, lock: ExitStack, display: Display
) -> Part | None:
    """Make this rank's preparations, rank 0 under `lock`; None if there is nothing to do."""
    failure = rendezvous.for_all_attempts().failure()
    if failure is not None:
        raise failure
    _compare_versions(launch, rendezvous)
    if launch.rank == 0:
        announcement = _announce(launch, arguments, display, rendezvous.for_all_attempts(), lock)
        text = "null" if announcement is None else json.dumps(asdict(announcement))
        rendezvous.put("announcement.json", text)
    text = rendezvous.wait("announcement.json", PREPARE_SECONDS)
    if text == "null":
        return None
    announcement = Announcement(**json.loads(text))
    load_typed(arguments.overrides)
    typed = {text.lstrip("+") for text in arguments.overrides}
    named = {group: f"{group}={announcement.values[group]['name']}" for group in GROUPS}
    load_chosen(announcement.values, [group for group in GROUPS if named[group] in typed])
    config = own_network(validate(announcement.values), arguments.overrides)
    rank = own_rank(config, launch, announcement.overrides)
    rows = _same_rows(launch, announcement, config, display, rendezvous)
    task = TrainTask(
        run_folder=announcement.run_folder,
        prepared=str(rows),
        resume_from=announcement.resume_from,
        rank=rank,
        attempt=announcement.attempt,
        rendezvous=str(rendezvous),
    )
    folder, overrides = Path(announcement.run_folder), tuple(announcement.overrides)
    request = Request(config, announcement.values, folder, overrides)
    return Part(launch=launch, request=request, task=task, rendezvous=rendezvous)


def _compare_versions(launch: Launch, rendezvous: Rendezvous) -> None:
    """Refuse to train with a rank 0 of another program or other libraries."""
    mine = own_versions()
    if launch.rank == 0:
        rendezvous.put("versions.json", json.dumps(mine))
    check_versions(launch.rank, mine, json.loads(rendezvous.wait("versions.json", CONNECT_SECONDS)))


def _announce(
    launch: Launch, arguments: Arguments, display: Display, job: Rendezvous, lock: ExitStack
) -> Announcement | None:
    """Make rank 0's preparations under `lock`; None if the command only shows, or all is done."""
    folder = job.read(RUN_FOLDER)
    restarted = [] if folder is None else [override_text(RUN_FOLDER_KEY, folder)]
    request = _composed(arguments, restarted)
    if request is None:
        return None
    check_world(request.config, launch, request.overrides)
    lock.enter_context(no_empty_folder(request.folder))
    lock.enter_context(run_folder.one_run(request.folder))
    if restarted and run_folder.is_complete(request):
        return None
    request = run_folder.with_base(request)
    resume_from = run_folder.claim(request, is_restart=bool(restarted))
    if lost := lost_latest(request.folder):
        display.line(lost)
    rows = ready_rows(request, resume_from, display)
    shards = open_shards(rows, build.semantics(request.config))
    if launch.num_nodes == 1:
        require_memory(request.config, shards.table_rows)
    run_folder.write_facts(request, rows)
    job.put(RUN_FOLDER, str(request.folder))
    if restarted:
        step = saved_step(resume_from)
        display.line(f"restart {launch.restarts} by the launcher, from step {step:,}")
    run_folder.tell_start(request, resume_from, display.line)
    if exposed := in_plain_text(request.config, launch):
        display.line(exposed)
    return Announcement(
        values=request.values,
        overrides=request.overrides,
        run_folder=str(request.folder),
        resume_from=resume_from and str(resume_from.absolute()),
        attempt=max(launch.restarts, run_folder.attempts(request.folder)),
        rows=shards.manifest.identity,
    )


def _composed(arguments: Arguments, more: Sequence[str]) -> Request | None:
    """Compose the command line's run; None if it only asks to show the configuration."""
    if arguments.is_sweep:
        raise ConfigError("-m: a launcher starts the processes of one run, not of a sweep")
    overrides = [*arguments.overrides, *more]
    job = compose.job_of(overrides, arguments.faults)
    if arguments.cfg is not None:
        print(compose.shown(overrides, arguments.cfg, arguments.package, arguments.resolve), end="")
        return None
    for line in job.dropped:
        print(printable(line), file=sys.stderr)
    return Request(validate(job.values), job.values, job.folder, job.overrides)


def own_network(config: Config, overrides: Sequence[str]) -> Config:
    """The run's configuration, with this machine's own network keys.

    Raises:
        ConfigError: an override is malformed.
    """
    texts = [text for text in overrides if head_of(text) in OWN_KEYS and text[:1] != "~"]
    if faults := [fault for text in texts if (fault := override_fault(text))]:
        raise ConfigError(faults_text(faults))
    values = dict(read_override(text) for text in texts)
    changes = {key.partition(".")[2]: value and str(value) for key, value in values.items()}
    return replace(config, network=replace(config.network, **changes))


def _same_rows(
    launch: Launch,
    announcement: Announcement,
    config: Config,
    display: Display,
    rendezvous: Rendezvous,
) -> Path:
    """Find the prepared rows on this machine; its first rank prepares missing ones."""
    name = f"rows-{launch.node}.json"
    if launch.local_rank == 0:
        prepared = prepared_rows(config, display, Command("train", announcement.overrides))
        rendezvous.put(name, json.dumps(str(prepared)))
    rows = Path(json.loads(rendezvous.wait(name, PREPARE_SECONDS)))
    identity = open_shards(rows, build.semantics(config)).manifest.identity
    if identity != list(announcement.rows):
        raise DataError(
            f"data.prepared = {rows}: the rows on {socket.gethostname()} (rank {launch.rank}) "
            "differ from those of rank 0"
        )
    return rows


def _leave(launch: Launch, rendezvous: Rendezvous, patience_seconds: float) -> None:
    """Leave the run; rank 0 last: it may serve the store, and holds the lock of the run folder.

    Without the store others cannot learn which rank failed first.
    """
    with suppress(DlrmError):
        rendezvous.put(f"left-{launch.rank}.json", "true")
        begun = time.monotonic()
        waiting = set(range(launch.size)) if launch.rank == 0 else set[int]()
        while waiting and time.monotonic() < begun + patience_seconds:
            waiting = {rank for rank in waiting if rendezvous.read(f"left-{rank}.json") is None}
            if time.monotonic() > begun + FAREWELL_SECONDS:
                waiting -= silent(rendezvous, launch.size)
            time.sleep(POLL_SECONDS)


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
    cores = sorted(os.sched_getaffinity(0))
    machine = {"node": part.launch.node, "cores": cores, "process": part.launch.rank}
    part.rendezvous.put(f"machine-{rank.index}.json", json.dumps(machine))
    counters: list[Event] = []
    try:
        with refusals(), _logged(rank):
            end = _train(part, rank, counters, view)
    except DlrmError as error:  # its log cannot be written
        end = Outcome(error.exit_code, str(error))
    end, is_news = _cause(part, end)
    if part.leads:
        return _close(part, end, counters, view)
    if end.exit_code == ExitCode.DONE:
        part.rendezvous.put(_counters_name(rank.index), counters[0].to_json())
    elif is_news and end.exit_code not in TOGETHER:
        raise RunFailedError(f"{rank.title}: {end.message}", end.exit_code)
    return end.exit_code


def tell_failure(rendezvous: Rendezvous, exit_code: int, message: str) -> None:
    """Report to the other ranks why the run failed; to later attempts too if they would fail."""
    with suppress(DlrmError):
        rendezvous.fail(exit_code, message)
        if exit_code in FOR_GOOD:
            rendezvous.for_all_attempts().fail(exit_code, message)


def _train(part: Part, rank: Rank, counters: list[Event], view: TrainingView) -> Outcome:
    stop = StopRequest()
    stop.install()
    rendezvous = replace(part.rendezvous, check=stop.check)
    with view.live() as show:

        def report(event: Event) -> None:
            if event.kind is Kind.RANK:
                counters.append(event)
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
        rendezvous.put(_loss_name(part.task.rank), json.dumps(asdict(end.lost)))
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
    """Processes whose ranks are missed and report missing nobody: they have likely died."""
    failures = _failures(rendezvous, size)
    missed = {rank for failure in failures.values() for rank in failure.ranks} - failures.keys()
    return {_machine(rendezvous, rank).get("process", rank) for rank in missed}


def _failures(rendezvous: Rendezvous, size: int) -> dict[int, PeerFailure]:
    """Reports of ranks about others that they miss, by rank."""
    texts = {rank: rendezvous.read(_loss_name(rank)) for rank in range(size)}
    return {rank: PeerFailure.from_values(json.loads(text)) for rank, text in texts.items() if text}


def _close(part: Part, end: Outcome, counters: list[Event], view: TrainingView) -> int:
    """Finish as the leader: collect all ranks' counters, write the summary, show the result."""
    request, rendezvous = part.request, part.rendezvous
    if end.exit_code == ExitCode.DONE:
        ranks = [rank for rank in range(part.launch.size) if rank != part.task.rank]
        seconds = request.config.network.patience_seconds
        counters += [from_json(rendezvous.wait(_counters_name(rank), seconds)) for rank in ranks]
        counters.sort(key=lambda event: event.values["rank"])
        run_folder.append_events(request.folder, counters)
    program = "torchrun …" if part.launch.size_key == "WORLD_SIZE" else "srun … python"
    close(request, Path(part.task.prepared), end, _cores(part), view, program=program)
    return ExitCode.DONE


def _cores(part: Part) -> int:
    """Number of cores of all machines of the run, as far as their ranks have joined."""
    cores = set[tuple[str, int]]()  # node and core: a launcher may have bound each rank to its own
    with suppress(DlrmError):
        for rank in range(part.launch.size):
            if machine := _machine(part.rendezvous, rank):
                cores |= {(machine["node"], core) for core in machine["cores"]}
    return len(cores or os.sched_getaffinity(0))


def _machine(rendezvous: Rendezvous, rank: int) -> dict[str, Any]:
    """A rank's facts of its machine; empty if it has not joined."""
    return json.loads(rendezvous.read(f"machine-{rank}.json") or "{}")


def _loss_name(rank: int) -> str:
    return f"lost-{rank}.json"


def _counters_name(rank: int) -> str:
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
