"""Messages between a program and the ranks of its world: plain values, and arrays."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.tensors import Piece

DONE, PART = "done", "part"
Arrays = Mapping[str, npt.NDArray[Any]]


@final
@dataclass(frozen=True, slots=True)
class Message:
    """An order of the program, or a rank's answer.

    Attributes:
        name: the order; of an answer `DONE`, or `PART` before that.
        number: that of the order.
        values: plain values.
        arrays: arrays by name.
    """

    name: str
    number: int
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arrays: Arrays = field(default_factory=dict[str, npt.NDArray[Any]])


def send(connection: Connection, message: Message) -> None:
    """Send a message; raises OSError if the other end is closed."""
    head = {
        "name": message.name,
        "number": message.number,
        "values": message.values,
        "has_arrays": bool(message.arrays),
    }
    connection.send_bytes(json.dumps(head).encode())
    if message.arrays:
        connection.send_bytes(safetensors.numpy.save(dict(message.arrays)))


def receive(connection: Connection) -> Message:
    """Receive a message; raises EOFError or OSError if the other end is closed."""
    head = json.loads(connection.recv_bytes())
    arrays = safetensors.numpy.load(connection.recv_bytes()) if head["has_arrays"] else {}
    return Message(head["name"], head["number"], head["values"], arrays)


def connection_of(one: socket.socket) -> Connection:
    """Make a connection for whole messages from a connected socket."""
    return Connection(one.detach())


def arrays_of(batch: Batch) -> dict[str, npt.NDArray[Any]]:
    """Convert a batch to arrays by name, for a message."""
    offsets = {} if batch.bags.offsets is None else {"offsets": batch.bags.offsets}
    found = {"dense": batch.dense_BI, "ids": batch.bags.values, **offsets, "label": batch.label_B}
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def batch_of(arrays: Arrays, tables: int) -> Batch:
    """Convert arrays back to the batch of `arrays_of`."""
    offsets = arrays.get("offsets")
    bags = Bags(arrays["ids"], offsets, 0 if offsets is None else tables)
    return Batch(arrays["dense"], bags, arrays["label"])


def piece_values(piece: Piece) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Convert a piece of a tensor to values and an array, for a message."""
    values = {"name": piece.name, "shape": piece.shape, "begin": piece.begin, "every": piece.every}
    return values, {"view": piece.view.numpy()}


def piece_of(message: Message) -> Piece:
    """Convert a message back to the piece of `piece_values`."""
    values = message.values
    return Piece(
        name=values["name"],
        shape=tuple(values["shape"]),
        begin=tuple(values["begin"]),
        every=values["every"],
        view=torch.from_numpy(message.arrays["view"]),
    )
