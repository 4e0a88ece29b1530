"""Attacks at the sockets of a run: strangers, ranks of other versions, another job's port."""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

import dlrm_hybrid

from .base import SMALL, Attack, Ended, expect, members, start, wait
from .signals import WORLD, Phase, await_phase, starts_ranks, trains

STRANGERS = 1500
FEW_FILES = 1024
SIZE = 3
RUN = (*SMALL, *WORLD, "train.epochs=20", "train.steps=300", "telemetry.every=5")
ENDLESS = ("train.epochs=9999", "train.steps=900000")


def _silent_strangers(folder: Path, phase: Phase) -> str:
    """Open connections to each port that a rank listens on, and say nothing."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    program = start(["train", *RUN, "hydra.run.dir=run"], folder)
    few = (FEW_FILES, FEW_FILES)
    resource.prlimit(program.pid, resource.RLIMIT_NOFILE, few)
    await_phase(phase, program, folder)
    connections: list[socket.socket] = []
    seen: set[int] = set()
    while program.poll() is None and len(seen) < SIZE:
        for port in _ports(program.pid) - seen:
            seen.add(port)
            connections += [_connection(port) for _ in range(STRANGERS)]
    ended = wait(program, folder)
    for one in connections:
        one.close()
    expect(len(seen) > 0, "no port was found")
    expect(ended.code == 0, f"exit code {ended.code}: {ended.errors[-300:]}")
    return f"complete, {len(connections):,} connections to {len(seen)} ports"


def _ports(session: int) -> set[int]:
    found: set[int] = set()
    for one in members(session):
        with suppress(psutil.Error):
            listening = one.net_connections("inet")
            found |= {at.laddr.port for at in listening if at.status == psutil.CONN_LISTEN}
    return found


def _connection(port: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    with suppress(BlockingIOError):
        one.connect(("127.0.0.1", port))
    return one


def _job(
    folder: Path,
    port: int,
    name: str,
    job: str,
    more: Sequence[str] = (),
    packages: Mapping[int, Path] | None = None,
) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start the ranks of a job, as SLURM would; some of them with a package of their own."""
    ranks: list[tuple[subprocess.Popen[bytes], Path]] = []
    for rank in range(SIZE):
        cwd = (packages or {}).get(rank, folder / f"{name}-{rank}")
        cwd.mkdir(exist_ok=True)
        environ = {
            "SLURM_JOB_ID": job,
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(SIZE),
            "MASTER_PORT": str(port),
        }
        rows = f"data.prepared={folder / 'rows'}"
        run = f"hydra.run.dir={folder / name}"
        ranks.append((start(["train", *RUN, rows, run, *more], cwd, environ), cwd))
    return ranks


def _ends(ranks: list[tuple[subprocess.Popen[bytes], Path]]) -> list[Ended]:
    return [wait(program, cwd) for program, cwd in ranks]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def _one_port(folder: Path) -> str:
    port = _free_port()
    first = _job(folder, port, "run", "1001", ENDLESS)
    await_phase(trains, first[0][0], folder)
    second = _ends(_job(folder, port, "second", "1002"))
    for program, _ in first:
        program.terminate()  # it has more steps than anybody waits for
    ends = _ends(first)
    expect([one.code for one in second] == [5, 2, 2], f"second job: {[e.code for e in second]}")
    expect(all(f"MASTER_PORT = {port}" in one.errors for one in second), second[1].errors)
    codes = [one.code for one in ends]
    expect(codes[0] == 75 and set(codes) <= {0, 75}, f"first job: {codes}")
    return second[1].errors.strip()


def _other_version(folder: Path) -> str:
    other = folder / "other"
    package = other / "dlrm_hybrid"
    shutil.copytree(Path(dlrm_hybrid.__file__).parent, package)
    with (package / "types.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    ends = _ends(_job(folder, _free_port(), "run", "1003", packages={2: other}))
    expect([one.code for one in ends] == [2] * SIZE, f"{[one.code for one in ends]}")
    said = ends[2].errors.strip()
    expect("rank 2 on " in said and "has dlrm_hybrid " in said, said)
    return said


ATTACKS = (
    *(
        Attack(
            f"silent-strangers-{phase.__name__}",
            f"exit 0 under {FEW_FILES:,} open files",
            partial(_silent_strangers, phase=phase),
        )
        for phase in (starts_ranks, trains)
    ),
    Attack("two-jobs-one-port", "the second ends with 5, 2, 2; the first goes on", _one_port),
    Attack("ranks-of-other-versions", "exit 2, both versions and the rank named", _other_version),
)
