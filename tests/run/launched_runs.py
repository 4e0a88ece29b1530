"""Starts the processes of a run as SLURM would, or torchrun on two machines of one kernel."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port
from patience import HANG_SECONDS

POLL_SECONDS = 0.02
WORLD = ("parallel=hybrid", "parallel.cuts=[bottom.1]")
SIZE = 5
LAUNCHER_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    text: str


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what a launcher may have set around the tests."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCHER_KEYS and not key.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    return {**kept, **changes}


def program(*arguments: str) -> list[str]:
    return ["-m", "dlrm_hybrid", "train", *arguments]


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run at one time; those still there at the end are killed."""
    processes = [
        subprocess.Popen(
            command,
            env=environment(changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, changes in zip(commands, environments, strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """Wait for all of them."""
    texts = [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]
    return [Ended(one.returncode, text) for one, text in zip(processes, texts, strict=True)]


def slurm(size: int, *arguments: str, **changes: str) -> list[tuple[list[str], dict[str, str]]]:
    """What `srun` on one machine would start."""
    port = free_port()
    return [
        (
            [sys.executable, *program(*arguments)],
            {
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(size),
                "SLURM_LOCALID": str(rank),
                "MASTER_PORT": str(port),
                **changes,
            },
        )
        for rank in range(size)
    ]


def await_training(folder: Path, alive: Callable[[], bool]) -> dict[str, int]:
    """Process ids of all ranks by name, once the first step is on record."""
    until = time.monotonic() + HANG_SECONDS
    events = folder / "events.jsonl"
    while time.monotonic() < until and alive():
        if events.exists() and '"kind": "progress"' in events.read_text():
            return {path.stem: int(path.read_text()) for path in folder.glob("log/*.pid")}
        time.sleep(POLL_SECONDS)
    raise AssertionError("training did not begin")


@contextmanager
def two_machines() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by one cable; yields what to put before a command in each.

    They have no names, so the kernel takes them away with the processes that hold them.
    """
    holders = [
        subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep 600"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
        inside = [["nsenter", f"--target={one.pid}", "--net"] for one in holders]
        peer = f"ip link add eth0 type veth peer name eth0 netns {holders[1].pid}"
        subprocess.run([*inside[0], *peer.split()], check=True)
        for number, enter in enumerate(inside, 1):
            for text in (f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up"):
                subprocess.run([*enter, "ip", *text.split()], check=True)
        yield inside
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
