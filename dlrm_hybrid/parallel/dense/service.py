"""The loop of a server rank: frames in, answers out, until every worker has said goodbye."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.parallel.dense.server import Handle
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Kind


def serve(
    channel: Channel,
    handlers: Mapping[Kind, Handle],
    workers: Collection[int],
    deadline_seconds: float,
) -> int:
    """Answer frames until each of `workers` has sent its goodbye; returns the ticks they have done.

    Args:
        channel: of this rank; the caller closes it.
        handlers: of all kinds of frames that may come, but goodbyes.
        workers: ranks that will say goodbye.
        deadline_seconds: longest silence.

    Raises:
        DlrmError: what a handler and the channel raise; a kind without a handler, a goodbye from
            another rank, or a frame after one.
    """
    here = set(workers)
    ticks = 0
    while here:
        frame = channel.receive(deadline_seconds)
        what = f"{frame.kind.name} {frame.number} of rank {frame.sender}"
        if frame.sender not in here:
            raise DlrmError(f"{what}, which has said goodbye or never had business here")
        if frame.kind is Kind.GOODBYE:
            here.remove(frame.sender)
            ticks = frame.number
            continue
        handle = handlers.get(frame.kind)
        if handle is None:
            raise DlrmError(f"{what}: a server takes no such frames")
        for outgoing in handle(frame):
            channel.send(*outgoing)
    return ticks
