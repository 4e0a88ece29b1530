"""How the workers of a world talk about the run itself: values and tensors in control frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.parallel.messages import (
    Topic,
    control,
    num_bytes,
    tensors_of,
    values_of,
    wanted,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One rank's side.

    Attributes:
        attempt: how often the run has been restarted.
        channel: to the others.
        mailbox: of what they send.
        patience_seconds: how long to wait for an answer.
    """

    attempt: int
    channel: Channel
    mailbox: Mailbox
    patience_seconds: float

    @property
    def rank(self) -> int:
        """Whose side this is."""
        return self.channel.rank

    def tell(self, to: int, step: int, topic: Topic, values: Mapping[str, Any]) -> None:
        """Send values."""
        self.channel.send(to, control(self.rank, self.attempt, step, topic, values), 0)

    def give(self, to: int, step: int, topic: Topic, tensors: Mapping[str, Tensor]) -> None:
        """Send contiguous tensors."""
        frame = control(self.rank, self.attempt, step, topic, {}, tensors)
        self.channel.send(to, frame, num_bytes(tensors))

    def hear(self, sender: int, step: int, topic: Topic) -> dict[str, Any]:
        """Values from a rank."""
        return values_of(self.mailbox.take(wanted(sender, step, topic), self.patience_seconds))

    def take(self, sender: int, step: int, topic: Topic) -> dict[str, Tensor]:
        """Tensors from a rank."""
        return tensors_of(self.mailbox.take(wanted(sender, step, topic), self.patience_seconds))

    def fetch(self, servers: Sequence[int], step: int, stage: int) -> dict[str, Tensor]:
        """The weights of a stage that servers own, as they are after `step` steps."""
        for rank in servers:
            self.tell(rank, step, Topic.FETCH, {"stage": stage})
        tensors: dict[str, Tensor] = {}
        for rank in servers:
            tensors |= self.take(rank, step, Topic.TENSORS)
        return tensors
