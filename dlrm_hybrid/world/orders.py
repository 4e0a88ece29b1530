"""Orders of a program to the workers of its world, and their answers: frames through sockets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.parallel.messages import message
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode

Tensors = Mapping[str, Tensor]


def order(do: str, number: int, values: Mapping[str, Any], tensors: Tensors) -> Frame:
    """Make an order: what to do, with values and tensors."""
    return message(Kind.DECISION, 0, 0, number, {"do": do, **values}, tensors)


def send(connection: Connection, frame: Frame) -> None:
    """Send a frame; raises OSError if the other end is closed."""
    connection.send_bytes(encode(frame))


def receive(connection: Connection) -> Frame:
    """Receive a frame; raises EOFError or OSError if the other end is closed."""
    return decode(connection.recv_bytes())


def connection_of(socket_: socket.socket) -> Connection:
    """Make a connection for whole messages from a connected socket."""
    return Connection(socket_.detach())


def tensors_of_batch(batch: Batch) -> dict[str, Tensor]:
    """Convert a batch to tensors by name, for an order."""
    offsets = {} if batch.bags.offsets is None else {"offsets": batch.bags.offsets}
    arrays = {"dense": batch.dense_BI, "ids": batch.bags.values, **offsets, "label": batch.label_B}
    if batch.bags.weights is not None:
        arrays["id_weights"] = batch.bags.weights
    if batch.bags.averaged:
        arrays["averaged"] = np.array(batch.bags.averaged, np.int64)
    if batch.weight_B is not None:
        arrays["weight"] = batch.weight_B
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def batch_of(tensors: Tensors, tables: int) -> Batch:
    """Convert tensors back to the batch of `tensors_of_batch`."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    offsets = arrays.get("offsets")
    averaged = tuple(arrays.get("averaged", np.empty(0, np.int64)).tolist())
    tables, id_weights = 0 if offsets is None else tables, arrays.get("id_weights")
    bags = Bags(arrays["ids"], offsets, tables, averaged, id_weights)
    return Batch(arrays["dense"], bags, arrays["label"], arrays.get("weight"))
