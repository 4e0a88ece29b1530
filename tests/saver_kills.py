"""A process that saves and ends at one of the file operations of saving; named by a test."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.folder import RetentionPolicy
from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.engine import Holder
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.saver import CheckpointWriter
from dlrm_hybrid.types import Group, Version

OPERATIONS = ("mkdir", "open", "write", "fsync", "replace", "rename", "unlink", "rmdir")
KILLED = 77


def tensors(step: int) -> dict[str, Tensor]:
    """What the model holds after so many steps."""
    return {
        "bottom.1.weight": torch.full((3, 2), float(step)),
        "embedding.1.weight": torch.full((50, 4), float(step)),
    }


@dataclass
class Held(Holder):
    """What a process without servers holds."""

    messenger: Messenger
    tensors: dict[str, Tensor]

    def pieces(self) -> list[Piece]:
        groups = {name: Group.DENSE for name in self.tensors}
        groups["embedding.1.weight"] = Group.EMBEDDINGS
        pieces = (full_pieces({name: x}, groups[name]) for name, x in self.tensors.items())
        return [piece for (piece,) in pieces]

    def settled(self) -> Version:
        return Version(0)


def saver(root: Path, held: dict[str, Tensor]) -> CheckpointWriter:
    (channel,) = in_process_channels(1)
    messenger = Messenger(
        attempt=0,
        channel=channel,
        mailbox=Mailbox(channel, 0, 1),
        patience_seconds=0.0,
        clock=SpanClock(),
    )
    return CheckpointWriter(
        holder=Held(messenger, held),
        names={0: "worker-0"},
        writer=ShardWriter(root=root, rank="worker-0", attempt=0),
        retention=RetentionPolicy(newest=1, best=True),
        facts=lambda progress: {
            "score": {"part": "test", "monitor": "log_loss", "value": 1.0 / progress.step}
        },
    )


def strike_at(number: int, strike: Callable[[], None], set_function: Callable[..., None]) -> None:
    """Let the operation of this number strike; a write writes half before, all others nothing."""
    count = iter(range(10_000))

    def struck(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                if name == "write":
                    descriptor, chunk = arguments
                    real(descriptor, chunk[: len(chunk) // 2])
                strike()
            return real(*arguments, **options)

        return call

    for name in OPERATIONS:
        set_function(os, name, struck(name, getattr(os, name)))


def is_killed_anywhere(argument: str, report, stop) -> None:
    """Fork for every operation of a save; tell how each child has ended."""
    number, code = 0, KILLED
    while code == KILLED:
        child = os.fork()
        if child == 0:
            _save(Path(argument) / str(number), number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report(Event(Kind.TICK, number, 0.0, {"code": code}))
        number += 1


def _save(root: Path, number: int) -> None:
    try:
        held = tensors(1)
        one = saver(root, held)
        one.save(Progress(step=1))
        one.finish()
        for name, tensor in tensors(2).items():
            held[name].copy_(tensor)
        strike_at(number, lambda: os._exit(KILLED), setattr)
        one.save(Progress(step=2))
        one.finish()
        os._exit(0)
    finally:
        os._exit(1)
