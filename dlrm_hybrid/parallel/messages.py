"""Control messages between ranks: values as JSON, then named tensors.

The first section of such a frame holds the values, the others the tensors that they name, in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.mailbox import Mailbox, Receive
from dlrm_hybrid.compress.host import require_cpu
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.telemetry.spans import SpanClock, Within
from dlrm_hybrid.types import Version
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Frame, Kind

NAMES = "tensors"


def message(
    kind: Kind,
    sender: int,
    attempt: int,
    number: int,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> Frame:
    """A frame that holds values, and views of contiguous tensors.

    Raises:
        ValueError: a tensor is not in the CPU's memory.
    """
    named = tensors or {}
    for name, view in named.items():
        require_cpu(view, name, "a message")
    text = json.dumps({**values, NAMES: {name: list(named[name].shape) for name in named}})
    sections = [dense(0, np.frombuffer(text.encode(), np.uint8))]
    sections += [dense(0, view.detach().view(-1).numpy()) for view in named.values()]
    return Frame(kind=kind, sender=sender, attempt=attempt, number=number, sections=tuple(sections))


def values_of(frame: Frame) -> dict[str, Any]:
    """The values of a message; `tensors` among them are names and shapes."""
    values: dict[str, Any] = json.loads(bytes(frame.sections[0].payload))
    return values


def tensors_of(frame: Frame) -> dict[str, Tensor]:
    """The tensors of a message, copied."""
    shapes: Mapping[str, list[int]] = values_of(frame)[NAMES]
    return {
        name: torch.from_numpy(array_of(section).copy()).view(shape)
        for (name, shape), section in zip(shapes.items(), frame.sections[1:], strict=True)
    }


def piece_message(
    kind: Kind, sender: int, attempt: int, number: int, piece: Piece, values: Mapping[str, Any]
) -> Frame:
    """A frame that holds a piece of a tensor, and values."""
    place = {"shape": piece.shape, "begin": piece.begin, "every": piece.every}
    tensors = {piece.name: piece.view.cpu()}
    return message(kind, sender, attempt, number, {**values, **place}, tensors)


def piece_of(frame: Frame) -> Piece:
    """The piece in a frame of `piece_message`, copied."""
    values = values_of(frame)
    ((name, view),) = tensors_of(frame).items()
    return Piece(
        name=name,
        shape=tuple(values["shape"]),
        begin=tuple(values["begin"]),
        every=values["every"],
        view=view,
    )


def reply(
    frame: Frame,
    kind: Kind,
    rank: int,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> Outgoing:
    """A rank's answer to a message, with its number: values, and views of tensors."""
    content = message(kind, rank, frame.attempt, frame.number, values, tensors)
    return Outgoing(frame.sender, content, num_bytes(tensors or {}))


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Messenger:
    """Sends and receives messages of one rank.

    Attributes:
        attempt: how often the run has been restarted.
        channel: channel to the other ranks.
        mailbox: holds the frames that they send.
        patience_seconds: how long to wait for a message.
        clock: measures waiting, by the kind of the message.
    """

    attempt: int
    channel: Channel
    mailbox: Mailbox
    patience_seconds: float
    clock: SpanClock

    @property
    def rank(self) -> int:
        """Rank of the sender."""
        return self.channel.rank

    def send(self, to: int, kind: Kind, number: int, values: Mapping[str, Any]) -> None:
        """Send plain values as JSON, in a frame of this kind."""
        self.channel.send(to, message(kind, self.rank, self.attempt, number, values), 0)

    def send_tensors(self, to: int, kind: Kind, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors by name, which must be contiguous, in a frame of this kind."""
        frame = message(kind, self.rank, self.attempt, number, {}, tensors)
        self.channel.send(to, frame, num_bytes(tensors))

    def receive(self, sender: int, kind: Kind, number: int) -> dict[str, Any]:
        """Wait for the values that a rank sends."""
        return values_of(self._take(sender, kind, number))

    def receive_tensors(self, sender: int, kind: Kind, number: int) -> dict[str, Tensor]:
        """Wait for the named tensors of a message from a rank."""
        return tensors_of(self._take(sender, kind, number))

    def ask(self, to: int, kind: Kind, number: int, values: Mapping[str, Any], by: Kind) -> Frame:
        """Send plain values, and wait for the frame of the kind `by` that answers them."""
        self.send(to, kind, number, values)
        return self._take(to, by, number)

    def receive_unless(
        self, sender: int, kind: Kind, number: int, is_off: Callable[[], bool]
    ) -> Frame | None:
        """Wait for a frame from a rank; None as soon as `is_off` says that it will not come."""
        effect = Receive(kind, sender, number)
        with self._waiting(kind):
            return self.mailbox.take_unless(effect, is_off, self.patience_seconds)

    def fetch(self, servers: Sequence[int], version: Version, stage: int) -> dict[str, Tensor]:
        """Fetch the weights of a stage from these servers, once they have made `version`."""
        for rank in servers:
            self.send(rank, Kind.FETCH, version, {"stage": stage})
        tensors: dict[str, Tensor] = {}
        for rank in servers:
            tensors |= self.receive_tensors(rank, Kind.WEIGHTS, version)
        return tensors

    def _take(self, sender: int, kind: Kind, number: int) -> Frame:
        with self._waiting(kind):
            return self.mailbox.take(Receive(kind, sender, number), self.patience_seconds)

    def _waiting(self, kind: Kind) -> Within:
        return self.clock.waiting(kind.name.lower())
