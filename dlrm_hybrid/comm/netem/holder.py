"""The process that makes an emulated network and holds it.

Its descriptors keep the namespaces alive. When it ends, at the latest with the process that started
it, the kernel removes the bridge and the links, and each host once no rank is in it. It also delays
packets where that is done in user space.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from threading import Thread

from dlrm_hybrid.comm.netem import namespaces
from dlrm_hybrid.comm.netem.namespaces import batch, find_tool
from dlrm_hybrid.comm.netem.plan import MOST_DELAYED_BYTES, Method, NetworkPlan
from dlrm_hybrid.comm.netem.relay import Relay
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.types import ResourceError

TRIAL = ("qdisc add dev lo root netem delay 1ms limit 1000",)
WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Network:
    """A network that has been made.

    Attributes:
        user: path of the user namespace for other processes to enter, None if none was needed.
        hosts: path of each host's network namespace.
        method: what delays packets, None if nothing does.
        relay: delays packets in user space, else None.
    """

    user: str | None
    hosts: tuple[str, ...]
    method: Method | None
    relay: Relay | None


def hold(plan: NetworkPlan, connection: Connection, parent: int) -> None:
    """Make the network, report where it is or why not, and hold it until the other end closes.

    The report is JSON: `hosts`, for each the paths of the namespaces to enter in order,
    `method`, and the measured `round_trip_seconds` and `echo_seconds`; or `error`. Each further
    message is answered with the figures of the relay, or null.

    Args:
        plan: that of the network.
        connection: to the process that started this one.
        parent: process id of that process.
    """
    die_with_parent(parent)
    gc.disable()  # nothing here makes cycles, and a collection would delay packets
    with ExitStack() as stack:
        relaying = None
        try:
            net = _make(plan)
            if net.relay is not None:
                relaying = stack.enter_context(net.relay.running())
            round_trip_seconds, echo_seconds = fastest_seconds(
                plan, lambda host: namespaces.enter(net.hosts[host])
            )
        except (ResourceError, OSError) as error:
            text = str(error) if isinstance(error, ResourceError) else f"network=emulated: {error}"
            _answer(connection, {"error": text})
            return
        first = () if net.user is None else (net.user,)
        _answer(
            connection,
            {
                "hosts": [[*first, host] for host in net.hosts],
                "method": net.method,
                "round_trip_seconds": round_trip_seconds,
                "echo_seconds": echo_seconds,
            },
        )
        with suppress(EOFError, OSError):
            while relaying is None or relaying.is_alive():
                if connection.poll(WATCH_SECONDS if relaying else None):
                    connection.recv_bytes()
                    _answer(connection, None if net.relay is None else asdict(net.relay.figures()))
            sys.exit("the delay line of the emulated network has failed")  # takes the links along


def _answer(connection: Connection, values: object) -> None:
    with suppress(OSError):
        connection.send_bytes(json.dumps(values).encode())


def _make(plan: NetworkPlan) -> _Network:
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
    method = _method(plan)
    hub = _path(namespaces.hold("net"))
    hosts: list[str] = []
    for _ in range(plan.hosts):
        namespaces.leave_network()
        hosts.append(_path(namespaces.hold("net")))
    namespaces.enter(hub)
    is_relayed = method is Method.USER_SPACE
    batch("ip", plan.relayed_links(hosts) if is_relayed else plan.hub_links(hosts))
    batch("tc", plan.hub_shapes())
    relay = Relay(plan) if is_relayed else None
    for host, path in enumerate(hosts):
        namespaces.enter(path)
        batch("ip", [*plan.host_links(host), *(plan.relayed_host_links() if is_relayed else ())])
        batch("tc", plan.host_shapes())
        if method is Method.NETEM:
            batch("tc", plan.host_delays())
    return _Network(user, tuple(hosts), method, relay)


def _method(plan: NetworkPlan) -> Method | None:
    """Find what can delay packets, in a trial that uses up this network namespace.

    Raises:
        ResourceError: only a relay can, and it would hold too many bytes.
    """
    if plan.latency_seconds is None:
        return None
    try:
        batch("tc", TRIAL)
    except ResourceError:
        if plan.delayed_bytes > MOST_DELAYED_BYTES:
            raise ResourceError(
                f"network.latency: this kernel has no netem, and {plan.latency_seconds:g} s of "
                f"{plan.hosts} links at {plan.rate_bits_per_second / 1e6:g} Mbit/s are too much to "
                f"delay in user space: {plan.delayed_bytes:,} bytes, at most "
                f"{MOST_DELAYED_BYTES:,}"
            ) from None
        return Method.USER_SPACE
    namespaces.leave_network()
    return Method.NETEM


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


REPEATS = 5
PAUSE_SECONDS = 0.005  # fills the links' token buckets
PATIENCE_SECONDS = 10.0
CHUNK_BYTES = 1 << 20


def fastest_seconds(plan: NetworkPlan, enter_host: Callable[[int], None]) -> tuple[float, float]:
    """The shortest of a few round trips of messages from host 1 to host 0 and back.

    Interference makes a round trip longer; only a link not shaped or delayed makes it shorter.

    Args:
        plan: that of the network.
        enter_host: moves this thread into a host's namespace.

    Returns:
        Seconds for a single byte, and for `plan.echo_bytes`.

    Raises:
        OSError: the hosts cannot reach each other.
    """
    patience_seconds = PATIENCE_SECONDS + 10 * plan.echo_seconds
    enter_host(0)
    with socket.create_server((str(plan.address(0)), 0)) as listener:
        listener.settimeout(patience_seconds)
        enter_host(1)  # a socket stays in the namespace where it was made
        near = socket.create_connection(listener.getsockname(), patience_seconds)
        far, _ = listener.accept()
    with near, far:
        for end in (near, far):
            end.settimeout(patience_seconds)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _fastest(near, far, 1), _fastest(near, far, plan.echo_bytes)


def _fastest(near: socket.socket, far: socket.socket, num_bytes: int) -> float:
    echoing = Thread(target=_echo, args=(far, num_bytes))
    echoing.start()
    try:
        return min(_round_trip_seconds(near, num_bytes) for _ in range(REPEATS))
    except BaseException:
        near.close()  # else the echo would wait for more
        raise
    finally:
        echoing.join()


def _round_trip_seconds(connection: socket.socket, num_bytes: int) -> float:
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    connection.sendall(bytes(num_bytes))
    if not _take(connection, num_bytes):
        raise ConnectionError("the connection between two emulated hosts ended")
    return time.perf_counter() - start


def _echo(connection: socket.socket, num_bytes: int) -> None:
    """Send back each message of so many bytes once all of it has arrived."""
    try:
        for _ in range(REPEATS):
            if not _take(connection, num_bytes):
                return
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
