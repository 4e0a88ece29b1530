"""Measures the round trip of messages in an emulated network."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from threading import Thread

from dlrm_hybrid.comm.netem.plan import Plan

REPEATS = 5
PAUSE_SECONDS = 0.005  # fills the links' token buckets
PATIENCE_SECONDS = 10.0
CHUNK_BYTES = 1 << 20


def fastest_seconds(plan: Plan, enter_host: Callable[[int], None]) -> tuple[float, float]:
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
        for one in (near, far):
            one.settimeout(patience_seconds)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
