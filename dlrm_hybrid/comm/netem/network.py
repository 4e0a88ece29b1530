"""An emulated network, open for as long as a context lasts."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, final

from dlrm_hybrid.comm.netem.holder import hold
from dlrm_hybrid.comm.netem.plan import LEAST_ECHO_SHARE, RELAY_BITS_PER_SECOND, Method, NetworkPlan
from dlrm_hybrid.comm.netem.relay import Figures
from dlrm_hybrid.process import shielded
from dlrm_hybrid.types import DlrmError, ResourceError

START_SECONDS = 120.0
END_SECONDS = 5.0


@final
@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """An open emulated network.

    Attributes:
        plan: its layout and speed.
        namespaces: per host, paths of the namespaces that a process must first enter, in order.
        echo_seconds: measured round trip of a message of `plan.echo_bytes`.
        round_trip_seconds: measured round trip of a single byte.
        method: what delays packets; None if nothing does.
        relay_figures: returns the figures of the relay so far; None without one.
    """

    plan: NetworkPlan
    namespaces: tuple[tuple[str, ...], ...]
    echo_seconds: float
    round_trip_seconds: float
    method: Method | None
    relay_figures: Callable[[], Figures | None]

    @property
    def echo_share(self) -> float:
        """Measured time of an echo, relative to the time at the line's rate."""
        return self.echo_seconds / self.plan.echo_seconds


@contextmanager
def open_network(plan: NetworkPlan) -> Generator[EmulatedNetwork, None, None]:
    """Make the network, check that its links are shaped, and remove it in the end.

    The kernel removes it when this process dies. The machine's own links are never touched.

    Raises:
        ResourceError: a right, tool or kernel feature is missing, or the rate does not hold.
    """
    # Not from the forkserver, which is still busy with its imports.
    context = multiprocessing.get_context("spawn")
    connection, remote = context.Pipe()
    holder = context.Process(
        target=hold, args=(plan, remote, os.getpid()), name="network", daemon=True
    )
    with shielded():  # it must outlive the ranks, which may have to save
        holder.start()
    remote.close()  # else the connection would outlive the holder
    try:
        network = _opened(plan, connection)
        check_echo(network)
        yield network
    except DlrmError as error:
        holder.join(0)
        if holder.exitcode:  # errors of ranks are then a consequence
            raise ResourceError(
                f"network=emulated: the process that holds the network has ended before the run "
                f"(exit code {holder.exitcode}): {error}"
            ) from error
        raise
    finally:
        connection.close()
        holder.join(END_SECONDS)
        if holder.is_alive():
            holder.kill()
            holder.join()


def latency_remark(network: EmulatedNetwork) -> str | None:
    """A remark for the user on the latency of a network; None if it has none."""
    plan = network.plan
    if plan.latency_seconds is None:
        return None
    text = (
        f"network.latency: a round trip takes {1e3 * network.round_trip_seconds:.1f} ms, "
        f"{2e3 * plan.latency_seconds:g} of them emulated"
    )
    if network.method is Method.NETEM:
        return f"{text} by netem"
    text += " in user space, which takes CPU time from the ranks"
    if plan.rate_bits_per_second > RELAY_BITS_PER_SECOND:
        text += (
            f"; links may not reach {plan.rate_bits_per_second / 1e9:g} Gbit/s: it passes about "
            f"{RELAY_BITS_PER_SECOND / 1e9:g} Gbit/s of all links together"
        )
    return text


def latency_figures(network: EmulatedNetwork) -> dict[str, Any] | None:
    """Figures for the summary on how latency was emulated, and its cost so far; None without any.

    Raises:
        ResourceError: the process that holds the network has died.
    """
    if network.method is None:
        return None
    figures = network.relay_figures()
    return {
        "method": network.method.value,
        "one_way_seconds": network.plan.latency_seconds,
        "round_trip_seconds": network.round_trip_seconds,
        "relay": None if figures is None else asdict(figures),
    }


def check_echo(network: EmulatedNetwork) -> None:
    """Raise ResourceError if messages pass faster than the links allow."""
    plan = network.plan
    least_seconds = 2 * (plan.latency_seconds or 0.0)
    if network.round_trip_seconds < least_seconds:
        raise ResourceError(
            f"network.latency: a round trip between emulated hosts took "
            f"{1e3 * network.round_trip_seconds:.2f} ms, less than two ways of "
            f"{1e3 * least_seconds / 2:g} ms: this kernel does not delay packets"
        )
    if network.echo_share >= LEAST_ECHO_SHARE:
        return
    raise ResourceError(
        f"network.rate: an echo of {plan.echo_bytes:,} bytes between emulated hosts took "
        f"{1e3 * network.echo_seconds:.2f} ms; at {plan.rate_bits_per_second / 1e6:g} Mbit/s it "
        f"takes {1e3 * plan.echo_seconds:.2f} ms: this kernel does not limit the link's rate"
    )


def _opened(plan: NetworkPlan, connection: Connection) -> EmulatedNetwork:
    answer = _receive(connection, START_SECONDS)
    if "error" in answer:
        raise ResourceError(answer["error"])
    method = answer["method"]

    def relay_figures() -> Figures | None:
        if method != Method.USER_SPACE:
            return None
        try:
            connection.send_bytes(b"figures")
        except OSError as error:
            raise _dead() from error
        return Figures(**_receive(connection, END_SECONDS))

    return EmulatedNetwork(
        plan=plan,
        namespaces=tuple(tuple(paths) for paths in answer["hosts"]),
        echo_seconds=answer["echo_seconds"],
        round_trip_seconds=answer["round_trip_seconds"],
        method=None if method is None else Method(method),
        relay_figures=relay_figures,
    )


def _receive(connection: Connection, patience_seconds: float) -> Any:
    try:
        if not connection.poll(patience_seconds):
            raise ResourceError("network=emulated: the network was not made in time")
        return json.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise _dead() from error


def _dead() -> ResourceError:
    return ResourceError("network=emulated: the process that holds the network died")
