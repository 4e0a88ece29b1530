"""Exchanges compressed gradients over a torch process group, and counts the bytes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Never, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import Collective, Sections, reduce
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.packet import decode_packet, encode_packet

Result = TypeVar("Result")
_FAILED = -1
_SIZES, _TAGS = 2**36, 2**26  # bounds of a message's size and of a tag, which share an int64


@dataclass(slots=True)
class Traffic:
    """Bytes exchanged between this trainer and all others, without the transport's own headers.

    Attributes:
        steps: number of steps reduced.
        sent: bytes sent by this trainer.
        received: bytes received from other trainers.
        dense: bytes it would have sent in a ring all-reduce of float32 gradients.
    """

    steps: int = 0
    sent: int = 0
    received: int = 0
    dense: float = 0.0


@final
class Exchange:
    """Exchanges bytes with all members of a process group, and counts them.

    Args:
        group: of the trainers; None for all. Tensors travel on the CPU, with nccl on the GPU.
        traffic: counts the bytes.
        step: its number; must be the same for all.
        fingerprint: of the parameters; must be the same for all.

    Attributes:
        group: of the trainers.
        rank: of this trainer in the group.
        size: members of the group.
        fingerprint: as given.
        traffic: what was exchanged.
        is_direct: tensors travel from device to device, among several members.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        traffic: Traffic,
        step: int = 0,
        fingerprint: int = 0,
    ) -> None:
        self.group = dist.group.WORLD if group is None else group  # which may be another one later
        self._step, self.fingerprint = step, fingerprint
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = traffic
        is_nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda") if is_nccl else torch.device("cpu")
        self.is_direct = is_nccl and self.size > 1

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all members, in their order.

        Raises:
            DivergedError: a member has failed.
            ValueError: they are at different steps, or have different parameters.
        """
        return self._gather(message, len(message) + self._tag)

    @property
    def _tag(self) -> int:
        """The tag of an announced size, by which others see another step or other parameters."""
        return _SIZES * ((self._step + self.fingerprint) % _TAGS)

    def fail(self) -> None:
        """Take part in a `gather` that then fails in all other members."""
        self._gather(b"", _FAILED)

    @contextmanager
    def shares_failure(self) -> Generator[None, None, None]:
        """Let a failure here fail the next `gather` of all others, which must not wait for it."""
        try:
            yield
        except Exception:
            self.fail()
            raise

    def _gather(self, message: bytes, announced: int) -> list[bytes]:
        if self.size == 1:
            return [message]
        announced_T = self._gather_number(announced)
        if announced == _FAILED:
            return []
        sizes_T = self.sizes_of(announced_T)
        sizes_T[self.rank] = 0
        if not sum(sizes_T) and not message:
            return [b""] * self.size
        splits = [len(message)] * self.size
        splits[self.rank] = 0
        sent = torch.empty(0, dtype=torch.uint8, device="cpu")
        if message:
            sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = torch.empty(sum(sizes_T), dtype=torch.uint8, device=self._device)
        sent = sent.to(self._device).repeat(self.size - 1)
        dist.all_to_all_single(received, sent, sizes_T, splits, group=self.group)
        self._count(sent.numel(), received.numel())
        parts = torch.split(received.cpu(), sizes_T)
        gathered = [part.numpy().tobytes() for part in parts]
        gathered[self.rank] = message
        return gathered

    def announce(self, size_1: Tensor) -> Tensor:
        """Announce to all members a size that is known on the device; the host does not wait.

        Args:
            size_1: int64, below 0 for a failure.

        Returns:
            what `sizes_of` reads when it is on the host.
        """
        return self._gather_numbers(torch.where(size_1 < 0, _FAILED, size_1 + self._tag))

    def sizes_of(self, announced_A: Sequence[int]) -> list[int]:
        """The sizes that all members have announced; raises as `gather`."""
        if _FAILED in announced_A:
            raise DivergedError(
                f"trainer {announced_A.index(_FAILED)} could not compress its gradients; "
                "it says why"
            )
        if len({number // _SIZES for number in announced_A}) > 1:
            self._raise_difference()
        return [number % _SIZES for number in announced_A]

    def gather_tensor(self, tensor_K: Tensor) -> Tensor:
        """The tensors of all members, of as many elements each, as rows (A, K)."""
        count = tensor_K.numel()
        rows = torch.empty(self.size * count, dtype=tensor_K.dtype, device=tensor_K.device)
        dist.all_gather([*rows.view(self.size, count)], tensor_K, group=self.group)
        num_bytes = count * tensor_K.element_size() * (self.size - 1)
        self._count(num_bytes, num_bytes)
        return rows.view(self.size, count)

    def any_of(self, flags_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Flags that any member has set; the host waits only where one is not set here."""
        any_T = torch.from_numpy(flags_T.astype(np.uint8)).to(self._device, non_blocking=True)
        dist.all_reduce(any_T, dist.ReduceOp.MAX, group=self.group)
        self._count(2 * flags_T.size, 2 * flags_T.size)
        return flags_T if flags_T.all() else any_T.cpu().numpy().astype(bool)

    def _gather_number(self, number: int) -> list[int]:
        number_1 = torch.tensor([number], device=self._device)
        return [int(n) for n in self._gather_numbers(number_1)]

    def _gather_numbers(self, number_1: Tensor) -> Tensor:
        numbers = [torch.empty_like(number_1) for _ in range(self.size)]
        dist.all_gather(numbers, number_1, group=self.group)
        self._count(8 * (self.size - 1), 8 * (self.size - 1))
        return torch.cat(numbers)

    def _raise_difference(self) -> Never:
        steps_T = self._gather_number(self._step)
        if len({*steps_T}) > 1:
            raise ValueError(
                f"trainers are at steps {', '.join(map(str, steps_T))}: all load the state of one "
                "checkpoint, each its own, or none does"
            )
        raise ValueError(
            "trainers compress different parameters: names, shapes and order must be the same"
        )

    def mean_(self, tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        """Replace tensors by the mean of all members', summed in their order.

        Args:
            tensors: float32, contiguous, on any device; changed in place.
            dtype: in which their values are exact and travel; their means are float32.
        """
        if self.size == 1:
            return
        counts = [tensor.numel() for tensor in tensors]
        total = sum(counts)
        width = -(-total // self.size)
        sent = torch.zeros(self.size, width, dtype=dtype, device=self._device)
        flat = [tensor.reshape(-1).to(self._device) for tensor in tensors]
        sent.view(-1)[:total] = torch.cat(flat)
        shares = torch.empty_like(sent)
        dist.all_to_all_single(shares.view(torch.uint8), sent.view(torch.uint8), group=self.group)
        sums = shares.to(torch.float32)
        dist.all_gather([*sums], sums.sum(0).div_(self.size), group=self.group)
        num_bytes = (dtype.itemsize + 4) * width * (self.size - 1)
        self._count(num_bytes, num_bytes)
        means = sums.view(-1)[:total].to(tensors[0].device)
        parts: tuple[Tensor, ...] = torch.split(means, counts)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.view(-1).copy_(part)

    def drive(
        self, encoding: Generator[Collective, Sections, Result], step: int, count: int
    ) -> Result:
        """Run the rounds of a step; returns what is sent at its end.

        Raises:
            DivergedError: a gradient is not finite, here or at another trainer.
            DlrmError: a round's contributions cannot be read.
        """
        agreed: Sections | None = None
        with closing(encoding):
            while True:
                try:
                    round_ = next(encoding) if agreed is None else encoding.send(agreed)
                except StopIteration as end:
                    return end.value
                except Exception:  # whatever it is, others must not wait
                    self.fail()
                    raise
                packet = encode_packet(0, round_.value) if round_.value else b""
                messages = self.gather(packet)
                with self.shares_failure():
                    contributions = [decode_packet(m).sections if m else () for m in messages]
                    agreed = reduce(round_.op, contributions, step, count)

    def _count(self, sent: int, received: int) -> None:
        self.traffic.sent += sent
        self.traffic.received += received
