"""The loop of a server rank: frames in, answers out, until every worker has said goodbye."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind

Handle = Callable[[Frame], Sequence[Outgoing]]


def serve(
    channel: Channel, handle: Handle, workers: Collection[int], deadline_seconds: float
) -> int:
    """Answer frames until each of `workers` has sent its goodbye; returns the steps they have done.

    Args:
        channel: of this rank; the caller closes it.
        handle: takes all frames but goodbyes: `ParameterServer.handle`, or a function that answers
            proposals and CONTROL frames with sections itself.
        workers: ranks that will say goodbye.
        deadline_seconds: longest silence.

    Raises:
        DlrmError: what `handle` and the channel raise; a goodbye from another rank, or a frame
            after one.
    """
    here = set(workers)
    steps = 0
    while here:
        frame = channel.receive(deadline_seconds)
        if frame.sender not in here:
            raise DlrmError(
                f"{frame.kind.name} {frame.step} of rank {frame.sender}, which has said goodbye "
                "or never had business here"
            )
        if is_goodbye(frame):
            here.remove(frame.sender)
            steps = frame.step
            continue
        for to, answer, dense_equivalent_bytes in handle(frame):
            channel.send(to, answer, dense_equivalent_bytes)
    return steps


def goodbye(rank: int, attempt: int, step: int) -> Frame:
    """The last frame of a worker to each server, after `step` steps."""
    return Frame(
        kind=Kind.CONTROL,
        sender=rank,
        attempt=attempt,
        step=step,
        boundary=0,
        microbatch=0,
        sections=(),
    )


def is_goodbye(frame: Frame) -> bool:
    """A CONTROL frame without sections; all others carry what they ask for."""
    return frame.kind is Kind.CONTROL and not frame.sections
