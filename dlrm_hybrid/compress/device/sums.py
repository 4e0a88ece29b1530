"""The tensors of a model on a device: where their elements are, and the sums that methods look at.

Shapes: N elements of T tensors in a padded vector, C chunks of them; E = T + 1 offsets, F = C + 1.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]

PAD = 4  # elements: so every tensor's residual begins at 16 bytes
CHUNK = 4096  # elements, one program's


@final
class Blocks:
    """How the elements of several tensors are spread over a padded vector and over chunks.

    Args:
        counts: elements of each tensor.
        device: where the tables are.
        chunk: elements that one program takes, a multiple of 32.

    Attributes:
        counts, device, chunk: as given.
        places: where each tensor begins in the padded vector.
        size: elements of that vector.
        chunks: C, how many there are.
        table_C4: int64, for each chunk its tensor, its first element there, the size of the tensor
            and where that begins.
        firsts_E: int64, the first chunk of each tensor, then C.
        offsets_E: int64, where each tensor begins among all elements, without padding, then N.
        sizes_T, places_T: int64, `counts` and `places`.
    """

    def __init__(self, counts: Sequence[int], device: torch.device, chunk: int = CHUNK) -> None:
        self.counts, self.device, self.chunk = [*counts], device, chunk
        *self.places, self.size = accumulate((-(-n // PAD) * PAD for n in counts), initial=0)
        firsts = [*accumulate((-(-n // chunk) for n in counts), initial=0)]
        self.chunks = firsts[-1]
        self.firsts_E = sent(firsts, torch.int64, device)
        self.offsets_E = sent([*accumulate(counts, initial=0)], torch.int64, device)
        self.sizes_T = sent(self.counts, torch.int64, device)
        self.places_T = sent(self.places, torch.int64, device)
        tensor_C = torch.repeat_interleave(self.firsts_E.diff(), output_size=self.chunks)
        start_C = torch.arange(self.chunks, device=device) - self.firsts_E[tensor_C]
        columns = (tensor_C, chunk * start_C, self.sizes_T[tensor_C], self.places_T[tensor_C])
        self.table_C4 = torch.stack(columns, 1)

    def parts(self, padded_N: Tensor) -> list[Tensor]:
        """A flat view of each tensor in a padded vector."""
        pairs = zip(self.places, self.counts, strict=True)
        return [padded_N[place : place + count] for place, count in pairs]

    def unpadded(self, padded_K: Tensor) -> Tensor:
        """Indices without padding, int64, of elements that are there in the padded vector."""
        tensor_K = torch.bucketize(padded_K, self.places_T[1:], right=True)
        return padded_K - (self.places_T - self.offsets_E[:-1])[tensor_K]

    def padded(self, flat_K: Tensor) -> Tensor:
        """Where elements are in the padded vector, int64, by their indices without padding."""
        tensor_K = torch.bucketize(flat_K, self.offsets_E[1:], right=True)
        return flat_K + (self.places_T - self.offsets_E[:-1])[tensor_K]


@final
class Sums:
    """Residuals of all tensors, which the gradients of a step join when an operation first looks.

    Attributes:
        blocks: as given.
        residual_N: float32, padded.
        residuals: views of it, flat, of each tensor.
        gradients: of this step: float32, contiguous.
        addresses_T: int64, of them.
        aligned: whether all of them can be read 16 bytes at a time.
        flags_E: int32, flags of each tensor's gradient, then of any; see `ops`.
        waits: whether the gradients are still to be added.
    """

    def __init__(self, blocks: Blocks, residual_N: Tensor | None = None) -> None:
        self.blocks = blocks
        if residual_N is None:
            residual_N = torch.zeros(blocks.size, dtype=torch.float32, device=blocks.device)
        self.residual_N = residual_N
        self.residuals = blocks.parts(residual_N)
        self.flags_E = torch.zeros(len(blocks.counts) + 1, dtype=torch.int32, device=blocks.device)
        self.gradients: Sequence[Tensor] = ()
        self.addresses_T = self.flags_E
        self.aligned, self.waits = True, False

    def begin(self, gradients: Sequence[Tensor], addresses_T: Tensor) -> None:
        """Take the gradients of a step, which stay where they are."""
        self.flags_E.zero_()
        self.replace(gradients, addresses_T)

    def replace(self, gradients: Sequence[Tensor], addresses_T: Tensor) -> None:
        """Let other tensors join in place of the gradients."""
        self.gradients, self.addresses_T = gradients, addresses_T
        self.aligned = is_aligned(gradients)
        self.waits = True

    def join(self) -> bool:
        """Whether the gradients are still to be added, which the caller then does."""
        waits, self.waits = self.waits, False
        return waits

    @property
    def fault(self) -> Tensor:
        """The flag of all tensors together, int32 (1): where it is set nothing may be added."""
        return self.flags_E[-1:]


def is_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all can be read 16 bytes at a time."""
    return not any(pointer % 16 for pointer in pointers(tensors))


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors are in the memory of their device."""
    return [tensor.data_ptr() for tensor in tensors]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which kernels are launched; nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def beside(devices: Iterable[torch.device]) -> Generator[None]:
    """Let GPUs copy in streams of their own, after all that their current ones were given."""
    with ExitStack() as stack:
        for device in {*devices}:
            if device.type == "cuda":
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(stream))
        yield


def sent(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; the host does not wait until they are there."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)
