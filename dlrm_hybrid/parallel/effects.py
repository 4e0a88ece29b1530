"""What a worker asks of the world it lives in while it makes a step.

A worker's step is a generator: it yields an effect and is sent the result. In a process of its own
`ProcessRunner` carries an effect out at once; `InProcessRunner` runs the steps of all workers in
turns. Both run the same numeric code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.wire.frame import Frame

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """Compute once for all workers of a group, which live in one process; the result is one's own.

    Attributes:
        group: ranks of the workers.
        compute: the same for all; values to results, both in the order of `group`.
        value: what this worker has to say.
    """

    group: tuple[int, ...]
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    value: Any


Effect = Receive | Together
Program = Generator[Effect, Any, Result]
"""What a worker does: yields effects, is sent their results, returns."""

Send = Callable[[int, Frame, int], None]
"""(to, frame, dense_equivalent_bytes); encodes the frame before it returns, never waits."""


class Outgoing(NamedTuple):
    """What `Channel.send` takes.

    Attributes:
        to: rank.
        frame: may show memory that changes with the next step: send it before.
        dense_equivalent_bytes: what its tensors would take as full float32 tensors.
    """

    to: int
    frame: Frame
    dense_equivalent_bytes: int
