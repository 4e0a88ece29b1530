"""The process that makes an emulated network and holds it.

Its descriptors keep the namespaces alive. When it ends, with the process that started it or
before, the kernel takes the bridge and the links away, and each host as soon as no rank is in it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Thread

from dlrm_hybrid.comm.netem import namespaces
from dlrm_hybrid.comm.netem.plan import Plan
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.types import ResourceError

TOOL_SECONDS = 30.0
ECHO_REPEATS = 5
ECHO_PAUSE_SECONDS = 0.005  # the links' buckets are full again
ECHO_PATIENCE_SECONDS = 10.0
CHUNK_BYTES = 1 << 20
# Where these tools are on systems that keep them from the search path of ordinary users.
TOOL_FOLDERS = ("/usr/sbin", "/sbin")


@dataclass(frozen=True, slots=True)
class _Held:
    """Paths under which other processes find the namespaces.

    Attributes:
        user: of users, None if there was no need for one.
        hub: with the bridge.
        hosts: one for each.
    """

    user: str | None
    hub: str
    hosts: tuple[str, ...]


def hold(plan: Plan, connection: Connection, parent: int) -> None:
    """Make the network, say where it is or why not, hold it until the other end is closed.

    The answer is JSON: `hosts`, for each the paths of the namespaces to enter, in this order, and
    `echo_seconds`; or `error`.

    Args:
        plan: of the network.
        connection: to the process that started this one.
        parent: its number.
    """
    die_with_parent(parent)
    try:
        held = _make(plan)
        first = () if held.user is None else (held.user,)
        answer = {
            "hosts": [[*first, host] for host in held.hosts],
            "echo_seconds": _fastest_echo_seconds(
                plan, lambda host: namespaces.enter(held.hosts[host])
            ),
        }
    except ResourceError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"network=emulated: {error}"}
    with suppress(EOFError, OSError):
        connection.send_bytes(json.dumps(answer).encode())
        connection.recv_bytes()


def find_tool(name: str) -> str:
    """Path of `ip` or `tc`.

    Raises:
        ResourceError: it is not installed.
    """
    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), *TOOL_FOLDERS))
    path = shutil.which(name, path=folders)
    if path is None:
        raise ResourceError(f"network=emulated: needs the tool {name}; install iproute2")
    return path


def _make(plan: Plan) -> _Held:
    for tool in ("ip", "tc"):
        find_tool(tool)
    try:
        has_users = namespaces.leave_network()
    except OSError as error:
        raise ResourceError(
            "network=emulated: no permission to create network namespaces; needs root or user "
            f"namespaces (sysctl user.max_user_namespaces): {error.strerror}"
        ) from error
    user = _path(namespaces.hold("user")) if has_users else None
    hub = _path(namespaces.hold("net"))
    hosts: list[str] = []
    for _ in range(plan.hosts):
        namespaces.leave_network()
        hosts.append(_path(namespaces.hold("net")))
    namespaces.enter(hub)
    _batch("ip", plan.hub_links(hosts))
    _batch("tc", plan.hub_shapes())
    for host, path in enumerate(hosts):
        namespaces.enter(path)
        _batch("ip", plan.host_links(host))
        _batch("tc", plan.host_shapes())
        _delay(plan)
    return _Held(user, hub, tuple(hosts))


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _delay(plan: Plan) -> None:
    try:
        _batch("tc", plan.host_delays())
    except ResourceError as error:
        raise ResourceError(
            "network.latency: this kernel cannot delay packets (it has no netem), so latency "
            "cannot be emulated here; set network.latency=null"
        ) from error


def _batch(tool: str, lines: Sequence[str]) -> None:
    """Let a tool do what the lines say, in the namespace of this thread."""
    if not lines:
        return
    try:
        done = subprocess.run(
            [find_tool(tool), "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"network=emulated: {tool} did not end") from error
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise ResourceError(f"network=emulated: {tool} cannot make the network: {said}")


def _fastest_echo_seconds(plan: Plan, enter_host: Callable[[int], None]) -> float:
    """The least of a few times that a message took from host 1 to host 0 and back.

    What hinders it makes it slower; a link that is not shaped makes it faster.

    Args:
        plan: of the network.
        enter_host: moves this thread into a host.

    Raises:
        OSError: the hosts do not reach each other.
    """
    patience_seconds = ECHO_PATIENCE_SECONDS + 10 * plan.echo_seconds
    enter_host(0)
    with socket.create_server((str(plan.address(0)), 0)) as listener:
        listener.settimeout(patience_seconds)
        enter_host(1)  # a socket stays where it was made
        near = socket.create_connection(listener.getsockname(), patience_seconds)
        far, _ = listener.accept()
    with near, far:
        for one in (near, far):
            one.settimeout(patience_seconds)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echoing = Thread(target=_echo, args=(far, plan.echo_bytes))
        echoing.start()
        try:
            return min(_round_trip_seconds(near, plan.echo_bytes) for _ in range(ECHO_REPEATS))
        finally:
            near.close()
            echoing.join()


def _round_trip_seconds(connection: socket.socket, num_bytes: int) -> float:
    time.sleep(ECHO_PAUSE_SECONDS)
    start = time.perf_counter()
    connection.sendall(bytes(num_bytes))
    if not _take(connection, num_bytes):
        raise ConnectionError("the connection between two emulated hosts ended")
    return time.perf_counter() - start


def _echo(connection: socket.socket, num_bytes: int) -> None:
    """Send back each message of so many bytes as soon as it has come as a whole."""
    try:
        while _take(connection, num_bytes):
            connection.sendall(bytes(num_bytes))
    except OSError:
        connection.close()  # the other end sees it


def _take(connection: socket.socket, num_bytes: int) -> bool:
    """Read so many bytes; False if the other end closes before."""
    while num_bytes:
        data = connection.recv(min(num_bytes, CHUNK_BYTES))
        if not data:
            return False
        num_bytes -= len(data)
    return True
