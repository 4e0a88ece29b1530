"""Tensors in the CPU's memory, for code that reads no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.types import DivergedError

CPU = torch.device("cpu")


def require_cpu(tensor: Tensor, name: str, user: str) -> None:
    """Refuse a tensor of another device.

    Raises:
        ValueError: it is not in the CPU's memory.
    """
    if not tensor.is_cpu:
        raise ValueError(
            f"{name} is on {tensor.device}, and {user} computes on the CPU: pass its .cpu()"
        )


def require_host(tensor: Tensor, what: str, which: object) -> None:
    """Require a tensor that kernels can read: contiguous float32 on the CPU.

    Raises:
        ValueError: it is not contiguous float32 in the CPU's memory.
    """
    if not tensor.is_cpu:
        require_cpu(tensor, f"{what} {which}", "compression")
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{what} {which}: {kind} is not contiguous float32")


def host_array(tensor: Tensor, what: str, which: object) -> Float32s:
    """A numpy view of a tensor; raises as `require_host`."""
    require_host(tensor, what, which)
    return tensor.numpy()


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU's memory; the host waits once for each device that has some."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    pins = bool(devices)
    copies = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pins) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def fetched_numbers(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Whole numbers of vectors; see `fetched`."""
    return [cast("list[int]", tensor.tolist()) for tensor in fetched(tensors)]


def not_finite(step: int, name: str, cause: str = "optimizer.lr or embedding.lr") -> DivergedError:
    """The error for a gradient that is not finite; `step` is counted from 0."""
    return DivergedError(
        f"step {step + 1}: the gradient of {name} is not finite; {cause} may be too high"
    )
