"""Two launchers on two machines: network namespaces of this one, joined by a cable."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

import psutil
import pytest
from launched_runs import (
    SIZE,
    WORLD,
    Ended,
    await_training,
    ended,
    program,
    started,
    two_machines,
)
from struck_program import STRUCK
from world_faults import Fault, await_stop
from world_runs import Train, assert_same, summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

PER_MACHINE = (3, 2)
PORT = 29_400  # in namespaces of our own every port is free
LISTENS = "0A"  # in /proc/net/tcp


def able() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not able(), reason="needs root, iproute2 and network namespaces"),
]


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    with two_machines() as inside:
        yield inside


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.json"
    assert run(["dlrm_hybrid", "doctor", "doctor.action=keys", f"doctor.output={path}"]) == 0
    return f"network.keys={path}"


def launchers(
    machines: Sequence[Sequence[str]],
    per_machine: Sequence[int],
    arguments: Sequence[str],
    restarts: int = 0,
) -> list[list[str]]:
    """The commands; `{own}` in an argument is a machine's own address."""
    commands: list[list[str]] = []
    for number, (inside, count) in enumerate(zip(machines, per_machine, strict=True), 1):
        own = f"10.77.0.{number}"
        options = (
            f"--nnodes=2 --nproc-per-node={count} --rdzv-backend=c10d --rdzv-id=test "
            f"--rdzv-endpoint=10.77.0.1:{PORT} --rdzv-conf=is_host={number == 1} "
            f"--local-addr={own} --monitor-interval=0.1 --max-restarts={restarts}"
        )
        given = [argument.format(own=own) for argument in arguments]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split()]
        commands.append([*inside, *torchrun, *STRUCK, "train", *given])
    return commands


def launch(
    machines: Sequence[Sequence[str]], per_machine: Sequence[int], *arguments: str
) -> list[Ended]:
    with started(launchers(machines, per_machine, arguments), [{}, {}]) as processes:
        return ended(processes)


def pids_of(folder: Path) -> dict[str, int]:
    return {path.stem: int(path.read_text()) for path in folder.glob("log/*.pid")}


def home_of(pid: int) -> str:
    """The network of a process, which is its machine's."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def listens_on(pid: int) -> set[str]:
    """Addresses, found in the network of the process itself."""
    held: set[str] = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            held.add(str(one.readlink()))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in held:
                address = bytes.fromhex(local.partition(":")[0])[::-1]
                found.add(str(IPv4Address(address)) if table == "tcp" else address.hex())
    return found


@pytest.mark.parametrize("bind", ["10.77.0.0/24", "{own}"])
def test_two_machines_learn_the_same_as_one(
    bind: str,
    machines: list[list[str]],
    keys: str,
    train: Train,
    small_rows: list[str],
    tmp_path: Path,
) -> None:
    steps = ("train.steps=20", "checkpoint.every=20")
    folder = tmp_path / "two"
    arguments = (*WORLD, *steps, keys, f"network.bind={bind}", f"hydra.run.dir={folder}")
    both = launch(machines, PER_MACHINE, *small_rows, *arguments)
    assert [one.code for one in both] == [0, 0], both
    code, plain = train("one", *WORLD, *steps)
    assert code == 0
    assert_same(folder, plain, 20)
    told, expected = summary(folder), summary(plain)
    assert told["network"]["by_class"] == expected["network"]["by_class"]
    assert told["roles"].keys() == expected["roles"].keys()
    assert sum("Bayes optimum" in one.text for one in both) == 1


def test_a_killed_rank_ends_both_launchers_and_is_named(
    machines: list[list[str]], keys: str, small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ("train.epochs=1000", "telemetry.every=10", "network.bind=10.77.0.0/24", keys)
    arguments = (*small_rows, *WORLD, *more, f"hydra.run.dir={folder}")
    with started(launchers(machines, PER_MACHINE, arguments), [{}, {}]) as processes:
        pids = await_training(folder, lambda: all(one.poll() is None for one in processes))
        assert len(pids) == SIZE
        listening = {(name, ip) for name, pid in pids.items() for ip in listens_on(pid)}
        os.kill(pids["server-0"], signal.SIGKILL)
        both = ended(processes)
    assert {name for name, _ in listening} == set(pids)
    assert {address for _, address in listening} == {"10.77.0.1", "10.77.0.2"}
    assert [one.code for one in both] == [1, 1]
    for one in both:
        assert "server-0 (rank 4) is gone: " in one.text
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.parametrize("has_servers", [False, True])
def test_each_of_two_machines_holds_a_trainer_and_starts_again(
    has_servers: bool, machines: list[list[str]], keys: str, small_rows: list[str], tmp_path: Path
) -> None:
    """As the program says it is started: one machine's ranks are killed, and the run goes on."""
    folder, each = tmp_path / "run", 1 + has_servers
    steps = ("train.epochs=9", "train.steps=100", "checkpoint.every=20", "telemetry.every=10")
    world = ("+experiment=dp_levels", "parallel.machines=2")
    world += ("parallel.servers=2",) if has_servers else ()
    arguments = (*small_rows, *world, *steps, "network.bind=10.77.0.0/24", keys)
    commands = launchers(
        machines, (each, each), (*arguments, f"hydra.run.dir={folder}"), restarts=1
    )
    Fault(rank=1, step=50, signal="SIGSTOP").plan(folder)
    with started(commands, [{}, {}]) as processes:
        await_stop(folder, "worker-1.0")
        pids = pids_of(folder)
        homes = {name: home_of(pid) for name, pid in pids.items()}
        lost = [name for name, home in homes.items() if home == homes["worker-1.0"]]
        for name in lost:
            os.kill(pids[name], signal.SIGKILL)
        both = ended(processes)
    assert homes["worker-0.0"] != homes["worker-1.0"]
    assert homes.get("server-0", homes["worker-0.0"]) == homes["worker-0.0"]
    assert sorted(lost) == ["server-1", "worker-1.0"][not has_servers :]
    assert [one.code for one in both] == [0, 0], both
    assert summary(folder)["status"] == "complete"
    begun = [one.step for one in events.read(folder / "events.jsonl") if one.kind is Kind.STARTED]
    assert begun in ([0, 20], [0, 40])


def test_one_process_of_torchrun_is_a_plain_run(small_rows: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    given = (*small_rows, "train.steps=5", f"hydra.run.dir={tmp_path / 'run'}")
    with started([[*torchrun, *program(*given)]], [{}]) as processes:
        (alone,) = ended(processes)
    assert alone.code == 0, alone
    assert summary(tmp_path / "run")["steps"] == 5
