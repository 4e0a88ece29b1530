"""What a program and the ranks of its world say to each other: plain values, and arrays."""

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

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch

Arrays = Mapping[str, npt.NDArray[Any]]


@final
@dataclass(frozen=True, slots=True)
class Message:
    """An order of the program, or what a rank answers.

    Attributes:
        name: what to do, or `done`.
        number: of the order.
        values: plain ones.
        arrays: by name.
    """

    name: str
    number: int
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arrays: Arrays = field(default_factory=dict[str, npt.NDArray[Any]])


def send(connection: Connection, message: Message) -> None:
    """Send a message; raises OSError if the other end is gone."""
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
    """The next message; raises EOFError or OSError if the other end is gone."""
    head = json.loads(connection.recv_bytes())
    arrays = safetensors.numpy.load(connection.recv_bytes()) if head["has_arrays"] else {}
    return Message(head["name"], head["number"], head["values"], arrays)


def connection_of(one: socket.socket) -> Connection:
    """A connected socket, for whole messages."""
    return Connection(one.detach())


def arrays_of(batch: Batch) -> dict[str, npt.NDArray[Any]]:
    """A batch, to be sent."""
    offsets = {} if batch.bags.offsets is None else {"offsets": batch.bags.offsets}
    found = {"dense": batch.dense_BI, "ids": batch.bags.values, **offsets, "label": batch.label_B}
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def batch_of(arrays: Arrays, tables: int) -> Batch:
    """The batch that `arrays_of` has sent."""
    offsets = arrays.get("offsets")
    bags = Bags(arrays["ids"], offsets, 0 if offsets is None else tables)
    return Batch(arrays["dense"], bags, arrays["label"])
