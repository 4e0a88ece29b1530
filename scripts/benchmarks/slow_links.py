"""Explains why work takes more CPU time on slow links: pauses, after which caches are cold.

    python scripts/benchmarks/slow_links.py

CPU time of work after each of `--pauses`, over that of the same work without one: a training step
of the paper's model, forward and backward of two of its layers, arithmetic without memory, and
taking and answering a frame, by the main thread and by the channel's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Sgd
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.run.assembly.model import keep_freed_memory
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind

ECHO_BYTES = 8_000
ROWS = 128
LR = 0.1

Work = Callable[[], object]


def main() -> None:
    """Measure and print the tables."""
    parser = arguments(__doc__, repeats=30)
    parser.add_argument("--pauses", nargs="+", type=float, default=[1, 3, 10, 30, 100, 300])
    options = parser.parse_args()

    def measure() -> Page:
        pauses = [one / 1e3 for one in options.pauses]
        with one_thread():
            rows = pause_rows(pauses, options.repeats)
        return {"CPU ms after a pause, more than without": rows}

    publish(measure, options.output)


def cpu_seconds() -> tuple[float, float]:
    """What this process has taken: its main thread, and its others."""
    main = time.thread_time()
    return main, time.process_time() - main


def echo(rank: int, folder: Path, frames: int, parent: Connection) -> None:
    """Rank 0 sends a frame when it is told to; rank 1 sends it back, and says what that took."""
    channel = join(rank, folder)
    for number in range(frames):
        if rank == 0:
            parent.recv()
            channel.send(1, frame_of(0, number, ECHO_BYTES), ECHO_BYTES)
            parent.send(channel.receive(PATIENCE_SECONDS).number)
        else:
            before = cpu_seconds()
            channel.receive(PATIENCE_SECONDS)
            channel.send(0, frame_of(1, number, ECHO_BYTES), ECHO_BYTES)
            spent = (now - then for now, then in zip(cpu_seconds(), before, strict=True))
            parent.send((*spent,))
    channel.close()


def frame_of(sender: int, number: int, num_bytes: int) -> Frame:
    """A frame with so many bytes of a tensor."""
    tensor = dense(0, np.zeros(num_bytes // 4, np.float32))
    return Frame(kind=Kind.PUSH, sender=sender, attempt=0, number=number, sections=(tensor,))


def join(rank: int, folder: Path) -> ZmqChannel:
    """An end of the channel, on the loopback."""
    settle(())
    options = ZmqOptions(
        address="127.0.0.1",
        keys=None,
        enclosed=True,
        start_seconds=PATIENCE_SECONDS,
        close_seconds=PATIENCE_SECONDS,
        silence_seconds=PATIENCE_SECONDS,
    )
    return open_zmq_channel(share_folder(folder), rank, 2, 0, options, print)


@contextmanager
def channel_ends(frames: int) -> Generator[list[Connection]]:
    """Two processes with the ends of a channel, and our ends of what connects us to them."""
    with TemporaryDirectory(prefix="dlrm_hybrid-links-") as folder:
        targets = [(echo, rank, Path(folder), frames) for rank in range(2)]
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
    spent: dict[float, list[tuple[float, float]]] = defaultdict(list)
    with channel_ends(3 * len(order)) as (sender, receiver):
        for pause in order:
            for before in (0.0, 0.0, pause):
                time.sleep(before)
                sender.send(None)
                answer(sender)
                last: tuple[float, float] = answer(receiver)
            spent[pause].append(last)
    of_main, of_others = (
        {pause: median(one[part] for one in turns) for pause, turns in spent.items()}
        for part in (0, 1)
    )
    return {"frame, main thread": of_main, "frame, channel": of_others}


def shuffled(pauses: Sequence[float], turns: int) -> Iterator[float]:
    """Every pause, and none, so often, in an order that repeats nothing."""
    draw = np.random.default_rng(SEED)
    for _ in range(turns):
        yield from draw.permutation([0.0, *pauses]).tolist()


if __name__ == "__main__":
    main()
