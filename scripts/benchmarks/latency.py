"""Measures round trip, throughput and relay CPU of an emulated link, by latency and rate.

    python scripts/benchmarks/latency.py --rates 100mbit 1gbit --latencies 0ms 500us 10ms 20ms

Between two hosts with nothing else on their links: round trips of one byte on an idle link, then a
stream of `--seconds` of the line's time over one TCP connection. In the first half the connection
finds its speed; the rate is that of the second half. If packets are delayed in user space, the last
columns are the relay's: CPU time per MB passed on, packets lost, and how much too late packets
left. Needs what `network=emulated` needs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median

from harness import Page, Row, arguments, each, publish
from hosts import PATIENCE_SECONDS, answer, processes, settle

from dlrm_hybrid.comm.netem.network import EmulatedNetwork, open_network
from dlrm_hybrid.comm.netem.plan import NetworkPlan, bits_per_second, seconds

PINGS = 30
CHUNK_BYTES = 1 << 20


def main() -> None:
    """Measure each case and print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--latencies", nargs="+", default=["0ms", "500us", "1ms", "10ms", "20ms"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of the line, for a stream")
    options = parser.parse_args()
    cases = [(rate, latency) for rate in options.rates for latency in options.latencies]

    def measured() -> Page:
        links = each("links", cases * options.repeats)
        rows = [measure(rate, latency, options.seconds) for rate, latency in links]
        return {"Latency of emulated links": rows}

    publish(measured, options.output)


def measure(rate: str, latency: str, stream_seconds: float) -> Row:
    """One line of the table."""
    plan = NetworkPlan(
        hosts=2,
        rate_bits_per_second=bits_per_second(rate),
        latency_seconds=seconds(latency) or None,
    )
    with open_network(plan) as network:
        before = network.relay_figures()
        trips, reached = exchange(network, int(stream_seconds * plan.rate_bits_per_second / 8))
        after = network.relay_figures()
    row: Row = {
        "rate": rate,
        "latency": latency,
        "round trip asked, ms": f"{2e3 * (plan.latency_seconds or 0.0):g}",
        "measured": f"{1e3 * median(trips):.2f}",
        "lowest": f"{1e3 * min(trips):.2f}",
        "highest": f"{1e3 * max(trips):.2f}",
        "Mbit/s": f"{reached / 1e6:.0f}",
    }
    if before is None or after is None:
        return {**row, "CPU ms/MB": None, "lost": None, "late, ms": None}
    cpu_seconds = after.cpu_seconds - before.cpu_seconds
    return {
        **row,
        "CPU ms/MB": f"{1e9 * cpu_seconds / (after.bytes - before.bytes):.1f}",
        "lost": str(after.lost_packets),
        "late, ms": f"{1e3 * after.latest_seconds:.1f}",
    }


def exchange(network: EmulatedNetwork, stream_bytes: int) -> tuple[list[float], float]:
    """Seconds of each round trip, and bits per second of a stream, between two hosts."""
    address, (here, there) = str(network.plan.address(0)), network.namespaces[:2]
    targets = [(receive, here, address), (send, there, stream_bytes)]
    with processes("spawn", targets) as (receiver, sender):
        sender.send((address, answer(receiver)))
        return answer(sender), answer(receiver)


def receive(namespaces: Sequence[str], address: str, parent: Connection) -> None:
    """Be host 0: send each byte back, then take a stream and report how fast it was."""
    settle(namespaces)
    with socket.create_server((address, 0)) as listener:
        parent.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        taken: list[tuple[float, int]] = [(time.perf_counter(), 0)]
        while data := connection.recv(CHUNK_BYTES):
            taken.append((time.perf_counter(), taken[-1][1] + len(data)))
    (end, total_bytes) = taken[-1]
    half = next(one for one in taken if one[1] >= total_bytes / 2)
    parent.send(8 * (total_bytes - half[1]) / (end - half[0]))


def send(namespaces: Sequence[str], stream_bytes: int, parent: Connection) -> None:
    """Be host 1: report how long each byte took to host 0 and back, then send a stream."""
    settle(namespaces)
    trips: list[float] = []
    with socket.create_connection(parent.recv(), PATIENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            trips.append(time.perf_counter() - start)
        parent.send(trips)
        connection.sendall(bytes(stream_bytes))


if __name__ == "__main__":
    main()
