"""Frames in which ranks talk about the run: small values as JSON, and named tensors.

A CONTROL frame has its topic where others have a boundary, and its values as JSON in the first
section. What follows are tensors, in the order of the names among the values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.parallel.effects import Receive
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Frame, Kind

NAMES = "tensors"


class Topic(IntEnum):
    """What a control frame is about."""

    REPORT = 1
    DECISION = 2
    FETCH = 3
    TENSORS = 4
    LOGITS = 5
    STOP_REQUEST = 6
    STOP_DECISION = 7
    SAVE = 8
    COPIED = 9
    SHARD = 10
    COMMIT = 11


def control(
    sender: int,
    attempt: int,
    step: int,
    topic: Topic,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> Frame:
    """A frame with values, and contiguous tensors whose memory it shows."""
    held = tensors or {}
    text = json.dumps({**values, NAMES: {name: list(held[name].shape) for name in held}})
    sections = [dense(0, np.frombuffer(text.encode(), np.uint8))]
    sections += [dense(0, tensor.detach().view(-1).numpy()) for tensor in held.values()]
    return Frame(
        kind=Kind.CONTROL,
        sender=sender,
        attempt=attempt,
        step=step,
        boundary=topic,
        microbatch=0,
        sections=tuple(sections),
    )


def wanted(sender: int, step: int, topic: Topic) -> Receive:
    """Asks a mailbox for a control frame."""
    return Receive(Kind.CONTROL, sender=sender, step=step, boundary=topic, microbatch=0)


def values_of(frame: Frame) -> dict[str, Any]:
    """The values of a control frame; `tensors` among them are names and shapes."""
    values: dict[str, Any] = json.loads(bytes(frame.sections[0].payload))
    return values


def tensors_of(frame: Frame) -> dict[str, Tensor]:
    """The tensors of a control frame, in memory of their own."""
    shapes: Mapping[str, list[int]] = values_of(frame)[NAMES]
    return {
        name: torch.from_numpy(array_of(section).copy()).view(shape)
        for (name, shape), section in zip(shapes.items(), frame.sections[1:], strict=True)
    }


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Of the elements of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
