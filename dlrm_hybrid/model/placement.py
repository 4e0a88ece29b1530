"""Placement of a stage: on the host, or on a device to which its tensors are copied.

Parameter servers and the network are on the host whatever computes the dense layers; tables are
there, or beside the layers.

    host                                         device
    dense features, labels, pooled rows  ──up──▶  layers, loss, backward
    gradients of pooled rows, losses    ◀─down──
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.compress.host import fetched
from dlrm_hybrid.types import ResourceError


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a stage, and the copies between it and the host.

    Attributes:
        is_apart: whether tensors of the host must be copied there; `cpu` with copies is for tests.
    """

    device: torch.device
    is_apart: bool

    def up(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device; nobody waits for it."""
        if not self.is_apart:
            return tensor
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True, copy=True)

    def down(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy tensors of the device to the host, which waits once for all of them."""
        return fetched(tensors) if self.is_apart and tensors else tensors

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


HOST = Placement(torch.device("cpu"), is_apart=False)


def set_matrix_products(device: str, *, tf32: bool) -> None:
    """Set `matrix_products` for the rest of the process."""
    if device != "cpu":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


@contextmanager
def matrix_products(device: str, *, tf32: bool) -> Generator[None, None, None]:
    """Let CUDA devices multiply float32 in TF32, or not; as before after the `with`.

    Args:
        device: device of the run; without CUDA nothing happens.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    set_matrix_products(device, tf32=tf32)
    try:
        yield
    finally:
        if device != "cpu":
            torch.backends.cuda.matmul.fp32_precision = before


def cuda_devices(device: str) -> int:
    """Number of CUDA devices of this machine; raises ResourceError if `device` is none of them."""
    devices, number = torch.cuda.device_count(), device.partition(":")[2]
    if int(number or 0) >= devices:
        raise ResourceError(
            f"device = {device}: torch {torch.__version__} sees {devices} CUDA devices here; "
            "needs device=cpu, or a build of torch that fits the GPU and its driver"
        )
    return devices
