"""How what all trainers send of a step becomes the mean of their gradients.

Which way a method takes follows from what it sends: see `averaging_of`. Gradients that stay on
their device are averaged by `average_on_device`: only what was selected leaves it. A step waits for
the device once, for all tensors together: it then knows what was selected, whether all is finite
and, with nccl, how much the others send. Over gloo what was selected is copied to the host, which
is a second wait, and travels in the same packets as between trainers on CPUs.

Shapes: K elements that are sent of N in T tensors; A trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Protocol, cast, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Bytes
from dlrm_hybrid.compress.device.feedback import DeviceFeedback, Selection
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor, Sent
from dlrm_hybrid.compress.library.exchange import Exchange
from dlrm_hybrid.compress.library.packets import decode
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import pack, unpack
from dlrm_hybrid.wire.gradient_levels import UpdateReceiver, UpdateSender
from dlrm_hybrid.wire.packet import decode_packet, encode_packet
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Destination, Elements, sparse_of_all

_AGREED = {Op.LEADER, Op.UNION}  # rounds after which all trainers send the same elements
_TYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


class Averaging(Protocol):
    """One way; remembers at most what makes messages shorter."""

    def mean_(
        self, exchange: Exchange, sent: Sent, values: Sequence[Tensor], head: bytes
    ) -> list[bytes]:
        """Overwrite tensors by the mean of what all trainers send.

        Args:
            exchange: between them.
            sent: what this one sends.
            values: the tensors: float32 on the CPU, contiguous.
            head: travels before it, as many bytes from everyone.

        Returns:
            the heads of all.
        """
        ...

    def restart(self) -> None:
        """Others may have forgotten what this one has sent."""


@final
class ByPackets(Averaging):
    """Every trainer gives a packet to every other, and adds up what it is given."""

    def __init__(self, fingerprint: int) -> None:
        self._fingerprint = fingerprint

    @override
    def mean_(
        self, exchange: Exchange, sent: Sent, values: Sequence[Tensor], head: bytes
    ) -> list[bytes]:
        given = exchange.gather(
            head + encode_packet(self._fingerprint, [*sent.sections().values()])
        )
        for own in values:
            own.zero_()
        for one in given:
            found = decode(memoryview(one)[len(head) :])
            require_own(found.fingerprint, self._fingerprint)
            found.add_to(values)
        for own in values:
            own.div_(exchange.size)
        return [one[: len(head)] for one in given]


@final
class ByLevels(Averaging):
    """Likewise, but levels are coded with tables that receivers keep; `wire.gradient_levels`."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], fingerprint: int) -> None:
        self._shapes = [_matrix(shape) for shape in shapes]
        self._fingerprint = fingerprint
        self._sender = UpdateSender(self._shapes)
        self._receivers: dict[int, UpdateReceiver] = {}
        self._group: dist.ProcessGroup | None = None  # that has the tables

    @override
    def mean_(
        self, exchange: Exchange, sent: Sent, values: Sequence[Tensor], head: bytes
    ) -> list[bytes]:
        if exchange.group is not self._group:
            self._group = exchange.group
            self.restart()
        try:
            with exchange.shares_failure():
                own = sent.elements()
                packet = encode_packet(self._fingerprint, [self._sender.encode(0, own)])
            given = exchange.gather(head + packet)
        except BaseException:
            self.restart()  # nobody has the tables that this message may have brought
            raise
        destination = _zeroed(values)
        for trainer, one in enumerate(given):
            is_own = trainer == exchange.rank
            found = own if is_own else self._elements(trainer, memoryview(one)[len(head) :])
            found.add_to(destination)
        for one in values:
            one.div_(exchange.size)
        return [one[: len(head)] for one in given]

    @override
    def restart(self) -> None:
        self._sender.restart()

    def _elements(self, trainer: int, packet: memoryview) -> Elements:
        found = decode_packet(packet)
        require_own(found.fingerprint, self._fingerprint)
        if trainer not in self._receivers:
            beside = next(iter(self._receivers.values()), None)
            self._receivers[trainer] = UpdateReceiver(self._shapes, beside)
        return self._receivers[trainer].decode(found.sections[0])


@final
class ByAgreement(Averaging):
    """Values alone: all trainers have agreed on the elements, whose positions nobody needs.

    Two trainers give them to each other. More reduce them, each a part, as dense gradients are:
    what one sends does not grow with their number.
    """

    @override
    def mean_(
        self, exchange: Exchange, sent: Sent, values: Sequence[Tensor], head: bytes
    ) -> list[bytes]:
        own, dtype = sent.elements(), sent.dtype
        if exchange.size <= 2:
            given = exchange.gather(head + pack(own.values_K, dtype).tobytes())
            heads, mean_K = [one[: len(head)] for one in given], np.zeros_like(own.values_K)
            for one in given:
                values_K = unpack(np.frombuffer(one[len(head) :], np.uint8), dtype)
                if values_K.size != mean_K.size:
                    raise DlrmError(f"a trainer has sent {values_K.size} of {mean_K.size} values")
                mean_K += values_K
            mean_K /= np.float32(exchange.size)
        else:
            heads, mean_K = exchange.gather(head), own.values_K.copy()
            exchange.mean_([torch.from_numpy(mean_K)], _TYPES[dtype])
        Elements(own.offsets_E, own.indices_K, mean_K).copy_to(_zeroed(values))
        return heads


def averaging_of(compressor: Compressor, fingerprint: int) -> Averaging:
    """The way that takes the fewest bytes for what a compressor sends."""
    if compressor.sends_levels:
        return ByLevels([spec.shape for spec in compressor.layout.specs], fingerprint)
    return ByAgreement() if _AGREED & {*compressor.rounds} else ByPackets(fingerprint)


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same elements in rows: of a convolution, one for each of its outputs."""
    return (shape[0], prod(shape[1:])) if len(shape) > 2 else shape


def _zeroed(values: Sequence[Tensor]) -> Destination:
    for one in values:
        one.zero_()
    return Destination([one.numpy().reshape(-1) for one in values])


def average_on_device(
    exchange: Exchange,
    compressor: DeviceFeedback,
    gradients: Sequence[Tensor],
    step: int,
    *,
    finds_unused: bool,
) -> NDArray[np.bool_]:
    """Overwrite gradients by the mean of what all trainers send.

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


def require_own(given: int, own: int) -> None:
    """Raise DlrmError if a packet has another fingerprint than the own parameters."""
    if given != own:
        raise DlrmError("a trainer has sent a packet of other parameters than this one's")
