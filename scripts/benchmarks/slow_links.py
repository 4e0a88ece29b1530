"""Explains why work takes more CPU time on slow links: single packets, and pauses.

    python scripts/benchmarks/slow_links.py
    python scripts/benchmarks/slow_links.py --only pauses

First a stream of frames over the channel between two emulated hosts, at each of `--rates`: CPU time
of the main threads and network threads at both ends, packets, and how often a thread gave up its
core. Then CPU time of work after each of `--pauses`, over that of the same work without one: a
training step of the paper's model, forward and backward of two of its layers, arithmetic without
memory, and taking and answering a frame, by the main thread and by the channel's. Only CPU time is
counted. Streams need what `network=emulated` needs.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numba
import numpy as np
import torch
from harness import SEED, Page, Row, arguments, one_thread, publish
from hosts import PATIENCE_SECONDS, answer, processes, settle
from plain_dlrm import PAPER_SPEC
from reference_step import Dlrm, Trainer

from dlrm_hybrid.comm.netem.network import open_network
from dlrm_hybrid.comm.netem.plan import NetworkPlan, bits_per_second
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Sgd
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.run.assembly.model import keep_freed_memory
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind

FRAME_BYTES = 32_000
MOST_STREAM_BYTES = 20_000_000
ECHO_BYTES = 8_000
ROWS = 128
LR = 0.1

Work = Callable[[], object]


def main() -> None:
    """Measure and print the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of the line, for a stream")
    parser.add_argument("--pauses", nargs="+", type=float, default=[1, 3, 10, 30, 100, 300])
    parser.add_argument("--turns", type=int, default=30, help="of each pause")
    parser.add_argument("--only", choices=("packets", "pauses"))
    options = parser.parse_args()

    def measure() -> Page:
        tables: dict[str, list[Row]] = {}
        if options.only != "pauses":
            rates = [rate for rate in options.rates for _ in range(options.repeats)]
            tables["Streams"] = [stream_row(rate, options.seconds) for rate in rates]
        if options.only != "packets":
            pauses = [one / 1e3 for one in options.pauses]
            with one_thread():
                rows = pause_rows(pauses, options.turns)
            tables["CPU ms after a pause, more than without"] = rows
        return tables

    publish(measure, options.output)


@dataclass(frozen=True, slots=True)
class Spent:
    """What a process has taken.

    Attributes:
        main: CPU seconds of its main thread.
        others: of its other threads.
        packets: of TCP that its host has taken or sent.
        waits: how often a thread gave up its core.
    """

    main: float
    others: float
    packets: int
    waits: int

    @classmethod
    def now(cls) -> Spent:
        """Since the process began."""
        main = time.thread_time()
        lines = Path("/proc/net/snmp").read_text(encoding="utf-8").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        tcp = dict(zip(names[1:], map(int, values[1:]), strict=True))
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        return cls(main, time.process_time() - main, tcp["InSegs"] + tcp["OutSegs"], waits)

    def until(self, later: Spent) -> Spent:
        """What came after this."""
        return Spent(
            later.main - self.main,
            later.others - self.others,
            later.packets - self.packets,
            later.waits - self.waits,
        )


def stream_row(rate: str, seconds: float) -> Row:
    """A stream between two hosts, as long as the line takes so many seconds for it."""
    plan = NetworkPlan(hosts=2, rate_bits_per_second=bits_per_second(rate), latency_seconds=None)
    length = min(seconds * plan.rate_bits_per_second / 8, MOST_STREAM_BYTES)
    frames = int(length // FRAME_BYTES)
    with open_network(plan) as network:
        hosts = [
            Host(str(plan.address(host)), network.namespaces[host], frames) for host in range(2)
        ]
        with channel_ends(hosts, stream) as ends:
            sender, receiver = (answer(end) for end in ends)
    sent = frames * FRAME_BYTES
    row: Row = {"rate": rate, "MB": f"{sent / 1e6:.1f}"}
    for name, one in (("sender", sender), ("receiver", receiver)):
        row = {
            **row,
            f"{name}: main, ms/MB": f"{1e9 * one.main / sent:.2f}",
            f"{name}: network, ms/MB": f"{1e9 * one.others / sent:.2f}",
            f"{name}: packets": f"{one.packets:,}",
            f"{name}: waits": f"{one.waits:,}",
            f"{name}: network, µs/packet": f"{1e6 * one.others / one.packets:.1f}",
        }
    return row


@dataclass(frozen=True, slots=True)
class Host:
    """Where an end of the channel is, and how many frames it sends or takes."""

    address: str
    namespaces: Sequence[str]
    frames: int


def stream(rank: int, folder: Path, host: Host, parent: Connection) -> None:
    """Rank 0 sends frames, and waits for an answer to the last; rank 1 takes them."""
    channel = join(rank, folder, host)
    start = Spent.now()
    if rank == 0:
        for number in range(host.frames):
            channel.send(1, frame_of(0, number, FRAME_BYTES), FRAME_BYTES)
        channel.receive(PATIENCE_SECONDS)
    else:
        for _ in range(host.frames):
            channel.receive(PATIENCE_SECONDS)
        channel.send(0, frame_of(1, 0, 8), 8)
    parent.send(start.until(Spent.now()))
    channel.close()


def echo(rank: int, folder: Path, host: Host, parent: Connection) -> None:
    """Rank 0 sends a frame when it is told to; rank 1 sends it back, and says what that took."""
    channel = join(rank, folder, host)
    for number in range(host.frames):
        if rank == 0:
            parent.recv()
            channel.send(1, frame_of(0, number, ECHO_BYTES), ECHO_BYTES)
            parent.send(channel.receive(PATIENCE_SECONDS).number)
        else:
            start = Spent.now()
            channel.receive(PATIENCE_SECONDS)
            channel.send(0, frame_of(1, number, ECHO_BYTES), ECHO_BYTES)
            parent.send(start.until(Spent.now()))
    channel.close()


def frame_of(sender: int, number: int, num_bytes: int) -> Frame:
    """A frame with so many bytes of a tensor."""
    tensor = dense(0, np.zeros(num_bytes // 4, np.float32))
    return Frame(kind=Kind.PUSH, sender=sender, attempt=0, number=number, sections=(tensor,))


def join(rank: int, folder: Path, host: Host) -> ZmqChannel:
    """An end of the channel, in its host."""
    settle(host.namespaces)
    options = ZmqOptions(
        address=host.address,
        keys=None,
        enclosed=True,
        start_seconds=PATIENCE_SECONDS,
        close_seconds=PATIENCE_SECONDS,
        silence_seconds=PATIENCE_SECONDS,
    )
    return open_zmq_channel(share_folder(folder), rank, 2, 0, options, print)


@contextmanager
def channel_ends(hosts: Sequence[Host], target: Callable[..., None]) -> Generator[list[Connection]]:
    """Two processes with the ends of a channel, and our ends of what connects us to them."""
    with TemporaryDirectory(prefix="dlrm_hybrid-links-") as folder:
        targets = [(target, rank, Path(folder), host) for rank, host in enumerate(hosts)]
        # Forks of one thread; others would import torch first.
        with processes("fork", targets) as ends:
            yield ends


def pause_rows(pauses: Sequence[float], turns: int) -> list[Row]:
    """CPU time of each kind of work after each pause, and how much more it is than without."""
    found: dict[str, Mapping[float, float]] = {
        name: after_pauses(work, pauses, turns) for name, work in works().items()
    }
    found |= echo_after_pauses(pauses, turns)
    return [
        {
            "work": name,
            "without": f"{1e3 * one[0.0]:.3f}",
            **{f"{1e3 * pause:g} ms": f"{1e3 * (one[pause] - one[0.0]):+.3f}" for pause in pauses},
        }
        for name, one in found.items()
    ]


def works() -> dict[str, Work]:
    """What is done after pauses, each of it compiled and used once."""
    keep_freed_memory()
    options = Fused()
    trainer = Trainer(Dlrm(PAPER_SPEC, options, Precision.FLOAT32, SEED), Sgd())
    draw = np.random.default_rng(SEED)
    ids = np.stack([draw.integers(0, rows, ROWS) for rows in PAPER_SPEC.table_rows])
    batch = torch.randn(ROWS, 13), torch.from_numpy(ids), torch.ones(ROWS)
    layers = torch.nn.Sequential(
        torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    )
    input_BN = torch.randn(ROWS, 512)
    spin: Any = numba.njit(_spin)
    made: dict[str, Work] = {
        "training step": lambda: trainer.step(*batch, lr=LR, embedding_lr=LR).loss.item(),
        "two layers": lambda: layers(input_BN).sum().backward(),
        "arithmetic": lambda: spin(1_000_000),
    }
    for work in made.values():
        work()
    return made


def _spin(times: int) -> int:
    state = 1
    for _ in range(times):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


def after_pauses(work: Work, pauses: Sequence[float], turns: int) -> dict[float, float]:
    """Median CPU seconds of a thread for some work after each pause; 0 is none."""
    spent: dict[float, list[float]] = defaultdict(list)
    for pause in shuffled(pauses, turns):
        work()
        work()
        if pause:
            time.sleep(pause)
        start = time.thread_time()
        work()
        spent[pause].append(time.thread_time() - start)
    return {pause: median(seconds) for pause, seconds in spent.items()}


def echo_after_pauses(pauses: Sequence[float], turns: int) -> dict[str, dict[float, float]]:
    """The same of taking and answering a frame: of the main thread, and of the channel's."""
    order = list(shuffled(pauses, turns))
    spent: dict[float, list[Spent]] = defaultdict(list)
    hosts = [Host("127.0.0.1", (), 3 * len(order))] * 2
    with channel_ends(hosts, echo) as (sender, receiver):
        for pause in order:
            for before in (0.0, 0.0, pause):
                time.sleep(before)
                sender.send(None)
                answer(sender)
                last: Spent = answer(receiver)
            spent[pause].append(last)
    of_main = {pause: median(one.main for one in all_) for pause, all_ in spent.items()}
    of_others = {pause: median(one.others for one in all_) for pause, all_ in spent.items()}
    return {"frame, main thread": of_main, "frame, channel": of_others}


def shuffled(pauses: Sequence[float], turns: int) -> Iterator[float]:
    """Every pause, and none, so often, in an order that repeats nothing."""
    draw = np.random.default_rng(SEED)
    for _ in range(turns):
        yield from draw.permutation([0.0, *pauses]).tolist()


if __name__ == "__main__":
    main()
