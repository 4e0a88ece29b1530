"""The end of the network that a rank of a world of processes holds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.rendezvous import Board
from dlrm_hybrid.comm.zmq.channel import ZmqChannel, ZmqOptions, open_zmq_channel
from dlrm_hybrid.comm.zmq.curve import read_key_file
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.types import InterruptedRunError, PreemptedError


@contextmanager
def world_channel(
    task: TrainTask, config: Config, layout: Layout, board: Board, clock: SpanClock
) -> Generator[tuple[MeteredChannel, ZmqChannel], None, None]:
    """The rank's end of the network, and who notices there when a rank goes.

    Leaves without a goodbye if anything fails.
    """
    network = config.network
    options = ZmqOptions(
        address=build_world.address(config),
        keys=None if network.keys is None else read_key_file(Path(network.keys)),
        enclosed=network.name == "emulated",
        start_seconds=network.patience_seconds,
        close_seconds=network.patience_seconds,
        silence_seconds=network.patience_seconds,
    )
    size = layout.topology.size
    inner = open_zmq_channel(board, task.rank, size, task.attempt, options, print)
    try:
        yield MeteredChannel(inner, Counters(), clock), inner
    except (PreemptedError, InterruptedRunError):
        inner.close()  # all stop at the same step
        raise
    except BaseException:
        inner.abandon()
        raise
    inner.close()
