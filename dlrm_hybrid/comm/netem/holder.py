"""The process that makes an emulated network and holds it.

Its descriptors keep the namespaces alive. When it ends, with the process that started it or
before, the kernel takes the bridge and the links away, and each host as soon as no rank is in it.
Where packets are delayed in user space, it does that too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from dlrm_hybrid.comm.netem import echo, namespaces
from dlrm_hybrid.comm.netem.plan import MOST_DELAYED_BYTES, Method, Plan
from dlrm_hybrid.comm.netem.relay import Relay
from dlrm_hybrid.comm.netem.tools import batch, find_tool
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.types import ResourceError

TRIAL = ("qdisc add dev lo root netem delay 1ms limit 1000",)
WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Held:
    """A network that has been made.

    Attributes:
        user: path under which other processes find the namespace of users, None if there was no
            need for one.
        hosts: path of each host's namespace.
        method: what delays packets, None if nothing does.
        relay: in user space; None if there is none.
    """

    user: str | None
    hosts: tuple[str, ...]
    method: Method | None
    relay: Relay | None


def hold(plan: Plan, connection: Connection, parent: int) -> None:
    """Make the network, say where it is or why not, hold it until the other end is closed.

    The answer is JSON: `hosts`, for each the paths of the namespaces to enter, in this order,
    `method`, and as they were measured `round_trip_seconds` and `echo_seconds`; or `error`. To
    each further message it answers with the figures of the relay, or null.

    Args:
        plan: of the network.
        connection: to the process that started this one.
        parent: its number.
    """
    die_with_parent(parent)
    gc.disable()  # nothing here makes cycles, and a collection would make packets late
    with ExitStack() as stack:
        relaying = None
        try:
            held = _make(plan)
            if held.relay is not None:
                relaying = stack.enter_context(held.relay.running())
            round_trip_seconds, echo_seconds = echo.fastest_seconds(
                plan, lambda host: namespaces.enter(held.hosts[host])
            )
        except (ResourceError, OSError) as error:
            text = str(error) if isinstance(error, ResourceError) else f"network=emulated: {error}"
            _answer(connection, {"error": text})
            return
        first = () if held.user is None else (held.user,)
        _answer(
            connection,
            {
                "hosts": [[*first, host] for host in held.hosts],
                "method": held.method,
                "round_trip_seconds": round_trip_seconds,
                "echo_seconds": echo_seconds,
            },
        )
        with suppress(EOFError, OSError):
            while relaying is None or relaying.is_alive():
                if connection.poll(WATCH_SECONDS if relaying else None):
                    connection.recv_bytes()
                    _answer(
                        connection, None if held.relay is None else asdict(held.relay.figures())
                    )
            sys.exit("the delay line of the emulated network has failed")  # the links end with it


def _answer(connection: Connection, values: object) -> None:
    with suppress(OSError):
        connection.send_bytes(json.dumps(values).encode())


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
    return _Held(user, tuple(hosts), method, relay)


def _method(plan: Plan) -> Method | None:
    """What can delay packets here, tried out in this namespace, which is left for a new one.

    Raises:
        ResourceError: only a relay can, and it would have to hold too much.
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
