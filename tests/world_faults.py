"""A world's ranks of which some suffer faults in the middle of chosen steps; named by tests.

Or whose workers compute on a device, for which the CPU stands.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from patience import HANG_SECONDS

from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.parallel.topology import Topology, WorkerRole
from dlrm_hybrid.run.assembly import world
from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.wire.frame import Frame, Kind

POLL_SECONDS = 0.02
ENTRY = "world_faults:struck_world_rank"
ON_A_DEVICE = "world_faults:world_rank_on_a_device"
# Of the training step; the numbers of all others are no steps.
STEP_KINDS = set(Kind) - {kind for kind in Kind if kind >= Kind.REPORT}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank, or at its hands.

    Attributes:
        rank: that strikes.
        step: of the first frame that counts; in an evaluation the number of the test batch.
        sends: how many frames of that step and later ones it sends before.
        evaluating: strike in an evaluation, not in a step.
        supervisor: strike the supervisor, not itself.
        signal: name of the signal.
        held: ranks that send nothing of later steps before those of the struck trainer that comes
            again, so many, have gone on: a short run would be over before.
        returning: how many.
    """

    rank: int
    step: int
    sends: int = 0
    evaluating: bool = False
    supervisor: bool = False
    signal: str = "SIGKILL"
    held: Sequence[int] = ()
    returning: int = 0

    def plan(self, run_folder: Path) -> None:
        """Let it happen in the next run in this folder, once."""
        plan(run_folder, self)


def plan(run_folder: Path, *faults: Fault) -> None:
    """Let these happen in the next attempts in this folder, one in each."""
    _plan_file(run_folder).write_text(json.dumps([asdict(fault) for fault in faults]))


def planned(run_folder: Path) -> list[Fault]:
    """What has not happened yet."""
    path = _plan_file(run_folder)
    return [Fault(**values) for values in json.loads(path.read_text())] if path.exists() else []


@dataclass(frozen=True)
class Struck:
    """What there was when the fault struck.

    Attributes:
        time: of the clock on the wall.
        pids: of all processes below the supervisor.
        sockets: on which they listened: their ports by their numbers. A port alone may be
            another program's soon.
    """

    time: float
    pids: list[int]
    sockets: dict[str, int]


def struck(run_folder: Path) -> Struck:
    """What the rank wrote down before it last struck; FileNotFoundError if none did."""
    return all_struck(run_folder)[-1]


def listening() -> dict[str, int]:
    """Ports that programs of this machine listen on, by the sockets' numbers."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def all_struck(run_folder: Path) -> list[Struck]:
    """The same for each fault that happened."""
    lines = _struck_file(run_folder).read_text().splitlines()
    return [Struck(**json.loads(line)) for line in lines]


def struck_world_rank(argument: str, report, stop: StopRequest) -> None:
    """Be a rank of a world, with the fault planned for it."""
    task = json.loads(argument)
    await_fault(Path(task["run_folder"]), task["rank"])
    train_rank(argument, report, stop)


def await_fault(folder: Path, rank: int) -> None:
    """Let this process, which will be a rank, suffer what is planned for it."""
    for fault in planned(folder)[:1]:
        if fault.rank == rank:
            _evaluation(fault, folder) if fault.evaluating else _sending(fault, folder)
        elif rank in fault.held:
            _holding(fault, folder)


def await_stop(run_folder: Path, role: str) -> int:
    """The id of a rank that stops itself, so that the run cannot go on meanwhile."""
    path, until = run_folder / "log" / f"{role}.pid", time.monotonic() + HANG_SECONDS
    while time.monotonic() < until:
        text = path.read_text() if path.exists() else ""
        if text and psutil.Process(int(text)).status() == psutil.STATUS_STOPPED:
            return int(text)
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"{role} did not come to its step")


def world_rank_on_a_device(argument: str, report, stop: StopRequest) -> None:
    """Be a rank of a world; a worker computes on a device."""
    world.placement = _apart
    train_rank(argument, report, stop)


def _apart(config: Config, topology: Topology, rank: int) -> Placement:
    """The CPU in the place of each worker's device, for `world.placement`."""
    is_worker = isinstance(topology.role(rank), WorkerRole)
    return Placement(torch.device("cpu"), is_apart=True) if is_worker else HOST


def _sending(fault: Fault, folder: Path) -> None:
    send, counted = MeteredChannel.send, []

    def strike_then_send(channel: MeteredChannel, to: int, frame: Frame, *rest: int) -> None:
        if frame.kind in STEP_KINDS and frame.number >= fault.step:
            counted.append(to)
            if len(counted) == fault.sends + 1:
                _strike(fault, folder)
        send(channel, to, frame, *rest)

    MeteredChannel.send = strike_then_send


def _holding(fault: Fault, folder: Path) -> None:
    send = MeteredChannel.send

    def wait_then_send(channel: MeteredChannel, to: int, frame: Frame, *rest: int) -> None:
        if frame.kind in STEP_KINDS and frame.number > fault.step:
            until = time.monotonic() + HANG_SECONDS
            while _returned(folder) < fault.returning and time.monotonic() < until:
                time.sleep(0.002)
        send(channel, to, frame, *rest)

    MeteredChannel.send = wait_then_send


def _returned(folder: Path) -> int:
    """How many ranks that were started again have said that they go on."""
    logs = [path.read_text() for path in folder.glob("log/worker-*.log")]
    return sum("goes on at batch" in log for log in logs)


def _evaluation(fault: Fault, folder: Path) -> None:
    predict = WorkerRank.predict

    def strike_then_predict(evaluation: WorkerRank, number: int, *rest: object) -> object:
        if number == fault.step and fault in planned(folder):
            _strike(fault, folder)
        return predict(evaluation, number, *rest)

    WorkerRank.predict = strike_then_predict


def _strike(fault: Fault, folder: Path) -> None:
    plan(folder, *planned(folder)[1:])
    supervisor = psutil.Process(os.getppid()).parent()
    family = supervisor.children(recursive=True)
    own = {one for pid in folder.glob("log/*.pid") for one in _sockets(int(pid.read_text()))}
    sockets = {number: port for number, port in listening().items() if number in own}
    found = Struck(time.time(), [process.pid for process in family], sockets)
    with _struck_file(folder).open("a") as file:
        file.write(json.dumps(asdict(found)) + "\n")
    victim = supervisor.pid if fault.supervisor else os.getpid()
    os.kill(victim, signal.Signals[fault.signal])


def _sockets(pid: int) -> Iterator[str]:
    """Numbers of those that a process has open."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                yield found[1]


def _plan_file(run_folder: Path) -> Path:
    """Beside the run folder, which must be empty at the start."""
    return run_folder.with_name(f"{run_folder.name}.fault.json")


def _struck_file(run_folder: Path) -> Path:
    return run_folder.with_name(f"{run_folder.name}.struck.json")
