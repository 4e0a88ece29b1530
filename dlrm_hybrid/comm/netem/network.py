"""Opens an emulated network for as long as a context lasts."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import final

from dlrm_hybrid.comm.netem.holder import hold
from dlrm_hybrid.comm.netem.plan import LEAST_ECHO_SHARE, Plan
from dlrm_hybrid.process import shielded
from dlrm_hybrid.types import ResourceError

START_SECONDS = 120.0
END_SECONDS = 5.0


@final
@dataclass(frozen=True, slots=True)
class Network:
    """An emulated network that is open.

    Attributes:
        plan: of it.
        namespaces: for each host the paths of namespaces that a process enters, in this order,
            before it does anything else.
        echo_seconds: what a message of `plan.echo_bytes` took to another host and back.
    """

    plan: Plan
    namespaces: tuple[tuple[str, ...], ...]
    echo_seconds: float

    @property
    def echo_share(self) -> float:
        """The time an echo took in line times."""
        return self.echo_seconds / self.plan.echo_seconds


@contextmanager
def open_network(plan: Plan) -> Generator[Network, None, None]:
    """Make the network, measure that it is shaped, and let it go in the end.

    The kernel removes it when this process dies, however it dies. Links of the machine itself are
    never touched.

    Raises:
        ResourceError: a right, a tool or a part of the kernel is missing, or what was made lets
            messages pass faster than the rate.
    """
    # Not from the forkserver: that is still busy with its imports.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(
        target=hold, args=(plan, theirs, os.getpid()), name="network", daemon=True
    )
    with shielded():  # it outlives the ranks, which may have to save
        holder.start()
    theirs.close()  # or the end of the holder would not end the connection
    try:
        network = _answer(plan, ours)
        check_echo(network)
        yield network
    finally:
        ours.close()
        holder.join(END_SECONDS)
        if holder.is_alive():
            holder.kill()
            holder.join()


def check_echo(network: Network) -> None:
    """Raise ResourceError if messages pass faster than the line allows."""
    if network.echo_share >= LEAST_ECHO_SHARE:
        return
    plan = network.plan
    raise ResourceError(
        f"network.rate: an echo of {plan.echo_bytes:,} bytes between emulated hosts took "
        f"{1e3 * network.echo_seconds:.2f} ms; at {plan.rate_bits_per_second / 1e6:g} Mbit/s it "
        f"takes {1e3 * plan.echo_seconds:.2f} ms: this kernel does not limit the link's rate"
    )


def _answer(plan: Plan, connection: Connection) -> Network:
    try:
        if not connection.poll(START_SECONDS):
            raise ResourceError("network=emulated: the network was not made in time")
        answer = json.loads(connection.recv_bytes())
    except EOFError as error:
        raise ResourceError("network=emulated: the process that holds the network died") from error
    if "error" in answer:
        raise ResourceError(answer["error"])
    namespaces = tuple(tuple(paths) for paths in answer["hosts"])
    return Network(plan, namespaces, answer["echo_seconds"])
