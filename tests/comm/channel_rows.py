"""Every kind of channel, and a way to run one program on all its ranks, threads as ranks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from patience import HANG_SECONDS

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import CurveKeys
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind

ATTEMPT = 3
KEYS = CurveKeys(
    public=b"UnTpr*qZXGR<:g%P7@8wzXO5}}z$z3*0uV!oj*=#",
    secret=b"oy1C+1EGs^8Xuh0f]Gcx71)KrIVO5WA@h+T6%*+J",
)

Opener = Callable[[int], Channel]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """One kind of channel.

    Attributes:
        name: for the test report.
        opener: from the size of the world and an empty folder to what opens a rank's end.
        waits: `close` waits until the others have taken over what was sent.
    """

    name: str
    opener: Callable[[int, Path], Opener]
    waits: bool


def options(**changes: object) -> ZmqOptions:
    values = {
        "address": "127.0.0.1",
        "keys": None,
        "enclosed": False,
        "start_seconds": HANG_SECONDS,
        "silence_seconds": HANG_SECONDS,
        "close_seconds": HANG_SECONDS,
    }
    return ZmqOptions(**values | changes)  # pyright: ignore[reportArgumentType]


def open_zmq(
    folder: Path, rank: int, world_size: int, report=lambda text: None, **changes: object
) -> ZmqChannel:
    return open_zmq_channel(
        share_folder(folder), rank, world_size, ATTEMPT, options(**changes), report
    )


def in_process(world_size: int, folder: Path) -> Opener:
    return in_process_channels(world_size).__getitem__


def zmq(world_size: int, folder: Path) -> Opener:
    return lambda rank: open_zmq(folder, rank, world_size)


def zmq_curve(world_size: int, folder: Path) -> Opener:
    return lambda rank: open_zmq(folder, rank, world_size, keys=KEYS)


def metered(opener: Callable[[int, Path], Opener]) -> Callable[[int, Path], Opener]:
    def wrapped(world_size: int, folder: Path) -> Opener:
        inner = opener(world_size, folder)
        return lambda rank: MeteredChannel(inner(rank), Counters(), SpanClock())

    return wrapped


ROWS = [
    Row("in_process", in_process, waits=False),
    Row("zmq", zmq, waits=True),
    Row("zmq_curve", zmq_curve, waits=True),
    Row("metered_in_process", metered(in_process), waits=False),
    Row("metered_zmq", metered(zmq), waits=True),
]


def frame(sender: int, step: int, size: int = 1, **changes: object) -> Frame:
    """A frame that carries `size` numbers derived from its sender and step."""
    values = np.full(size, 1000 * sender + step, np.float32)
    fields = {
        "kind": Kind.PUSH,
        "sender": sender,
        "attempt": ATTEMPT,
        "number": step,
        "sections": (dense(0, values),) if size else (),
    }
    return Frame(**fields | changes)  # pyright: ignore[reportArgumentType]


def run_ranks_as_threads(
    world_size: int, opener: Opener, program: Callable[[Channel], Result]
) -> list[Result]:
    """What the program returns on each rank; the first error of a rank is raised here."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        channel = None
        try:
            channel = opener(rank)
            results[rank] = program(channel)
        except BaseException as error:
            errors.append(error)  # before the others learn of it, and fail, too
            if channel is not None:
                channel.abandon()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
