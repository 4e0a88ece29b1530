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
_SIZES, _TAGS = 2**36, 2**26  # a message is shorter; below so many, tags are told apart


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
        traffic: to be counted in.
        step: that this is; must be the same for all.
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

    def gather(self, given: bytes) -> list[bytes]:
        """What all members have given, in their order.

        Raises:
            DivergedError: one has failed.
            ValueError: they are at different steps, or have different parameters.
        """
        return self._gather(given, len(given) + self._tag)

    @property
    def _tag(self) -> int:
        """What is announced beside a size, so that others see a difference."""
        return _SIZES * ((self._step + self.fingerprint) % _TAGS)

    def fail(self) -> None:
        """Take part in a `gather` that then fails in all other members."""
        self._gather(b"", _FAILED)

    @contextmanager
    def shares_failure(self) -> Generator[None, None, None]:
        """Whatever fails here fails in the next `gather` of others: they must not wait for it."""
        try:
            yield
        except Exception:
            self.fail()
            raise

    def _gather(self, given: bytes, announced: int) -> list[bytes]:
        if self.size == 1:
            return [given]
        announced_T = self._gather_number(announced)
        if announced == _FAILED:
            return []
        sizes_T = self.sizes_of(announced_T)
        sizes_T[self.rank] = 0
        if not sum(sizes_T) and not given:
            return [b""] * self.size
        splits = [len(given)] * self.size
        splits[self.rank] = 0
        sent = torch.empty(0, dtype=torch.uint8, device="cpu")
        if given:
            sent = torch.frombuffer(bytearray(given), dtype=torch.uint8)
        taken = torch.empty(sum(sizes_T), dtype=torch.uint8, device=self._device)
        sent = sent.to(self._device).repeat(self.size - 1)
        dist.all_to_all_single(taken, sent, sizes_T, splits, group=self.group)
        self._count(sent.numel(), taken.numel())
        parts = torch.split(taken.cpu(), sizes_T)
        gathered = [part.numpy().tobytes() for part in parts]
        gathered[self.rank] = given
        return gathered

    def announce(self, size_1: Tensor) -> Tensor:
        """Tell all members of a size that is known on the device; the host does not wait.

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
        if len({one // _SIZES for one in announced_A}) > 1:
            self._raise_difference()
        return [one % _SIZES for one in announced_A]

    def gather_tensor(self, given_K: Tensor) -> Tensor:
        """What all members have given, as many elements each, in rows (A, K)."""
        count = given_K.numel()
        taken = torch.empty(self.size * count, dtype=given_K.dtype, device=given_K.device)
        dist.all_gather([*taken.view(self.size, count)], given_K, group=self.group)
        moved = count * given_K.element_size() * (self.size - 1)
        self._count(moved, moved)
        return taken.view(self.size, count)

    def any_of(self, flags_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Flags that any member has set; the host waits only where one is not set here."""
        given_T = torch.from_numpy(flags_T.astype(np.uint8)).to(self._device, non_blocking=True)
        dist.all_reduce(given_T, dist.ReduceOp.MAX, group=self.group)
        self._count(2 * flags_T.size, 2 * flags_T.size)
        return flags_T if flags_T.all() else given_T.cpu().numpy().astype(bool)

    def _gather_number(self, own: int) -> list[int]:
        given = torch.tensor([own], device=self._device)
        return [int(one) for one in self._gather_numbers(given)]

    def _gather_numbers(self, own_1: Tensor) -> Tensor:
        taken = [torch.empty_like(own_1) for _ in range(self.size)]
        dist.all_gather(taken, own_1, group=self.group)
        self._count(8 * (self.size - 1), 8 * (self.size - 1))
        return torch.cat(taken)

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
            tensors: float32 on the CPU, contiguous; changed in place.
            dtype: in which their values are exact and travel; their means are float32.
        """
        if self.size == 1:
            return
        counts = [one.numel() for one in tensors]
        total = sum(counts)
        width = -(-total // self.size)
        given = torch.zeros(self.size, width, dtype=dtype, device=self._device)
        given.view(-1)[:total] = torch.cat([one.reshape(-1) for one in tensors])
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken.view(torch.uint8), given.view(torch.uint8), group=self.group)
        sums = taken.to(torch.float32)
        dist.all_gather([*sums], sums.sum(0).div_(self.size), group=self.group)
        moved = (dtype.itemsize + 4) * width * (self.size - 1)
        self._count(moved, moved)
        parts: tuple[Tensor, ...] = torch.split(sums.view(-1)[:total].cpu(), counts)
        for one, part in zip(tensors, parts, strict=True):
            one.view(-1).copy_(part)

    def drive(
        self, encoding: Generator[Collective, Sections, Result], step: int, count: int
    ) -> Result:
        """Run the rounds of a step to what is sent at its end.

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
                given = encode_packet(0, round_.value) if round_.value else b""
                contributions = self.gather(given)
                with self.shares_failure():
                    read = [decode_packet(one).sections if one else () for one in contributions]
                    agreed = reduce(round_.op, read, step, count)

    def _count(self, sent: int, received: int) -> None:
        self.traffic.sent += sent
        self.traffic.received += received
