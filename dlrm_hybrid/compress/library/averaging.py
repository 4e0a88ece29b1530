"""Averaging: what all trainers send in a step becomes the mean of their gradients.

The way it is done follows from what a method sends: see `averaging_of`. Gradients that stay on
their device are averaged by `average_on_device`: only what was selected leaves it. A step waits for
the device once, for all tensors together: it then knows what was selected, whether all is finite
and, with nccl, how much the others send. Over gloo what was selected is copied to the host, which
is a second wait, and travels in the same packets as between trainers on CPUs.

Shapes: K elements that are sent of N in T tensors; A trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple, Protocol, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.device.feedback import DeviceFeedback, DeviceSent
from dlrm_hybrid.compress.device.residual import Selections
from dlrm_hybrid.compress.device.shard import Selection
from dlrm_hybrid.compress.device.sums import sent
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor, Selected, Sent
from dlrm_hybrid.compress.host import fetched_numbers
from dlrm_hybrid.compress.library.exchange import Exchange
from dlrm_hybrid.compress.update import DenseUpdate, Update, decode
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import pack, unpack
from dlrm_hybrid.wire.gradient_levels import UpdateReceiver, UpdateSender
from dlrm_hybrid.wire.packet import decode_packet, encode_packet
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Destination, Elements

_AGREED = {Op.LEADER, Op.UNION}  # rounds after which all trainers send the same elements
_TYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


Part = Update | Sent
"""What a trainer has sent."""


class Gathered(NamedTuple):
    """What all trainers send in a step.

    Attributes:
        parts: to be added up; each is decoded when it is taken.
        divisor: makes the mean of their sum.
        heads: what travelled before them, of all trainers.
    """

    parts: Iterable[Part]
    divisor: int
    heads: list[bytes]

    def mean_(self, values: Sequence[Tensor]) -> None:
        """Overwrite tensors by the mean: float32 on the CPU, contiguous."""
        for tensor in values:
            tensor.zero_()
        destination = Destination([tensor.numpy().reshape(-1) for tensor in values])
        for part in self.parts:
            update = part if isinstance(part, DenseUpdate | Elements) else part.elements()
            update.add_to(destination)
        if self.divisor > 1:
            for tensor in values:
                tensor.div_(self.divisor)


class Averaging(Protocol):
    """A way to exchange what trainers send; its state only makes messages shorter."""

    def gather(self, exchange: Exchange, sent: Sent, head: bytes) -> Gathered:
        """Exchange what trainers send.

        Args:
            exchange: between the trainers.
            sent: what this trainer sends.
            head: bytes that travel before it, as many from each trainer.
        """
        ...

    def restart(self) -> None:
        """Rely no longer on what other trainers remember of earlier messages."""


@final
class ByPackets(Averaging):
    """Sends a packet to every other trainer."""

    def __init__(self, counts: Sequence[int], fingerprint: int) -> None:
        self._counts, self._fingerprint = counts, fingerprint

    @override
    def gather(self, exchange: Exchange, sent: Sent, head: bytes) -> Gathered:
        packet = encode_packet(self._fingerprint, [*sent.sections().values()])
        messages = exchange.gather(head + packet)
        return _gathered(exchange, sent, messages, len(head), self._update)

    def _update(self, trainer: int, packet: memoryview) -> Update:
        decoded = decode_packet(packet)
        require_fingerprint(decoded.fingerprint, self._fingerprint)
        if [section.count for section in decoded.sections] != self._counts:
            raise DlrmError("a trainer has sent tensors of other sizes than this one's")
        return decode(decoded.sections, "packet")


@final
class ByLevels(Averaging):
    """As `ByPackets`, but codes levels with tables that receivers keep; `wire.gradient_levels`."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], fingerprint: int) -> None:
        self._shapes = [_matrix(shape) for shape in shapes]
        self._fingerprint = fingerprint
        self._sender = UpdateSender(self._shapes)
        self._receivers: dict[int, UpdateReceiver] = {}
        self._group: dist.ProcessGroup | None = None  # the one whose members have the tables

    @override
    def gather(self, exchange: Exchange, sent: Sent, head: bytes) -> Gathered:
        if exchange.group is not self._group:
            self._group = exchange.group
            self.restart()
        try:
            with exchange.shares_failure():
                elements = sent.elements()
                packet = encode_packet(self._fingerprint, [self._sender.encode(0, elements)])
            messages = exchange.gather(head + packet)
        except BaseException:
            self.restart()  # nobody has the tables that this message may have brought
            raise
        return _gathered(exchange, sent, messages, len(head), self._elements)

    @override
    def restart(self) -> None:
        self._sender.restart()

    def _elements(self, trainer: int, packet: memoryview) -> Elements:
        decoded = decode_packet(packet)
        require_fingerprint(decoded.fingerprint, self._fingerprint)
        if trainer not in self._receivers:
            beside = next(iter(self._receivers.values()), None)
            self._receivers[trainer] = UpdateReceiver(self._shapes, beside)
        return self._receivers[trainer].decode(decoded.sections[0])


@final
class ByAgreement(Averaging):
    """Sends values alone: all trainers have agreed on the elements, so positions need not travel.

    Two trainers exchange all values. More trainers reduce a part each, as of dense gradients, so
    that what each sends does not grow with their number.
    """

    @override
    def gather(self, exchange: Exchange, sent: Sent, head: bytes) -> Gathered:
        dtype = sent.dtype
        if exchange.size > 2 or exchange.is_direct:
            heads = exchange.gather(head)
            part, values = _copied(sent)
            exchange.mean_(values, _TYPES[dtype])
            return Gathered([part], 1, heads)
        elements = sent.elements()
        messages = exchange.gather(head + pack(elements.values_K, dtype).tobytes())
        mean_K = np.zeros_like(elements.values_K)
        for message in messages:
            values_K = unpack(np.frombuffer(message[len(head) :], np.uint8), dtype)
            if values_K.size != mean_K.size:
                raise DlrmError(f"a trainer has sent {values_K.size} of {mean_K.size} values")
            mean_K += values_K
        mean_K /= np.float32(exchange.size)
        heads = [message[: len(head)] for message in messages]
        return Gathered([elements._replace(values_K=mean_K)], 1, heads)


def _gathered(
    exchange: Exchange,
    sent: Sent,
    messages: Sequence[bytes],
    head_bytes: int,
    decoded: Callable[[int, memoryview], Update],
) -> Gathered:
    """What is in messages; this trainer's own need not be decoded if it was selected."""
    parts = (
        sent
        if trainer == exchange.rank and isinstance(sent, Selected | DeviceSent)
        else decoded(trainer, memoryview(message)[head_bytes:])
        for trainer, message in enumerate(messages)
    )
    return Gathered(parts, exchange.size, [message[:head_bytes] for message in messages])


def _copied(sent: Sent) -> tuple[Part, list[Tensor]]:
    """What is sent, and its values in memory of its own."""
    if isinstance(sent, DeviceSent):
        copy = sent.copied()
        return copy, [own.values_K for own in copy.selections]
    elements = sent.elements()
    values_K = elements.values_K.copy()
    return elements._replace(values_K=values_K), [torch.from_numpy(values_K)]


def averaging_of(compressor: Compressor, fingerprint: int) -> Averaging:
    """The averaging that takes the fewest bytes for what a compressor sends."""
    if compressor.sends_levels:
        return ByLevels([spec.shape for spec in compressor.layout.specs], fingerprint)
    return (
        ByAgreement()
        if _AGREED & {*compressor.rounds}
        else ByPackets(compressor.layout.counts, fingerprint)
    )


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the same elements in rows: of a convolution, one for each output."""
    return (shape[0], prod(shape[1:])) if len(shape) > 2 else shape


def average_on_device(
    exchange: Exchange,
    compressor: DeviceFeedback,
    averaging: Averaging,
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
    used_T = np.ones(len(gradients), bool)
    if exchange.is_direct and compressor.is_own and not compressor.sends_levels:
        parts, divisor = _directly(exchange, compressor, gradients, step), exchange.size
        if finds_unused:
            used_T = exchange.any_of(compressor.residual.used_T)
    else:
        encoding = compressor.encode_in_place(gradients, step)
        own = exchange.drive(encoding, step, compressor.layout.size)
        if finds_unused:
            used_T = compressor.residual.used_T
        head = np.packbits(used_T).tobytes() if finds_unused else b""
        gathered = Gathered([own], 1, [])
        try:
            if exchange.size > 1:
                gathered = averaging.gather(exchange, own, head)
            parts, divisor = [*map(compressor.received, gathered.parts)], gathered.divisor
        except BaseException:  # whatever it is, nobody has used what was sent
            compressor.take_back(own)
            raise
        used_T = used_by_any(used_T, gathered.heads)
    for part in parts:
        compressor.residual.add(part, gradients)
    if divisor > 1:
        for gradient in gradients:
            gradient.div_(divisor)
    return used_T


def _directly(
    exchange: Exchange, compressor: DeviceFeedback, gradients: Sequence[Tensor], step: int
) -> Sequence[Selections]:
    """Gather what each trainer sends from device to device, padded to the longest."""
    with exchange.shares_failure():
        launched = compressor.launch(gradients, step)
        launched.append(exchange.announce(compressor.residual.announced(launched)))
    *numbers, announced = fetched_numbers(launched)  # the host waits
    own = compressor.finish(numbers)  # all others know by now of a failure
    try:
        return _from_all(exchange, own, exchange.sizes_of(announced))
    except BaseException:  # whatever it is, nobody has used what was sent
        compressor.take_back(own)
        raise


def _from_all(exchange: Exchange, own: DeviceSent, sizes_A: Sequence[int]) -> Sequence[Selections]:
    selections, kind = own.selections, _TYPES[own.dtype]
    sizes_AD = [[size] for size in sizes_A]
    if len(selections) > 1:  # which all have announced together
        own_D = [selection.indices_K.numel() for selection in selections]
        home = selections[0].indices_K.device
        gathered_AD = exchange.gather_tensor(sent(own_D, torch.int64, home))
        sizes_AD = fetched_numbers([*gathered_AD])
    parts: list[list[Selection]] = [[] for _ in sizes_AD]
    for (own_K, values_K), *sizes in zip(selections, *sizes_AD, strict=True):
        padding = (0, max(sizes) - own_K.numel())
        indices_AK = exchange.gather_tensor(torch.nn.functional.pad(own_K, padding))
        values_K = torch.nn.functional.pad(values_K.to(kind), padding)
        # Not every backend knows half precision, but all know bytes.
        bytes_A = exchange.gather_tensor(values_K.view(torch.uint8))
        values_AK = bytes_A.view(kind).float()
        for part, size, indices_K, values_K in zip(
            parts, sizes, indices_AK, values_AK, strict=True
        ):
            part.append(Selection(indices_K[:size], values_K[:size]))
    return parts


def used_by_any(used_T: NDArray[np.bool_], heads: Sequence[bytes]) -> NDArray[np.bool_]:
    """Which tensors any trainer has used, bool (T), by the bits of all; none if all count."""
    for head in heads:
        if head:
            bits_T = np.unpackbits(np.frombuffer(head, np.uint8), count=used_T.size)
            used_T = used_T | bits_T.astype(bool)
    return used_T


def require_fingerprint(fingerprint: int, expected: int) -> None:
    """Raise DlrmError if a packet's fingerprint is not that of this trainer's parameters."""
    if fingerprint != expected:
        raise DlrmError("a trainer has sent a packet of other parameters than this one's")
