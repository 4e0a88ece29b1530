"""Order logs: the order in which a server took messages, all that asynchronous results depend on.

One record of 16 bytes for each message: kind, sender, number. The log of the leader also has each
lease as `DECISION` (trainer, first batch, number of batches) and each rest as `SAVE` (its step).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.disk import RUN_FOLDER_KEY, append, plain_file, writing
from dlrm_hybrid.parallel.dense.server import Handle
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.types import DataError
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind

TAKEN = (Kind.PUSH, Kind.PULL, Kind.LOOKUP, Kind.UPDATE)  # kinds that change or read state
_RECORD = np.dtype([("kind", "<u2"), ("sender", "<u2"), ("count", "<u4"), ("number", "<u8")])


class Taken(NamedTuple):
    """A message that a server took, a lease that the leader gave, or a rest.

    Attributes:
        kind: kind of the message.
        sender: rank of the sender; the trainer of a lease.
        number: number of the message; the first batch of a lease; the step of a rest.
        batches: number of batches in a lease; 0 for messages.
    """

    kind: Kind
    sender: int
    number: int
    batches: int = 0


def order_file(run_folder: Path, rank: str) -> Path:
    """Path of the order log of the server of this name."""
    return run_folder / "log" / f"order.{rank}.bin"


def matters(frame: Frame) -> bool:
    """Whether results depend on when a server takes this frame."""
    return frame.kind in TAKEN and frame.microbatch != EVALUATION


@final
@dataclass(frozen=True, slots=True)
class OrderLog:
    """Writes the order log of one server.

    Attributes:
        path: path of the log.
        stream: the file, unbuffered, so that a full disk shows at once.
    """

    path: Path
    stream: FileIO

    def add(self, taken: Taken) -> None:
        """Append one record; raises ResourceError if it cannot be written."""
        record = (taken.kind, taken.sender, taken.batches, taken.number)
        with writing(self.path, RUN_FOLDER_KEY):
            append(self.stream.fileno(), np.array(record, _RECORD).tobytes())

    def around(self, handlers: Mapping[Kind, Handle]) -> dict[Kind, Handle]:
        """Wrap handlers so that they log what they take."""
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
    """Read an order log.

    Raises:
        DataError: the log is missing or malformed.
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
    """Lets frames through to one server in a recorded order, whenever they arrive.

    Attributes:
        handle: handler of the server.
        order: the recorded messages.
    """

    handle: Handle
    order: Iterator[Taken]
    _held: dict[Taken, Frame] = field(default_factory=dict[Taken, Frame])
    _due: Taken | None = None

    def __post_init__(self) -> None:
        self._due = next(self.order, None)

    @property
    def due(self) -> Taken | None:
        """The next message due; None at the end of the record."""
        return self._due

    @property
    def held(self) -> Collection[Taken]:
        """Messages that arrived before they are due."""
        return self._held.keys()

    def take(self, frame: Frame) -> Iterator[Outgoing]:
        """Keep a frame until it is due; yields the frames to send for all that are due now.

        It yields one by one: frames that one causes must be sent before the next is handled.
        """
        if not matters(frame):
            yield from self.handle(frame)
            return
        self._held[Taken(frame.kind, frame.sender, frame.number)] = frame
        while self._due is not None and self._due in self._held:
            due = self._held.pop(self._due)
            self._due = next(self.order, None)
            yield from self.handle(due)
