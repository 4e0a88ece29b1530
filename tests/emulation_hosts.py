"""What tests of emulated networks do inside their hosts, and see from outside."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.comm.netem.namespaces import enter, find_tool
from dlrm_hybrid.comm.netem.network import EmulatedNetwork
from dlrm_hybrid.types import DlrmError

CHUNK_BYTES = 1 << 18


def able() -> bool:
    """Whether this user may make namespaces here, and shape links in them."""
    return _can_add("tbf rate 1mbit burst 5kb limit 50kb")


def _can_add(qdisc: str) -> bool:
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    with suppress(DlrmError, OSError):
        add = [find_tool("tc"), "qdisc", "add", "dev", "lo", "root", *qdisc.split()]
        return subprocess.run([*unshare, *add], capture_output=True).returncode == 0
    return False


def has_netem() -> bool:
    return _can_add("netem delay 1ms")


needs_namespaces = pytest.mark.skipif(
    not able(), reason="needs iproute2 with tbf, and root or user namespaces"
)


def links() -> str:
    """The links of the machine itself, without their counters."""
    done = subprocess.run([find_tool("ip"), "-json", "addr"], capture_output=True, check=True)
    return json.dumps(json.loads(done.stdout))


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started, directly or not."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def are_gone(processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Whether all have ended within so long; who has not been waited for has."""
    _, alive = psutil.wait_procs(processes, seconds)
    return all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


def network_namespaces(processes: Sequence[psutil.Process]) -> set[str]:
    """All but this process's own that one of them is in, or has a descriptor of.

    The kernel gives the name of one that is gone to the next: so never those of other programs.
    """
    found: set[str] = set()
    for path in (Path(f"/proc/{process.pid}") for process in processes):
        with suppress(OSError):
            descriptors = [one for one in (path / "fd").iterdir() if one.is_symlink()]
            for one in [path / "ns" / "net", *descriptors]:
                with suppress(OSError):
                    found.add(str(one.readlink()))
    own = str(Path("/proc/self/ns/net").readlink())
    return {name for name in found if name.startswith("net:")} - {own}


def inside(network: EmulatedNetwork, host: int, work: Callable[[], None]) -> Thread:
    """A thread, started, that works in a host; the others stay where they are."""

    def run() -> None:
        for path in network.namespaces[host]:
            enter(path)
        work()

    thread = Thread(target=run)
    thread.start()
    return thread


def shaped_bytes(network: EmulatedNetwork) -> list[int]:
    """What each host has received and sent, two numbers for each: every one passes a bucket."""
    counts: list[int] = []

    def count() -> None:
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, values = line.partition(":")
            if name.strip() == "eth0":
                counts.extend(int(values.split()[place]) for place in (0, 8))

    for host in range(network.plan.hosts):
        inside(network, host, count).join()
    return counts


def transfer_seconds(
    network: EmulatedNetwork, ways: Sequence[tuple[int, int]], num_bytes: int
) -> float:
    """What it takes until so many bytes have gone each way at one time."""
    pairs = [_connected(network, *way) for way in ways]
    start = time.perf_counter()
    threads = [
        thread
        for sender, receiver in pairs
        for thread in (
            Thread(target=sender.sendall, args=(bytes(num_bytes),)),
            Thread(target=_take, args=(receiver, num_bytes)),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    for pair in pairs:
        for one in pair:
            one.close()
    return time.perf_counter() - start


def _connected(
    network: EmulatedNetwork, sender: int, receiver: int
) -> tuple[socket.socket, socket.socket]:
    made: dict[str, socket.socket] = {}

    def listen() -> None:
        made["listener"] = socket.create_server((str(network.plan.address(receiver)), 0))

    def connect() -> None:
        made["sender"] = socket.create_connection(made["listener"].getsockname(), HANG_SECONDS)

    inside(network, receiver, listen).join()
    inside(network, sender, connect).join()
    with made["listener"] as listener:
        far, _ = listener.accept()
    return made["sender"], far


def _take(connection: socket.socket, num_bytes: int) -> None:
    connection.settimeout(HANG_SECONDS)
    while num_bytes:
        num_bytes -= len(connection.recv(min(num_bytes, CHUNK_BYTES)))
