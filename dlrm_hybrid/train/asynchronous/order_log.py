"""The order in which a server took messages: all that results of asynchronous runs depend on.

One record of 16 bytes for each message, as they were taken: kind, sender, number. In the log of
the leader also what it gave out, `DECISION`: the trainer, the first batch, how many; and `SAVE` for
each step at which all were at rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.disk import RUN_FOLDER_KEY, append, plain_file, writing
from dlrm_hybrid.parallel.boundaries import EVALUATION
from dlrm_hybrid.parallel.dense.server import Handle
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.types import DataError
from dlrm_hybrid.wire.frame import Frame, Kind

TAKEN = (Kind.PUSH, Kind.PULL, Kind.LOOKUP, Kind.UPDATE)  # what changes a server, or shows a change
_RECORD = np.dtype([("kind", "<u2"), ("sender", "<u2"), ("count", "<u4"), ("number", "<u8")])


class Taken(NamedTuple):
    """A message that a server took, batches that the leader gave out, or a rest.

    Attributes:
        kind: of the message.
        sender: its rank; of batches the trainer.
        number: of the message; of batches the first; of a rest the step.
        batches: how many; 0 of messages.
    """

    kind: Kind
    sender: int
    number: int
    batches: int = 0


def order_file(run_folder: Path, rank: str) -> Path:
    """Where the server of this name logs its order."""
    return run_folder / "log" / f"order.{rank}.bin"


def matters(frame: Frame) -> bool:
    """Whether results depend on when a server takes this frame."""
    return frame.kind in TAKEN and frame.microbatch != EVALUATION


@final
@dataclass(frozen=True, slots=True)
class OrderLog:
    """Writes the order of one server.

    Attributes:
        path: of the log.
        stream: where it goes, unbuffered: what a full disk refuses is said at once, not at the end.
    """

    path: Path
    stream: FileIO

    def add(self, taken: Taken) -> None:
        """Append one record; raises ResourceError if it cannot be written."""
        record = (taken.kind, taken.sender, taken.batches, taken.number)
        with writing(self.path, RUN_FOLDER_KEY):
            append(self.stream.fileno(), np.array(record, _RECORD).tobytes())

    def around(self, handlers: Mapping[Kind, Handle]) -> dict[Kind, Handle]:
        """The same handlers, which log what they take."""
        return {
            kind: self._logging(handle) if kind in TAKEN else handle
            for kind, handle in handlers.items()
        }

    def _logging(self, handle: Handle) -> Handle:
        def logged(frame: Frame) -> Iterable[Outgoing]:
            if matters(frame):
                self.add(Taken(frame.kind, frame.sender, frame.number))
            return handle(frame)

        return logged


def read_order(path: Path) -> list[Taken]:
    """What a server took, in its order.

    Raises:
        DataError: there is no such log, or it is broken.
    """
    try:
        content = plain_file(path.parent, path.name).read_bytes()
    except (OSError, DataError) as error:
        raise DataError(f"{error}; was the run made with sync.record=true?") from error
    if len(content) % _RECORD.itemsize:
        raise DataError(f"{path}: {len(content)} bytes are no whole records")
    try:
        return [
            Taken(Kind(kind), sender, number, count)
            for kind, sender, count, number in np.frombuffer(content, _RECORD).tolist()
        ]
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


@final
@dataclass(slots=True)
class Gate:
    """Lets frames through to one server in a recorded order, whenever they come.

    Attributes:
        handle: of the server.
        order: what is due, in its order; messages only.
    """

    handle: Handle
    order: Iterator[Taken]
    _held: dict[Taken, Frame] = field(default_factory=dict[Taken, Frame])
    _due: Taken | None = None

    def __post_init__(self) -> None:
        self._due = next(self.order, None)

    @property
    def due(self) -> Taken | None:
        """What must come next; None at the end of the record."""
        return self._due

    @property
    def held(self) -> Collection[Taken]:
        """What has come before it is due."""
        return self._held.keys()

    def take(self, frame: Frame) -> Iterator[Outgoing]:
        """Keep a frame until it is due; what is to be sent for all that is due now.

        One after the other: what a frame has brought about is sent before the next is handled.
        """
        if not matters(frame):
            yield from self.handle(frame)
            return
        self._held[Taken(frame.kind, frame.sender, frame.number)] = frame
        while self._due is not None and self._due in self._held:
            due = self._held.pop(self._due)
            self._due = next(self.order, None)
            yield from self.handle(due)
