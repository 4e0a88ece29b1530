"""The verb `train` in a process started by torchrun or SLURM: one rank of a world.

Rank 0 composes the configuration, claims the run folder and prepares the rows; the others wait for
its announcement. Then each runs its rank; see `rank.take_part`.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint.folder import lost_latest, saved_step
from dlrm_hybrid.comm.rendezvous import Rendezvous, reach_store, serve_store
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.outside import load_typed
from dlrm_hybrid.config.overrides import override_fault, override_text, read_override
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.disk import RUN_FOLDER_KEY, refusals
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display, TrainingView
from dlrm_hybrid.run.launch.environment import Launch
from dlrm_hybrid.run.launch.rank import Part, silent, take_part, tell_failure
from dlrm_hybrid.run.launch.rules import check_versions, check_world, own_rank, own_versions
from dlrm_hybrid.run.readiness import no_empty_folder, ready_rows
from dlrm_hybrid.run.request import Arguments, Request, TrainTask
from dlrm_hybrid.run.rows import Command, prepared_rows
from dlrm_hybrid.types import ConfigError, DataError, DlrmError, ExitCode, RunFailedError

CONNECT_SECONDS = 300.0  # machines of a cluster do not start at one time
PREPARE_SECONDS = 86_400.0  # preparing many rows takes long; deaths are noticed otherwise
LEAVE_SECONDS = 60.0
FAREWELL_SECONDS = 2.0  # for a rank that has most likely died
LATE_SECONDS = 10.0  # for a rank that may not have noticed another's death yet
POLL_SECONDS = 0.02
RUN_FOLDER = "run_folder"
OWN_KEYS = ("network.bind", "network.keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Rank 0's announcement of a run to the other ranks, which use it as it stands.

    Attributes:
        values: configuration of the run.
        overrides: as they stood on rank 0's command line.
        run_folder: that of the run.
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


def run(launch: Launch, arguments: Arguments, display: Display, view: TrainingView) -> int:
    """Run one of several processes of a run; returns its exit code.

    Args:
        launch: the place of this process among them.
        arguments: those after the verb. Rank 0's are the run's; of the others' only
            `network.bind` and `network.keys` count, each for its own machine.
        display: for all before training; a quiet one except on rank 0.
        view: that of the run, for the leader.

    Raises:
        DlrmError: the run failed, for a reason not reported on this machine yet.
    """
    die_with_parent(os.getppid())
    gc.freeze()  # imported objects stay: collecting them at the end took 1 s of CPU
    try:
        rendezvous = open_rendezvous(launch)
    except RunFailedError as error:  # rank 0 failed before this rank joined
        return _heard(launch, error)
    patience_seconds = LEAVE_SECONDS
    lock = ExitStack()
    try:
        try:
            with refusals():
                part = _prepared(launch, arguments, rendezvous, lock, display)
        except RunFailedError as error:
            return _heard(launch, error)
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


def _heard(launch: Launch, failure: RunFailedError) -> int:
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
    theirs = json.loads(rendezvous.wait("job.json", CONNECT_SECONDS))
    if theirs != mine:
        found = f"{_job_name(theirs['job'])} with {theirs['size']} processes uses this port"
    elif not rendezvous.put(f"member-{launch.rank}.json", secrets.token_hex(8)):
        found = f"another rank {launch.rank} has already joined"
    else:
        return
    raise ConfigError(
        f"MASTER_ADDR = {launch.host}, MASTER_PORT = {launch.port}: this is rank {launch.rank} of "
        f"{launch.size} of {_job_name(launch.job)}, but {found}; give each job its own port"
    )


def _job_name(job: str) -> str:
    return f"job {job}" if job else "a job without a name"


def _prepared(
    launch: Launch, arguments: Arguments, rendezvous: Rendezvous, lock: ExitStack, display: Display
) -> Part | None:
    """Make this rank's preparations, rank 0 under `lock`; None if there is nothing to do."""
    hopeless = rendezvous.for_all_attempts().failure()
    if hopeless is not None:
        raise hopeless
    _compare_versions(launch, rendezvous)
    if launch.rank == 0:
        announced = _announce(launch, arguments, display, rendezvous.for_all_attempts(), lock)
        text = "null" if announced is None else json.dumps(asdict(announced))
        rendezvous.put("announcement.json", text)
    text = rendezvous.wait("announcement.json", PREPARE_SECONDS)
    if text == "null":
        return None
    announced = Announcement(**json.loads(text))
    load_typed(arguments.overrides)
    config = own_network(validate(announced.values), arguments.overrides)
    rank = own_rank(config, launch, announced.overrides)
    rows = _same_rows(launch, announced, config, display, rendezvous)
    task = TrainTask(
        run_folder=announced.run_folder,
        prepared=str(rows),
        resume_from=announced.resume_from,
        rank=rank,
        attempt=announced.attempt,
        rendezvous=str(rendezvous),
    )
    folder, overrides = Path(announced.run_folder), tuple(announced.overrides)
    request = Request(config, announced.values, folder, overrides)
    return Part(launch=launch, request=request, task=task, rendezvous=rendezvous)


def _compare_versions(launch: Launch, rendezvous: Rendezvous) -> None:
    """Refuse to train with a rank 0 of another program or other libraries."""
    own = own_versions()
    if launch.rank == 0:
        rendezvous.put("versions.json", json.dumps(own))
    check_versions(launch.rank, own, json.loads(rendezvous.wait("versions.json", CONNECT_SECONDS)))


def _announce(
    launch: Launch, arguments: Arguments, display: Display, job: Rendezvous, lock: ExitStack
) -> Announcement | None:
    """Make rank 0's preparations under `lock`; None if only help was asked for, or all is done."""
    folder = job.read(RUN_FOLDER)
    own = [] if folder is None else [override_text(RUN_FOLDER_KEY, folder)]
    request = _composed(arguments, own)
    if request is None:
        return None
    check_world(request.config, launch, request.overrides)
    lock.enter_context(no_empty_folder(request.folder))
    lock.enter_context(run_folder.one_run(request.folder))
    if own and run_folder.is_complete(request):
        return None
    request = run_folder.with_base(request)
    resume_from = run_folder.claim(request, is_restart=bool(own))
    rows = ready_rows(request, resume_from, display)
    run_folder.write_facts(request, rows)
    job.put(RUN_FOLDER, str(request.folder))
    if lost := lost_latest(request.folder):
        display.line(lost)
    if own:
        step = saved_step(resume_from)
        display.line(f"restart {launch.restarts} by the launcher, from step {step:,}")
    display.line(f"run folder {request.folder}")
    run_folder.tell_start(request, resume_from, display.line)
    return Announcement(
        values=request.values,
        overrides=request.overrides,
        run_folder=str(request.folder),
        resume_from=None if resume_from is None else str(resume_from.absolute()),
        attempt=max(launch.restarts, run_folder.attempts(request.folder)),
        rows=open_shards(rows, build.semantics(request.config)).manifest.identity,
    )


def _composed(arguments: Arguments, own: Sequence[str]) -> Request | None:
    """Compose the command line's run; None if it only asks to show the configuration."""
    if arguments.is_sweep:
        raise ConfigError("-m: a launcher starts the processes of one run, not of a sweep")
    overrides = [*arguments.overrides, *own]
    job = compose.job_of(overrides, arguments.faults)
    if arguments.cfg is not None:
        print(compose.shown(overrides, arguments.cfg, arguments.package, arguments.resolve), end="")
        return None
    return Request(validate(job.values), job.values, job.folder, job.overrides)


def own_network(config: Config, overrides: Sequence[str]) -> Config:
    """The run's configuration, with this machine's own network keys.

    Raises:
        ConfigError: an override is malformed.
    """
    own = [text for text in overrides if text.partition("=")[0] in OWN_KEYS]
    if faults := [fault for text in own if (fault := override_fault(text))]:
        raise ConfigError(faults_text(faults))
    given = dict(read_override(text) for text in own)
    changes = {key.partition(".")[2]: value and str(value) for key, value in given.items()}
    return replace(config, network=replace(config.network, **changes))


def _same_rows(
    launch: Launch,
    announced: Announcement,
    config: Config,
    display: Display,
    rendezvous: Rendezvous,
) -> Path:
    """Find the prepared rows on this machine; its first rank prepares missing ones."""
    name = f"rows-{launch.node}.json"
    rows = build.prepared_folder(config)
    if launch.local_rank == 0:
        rows = prepared_rows(config, display, Command("train", announced.overrides))
        rendezvous.put(name, json.dumps(str(rows)))
    rendezvous.wait(name, PREPARE_SECONDS)
    found = open_shards(rows, build.semantics(config)).manifest.identity
    if found != list(announced.rows):
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
