"""Averages gradients that stay on their device: only what was selected leaves it.

A step waits for the device once, for all tensors together: it then knows what was selected, whether
all is finite and, with nccl, how much the others send. Over gloo what was selected is copied to the
host, which is a second wait, and travels in the same packets as between trainers on CPUs.

Shapes: T tensors, K elements that a trainer sends, A trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.arrays import Bytes
from dlrm_hybrid.compress.device.feedback import DeviceFeedback, Selection
from dlrm_hybrid.compress.library.exchange import Exchange
from dlrm_hybrid.compress.library.packets import require_own
from dlrm_hybrid.wire.packet import decode_packet, encode_packet
from dlrm_hybrid.wire.sparse import sparse_of_all


def average_on_device(
    exchange: Exchange,
    compressor: DeviceFeedback,
    gradients: Sequence[Tensor],
    step: int,
    *,
    finds_unused: bool,
) -> NDArray[np.bool_]:
    """Overwrite gradients by the mean of what all trainers send.

    Args:
        exchange: between the trainers.
        compressor: of this one.
        gradients: float32 of all parameters, contiguous, on the compressor's device.
        step: counted from 0.
        finds_unused: whether gradients that are zero on all trainers count as unused.

    Returns:
        for each tensor whether it was used by any trainer, bool (T).

    Raises:
        DivergedError: a gradient is not finite, here or on another trainer; then no residual has
            changed here, or what was finite has joined it.
    """
    with exchange.shares_failure():
        numbers_M = compressor.begin(gradients, step, alone=exchange.size == 1)
        told_M = numbers_M
        if exchange.is_direct:
            told_M = torch.cat([numbers_M, exchange.announce(compressor.announced(numbers_M))])
    told = cast("list[int]", told_M.tolist())  # the host waits
    numbers, sizes = told[: numbers_M.numel()], told[numbers_M.numel() :]
    # Over nccl all others know by now of a failure; else they are told.
    with nullcontext() if exchange.is_direct else exchange.shares_failure():
        own = compressor.finish(numbers)
    used_T = np.ones(len(gradients), bool)
    if finds_unused:
        used_T = np.array(compressor.used(numbers))
    try:
        if exchange.is_direct:
            given = _directly(exchange, own, sizes)
            used_T = exchange.any_of(used_T) if finds_unused else used_T
        else:
            given, heads = _by_packets(exchange, compressor, own, used_T if finds_unused else None)
            for head in heads:
                used_T |= np.unpackbits(head, count=used_T.size).astype(bool)
    except BaseException:  # whatever it is, nobody has used what was sent
        compressor.put_back(own)
        raise
    if exchange.size > 1:  # else the gradients hold it
        for one in given:
            compressor.ops.scatter(*one, gradients, compressor.addresses_T)
        for one in gradients:
            one.div_(exchange.size)
    return used_T


def _directly(exchange: Exchange, own: Selection, sizes_A: Sequence[int]) -> list[Selection]:
    """What each trainer sends, from device to device, filled up to the most that one does."""
    sizes = exchange.sizes_of(sizes_A)
    width = max(sizes)
    indices_AK, values_AK = [
        exchange.gather_tensor(torch.nn.functional.pad(one, (0, width - one.numel())))
        for one in own
    ]
    rows = zip(indices_AK, values_AK, sizes, strict=True)
    return [Selection(indices[:size], values[:size]) for indices, values, size in rows]


def _by_packets(
    exchange: Exchange,
    compressor: DeviceFeedback,
    own: Selection,
    used_T: NDArray[np.bool_] | None,
) -> tuple[list[Selection], list[Bytes]]:
    """What each trainer sends, by way of the host; and which tensors each has used, as bits."""
    if exchange.size == 1:
        return [own], []
    head = b"" if used_T is None else np.packbits(used_T).tobytes()
    sections = [*compressor.sent(own).sections().values()]
    packets = exchange.gather(head + encode_packet(exchange.fingerprint, sections))
    given: list[Selection] = []
    for trainer, packet in enumerate(packets):
        if trainer == exchange.rank:
            given.append(own)
            continue
        found = decode_packet(memoryview(packet)[len(head) :])
        require_own(found.fingerprint, exchange.fingerprint)
        given.append(compressor.received(sparse_of_all(found.sections)))
    heads = [np.frombuffer(packet[: len(head)], np.uint8) for packet in packets]
    return given, heads if head else []
