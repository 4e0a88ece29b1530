"""DCT-MP as a torch module for any network: keeps the largest activations of every row.

With a `SparseBoundary` at the cut, a network in one process trains exactly as one that is split
over two processes with `ThresholdCodec` in between: bit for bit in float32
(`tests/compress/library/test_sparse_boundary.py`).

Shapes: R rows of N elements; K kept of all R * N.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import final, overload

import torch
from torch import Tensor, nn
from typing_extensions import override

from dlrm_hybrid.compress.gradient.rule import target_k

# Of rows whose positions may be a byte each; `kernels.sections` has it, too, but loads numba.
MAX_COLUMNS = 256
_MAX_INDEX = 2**31 - 1  # that the kernel counts to


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReport:
    """What a `SparseBoundary` would have sent, over all forward passes since the last report.

    Attributes:
        elements: number of input elements.
        kept: how many of them were kept: their values are sent forward, their gradients backward.
        forward_bytes: kept values and their indices, in the shortest encoding of `wire.sparse`
            other than Rice coding; frame headers are not included.
        backward_bytes: gradients of kept values, without indices: the other end knows them.
    """

    elements: int
    kept: int
    forward_bytes: int
    backward_bytes: int

    @property
    def density(self) -> float:
        """Fraction kept; below the density asked for if rows have fewer nonzero elements."""
        return self.kept / self.elements if self.elements else 0.0


@final
class SparseBoundary(nn.Module):
    """Keeps the largest magnitudes of every row, forward and backward (DCT-MP).

    A row is the last dimension. The forward pass keeps the elements that reach their row's k-th
    largest magnitude, including all ties, and sets the others to 0. The backward pass lets
    gradients through at the same elements only. Nothing is rescaled, and there is no state between
    steps. Zeros are never kept, so they get no gradient; after a ReLU they would not anyway.

    Values that are not finite pass through, so that torch's own checks find them (`GradScaler`,
    `detect_anomaly`). Under autocast it selects in the dtype of its input. `torch.compile` needs no
    graph break. On the CPU, float32 rows are selected by a compiled kernel, loaded on first use;
    other dtypes and devices use torch operations, with the same result.

    In evaluation, `torch.nn.TransformerEncoderLayer` skips an activation that was replaced after
    construction: pass `activation=Sequential(ReLU(), SparseBoundary(0.1))` to its constructor.

    Args:
        density: fraction of each row to keep, in (0, 1]; at least one element is kept.
        evaluate_masked: whether to select in evaluation mode too.

    Raises:
        ValueError: the density is out of bounds, or the input of a call has no rows of floats.

    Example:
        >>> boundary = SparseBoundary(0.1)
        >>> net = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), boundary, nn.Linear(256, 1))
        >>> net(torch.randn(4, 8)).sum().backward()
        >>> boundary.report().kept <= 4 * 26
        True

    Source: Gupta et al., KDD 2021, algorithm 2.
    """

    def __init__(self, density: float, *, evaluate_masked: bool = True) -> None:
        super().__init__()
        if not isinstance(density, Real) or not 0 < density <= 1:
            raise ValueError(f"density={density!r} is not in (0, 1]")
        self.density = float(density)
        self.evaluate_masked = evaluate_masked
        # No buffer: DDP would overwrite it by that of its first rank. No numbers: compiled code
        # would be compiled anew whenever they change.
        self._totals: Tensor | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Keep the largest magnitudes of every row.

        Args:
            x: rows (..., N) of any floating-point dtype.

        Returns:
            A tensor like x, with 0 in place of the elements that are not kept.
        """
        if not x.dim() or not x.is_floating_point():
            raise ValueError(f"{x.dtype} of shape {list(x.shape)} is not rows of floats")
        if not x.numel() or not (self.training or self.evaluate_masked):
            return x
        k = target_k(x.shape[-1], 1 - self.density)
        mask, totals = torch.ops.dlrm_hybrid.largest_of_rows(x.detach(), k, x.requires_grad)
        # It may have been moved to another device since its last pass.
        self._totals = totals if self._totals is None else self._totals.to(totals.device) + totals
        return torch.where(mask, x, 0)

    def report(self) -> BoundaryReport:
        """Counts of all forward passes that selected, since the last call."""
        totals, self._totals = self._totals, None
        counted = [0] * 4 if totals is None else [*map(int, totals)]
        elements, kept, forward_bytes, backward_bytes = counted
        return BoundaryReport(
            elements=elements,
            kept=kept,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
        )

    @override
    def extra_repr(self) -> str:
        return f"density={self.density}, evaluate_masked={self.evaluate_masked}"


def _select(x: Tensor, k: int, trains: bool) -> tuple[Tensor, Tensor]:
    """The mask of what is kept of rows (..., N), and the numbers of a report, by torch alone."""
    x = x.contiguous()
    magnitudes = x.abs()
    # Any of the ties may be among the k: the indices are of no use. kthvalue refuses to run where
    # torch.use_deterministic_algorithms is set.
    tau = magnitudes.topk(k, dim=-1).values[..., -1:]
    # Comparisons with NaN are false: such an element is kept, and as a threshold it keeps all.
    mask = ~(magnitudes < tau) & (x != 0)
    return mask, _totals(mask, mask.count_nonzero(), x.element_size(), trains)


def _select_on_cpu(x: Tensor, k: int, trains: bool) -> tuple[Tensor, Tensor]:
    if x.dtype is not torch.float32 or x.numel() > _MAX_INDEX:
        return _select(x, k, trains)
    from dlrm_hybrid.kernels.magnitudes import largest_of_rows

    largest = largest_of_rows(x.contiguous().view(-1, x.shape[-1]).numpy(), k)
    if largest is None:
        return _select(x, k, trains)
    indices_K = torch.from_numpy(largest.indices_K)
    mask = torch.zeros_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
    mask.view(-1)[indices_K.long()] = True
    return mask, _totals(
        mask, torch.tensor(indices_K.numel(), device="cpu"), x.element_size(), trains
    )


def _shapes(x: Tensor, k: int, trains: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.bool), x.new_empty(4, dtype=torch.int64)


# One operator for all devices, which torch.compile takes as it is. `torch.library.custom_op` would
# do the same, but loads all of torch's compiler when it is first called.
# A fragment can be there twice, which `importlib.reload` needs.
_LIBRARY = torch.library.Library("dlrm_hybrid", "FRAGMENT")
_LIBRARY.define("largest_of_rows(Tensor x, int k, bool trains) -> (Tensor, Tensor)")
_LIBRARY.impl("largest_of_rows", _select, "CompositeExplicitAutograd")
_LIBRARY.impl("largest_of_rows", _select_on_cpu, "CPU")
torch.library.register_fake("dlrm_hybrid::largest_of_rows", _shapes, lib=_LIBRARY)


def _totals(mask: Tensor, count: Tensor, value_bytes: int, trains: bool) -> Tensor:
    """The numbers of a `BoundaryReport`, int64, in its order; nothing waits for the device."""
    elements, width = mask.numel(), mask.shape[-1]
    positions = (4 * count).clamp(max=_filled((elements + 7) // 8, value_bytes))
    if width <= MAX_COLUMNS:
        by_row = _filled(elements // width + count, value_bytes)
        if width == MAX_COLUMNS:  # a byte cannot say that a row has so many
            by_row = torch.where(mask.all(-1).any(), positions, by_row)
        positions = torch.minimum(positions, by_row)
    positions = positions * (count < elements) * (count > 0)
    values = count * value_bytes
    backward = values if trains else torch.zeros_like(count)
    return torch.stack([torch.full_like(count, elements), count, positions + values, backward])


@overload
def _filled(num_bytes: int, value_bytes: int) -> int: ...
@overload
def _filled(num_bytes: Tensor, value_bytes: int) -> Tensor: ...
def _filled(num_bytes: int | Tensor, value_bytes: int) -> int | Tensor:
    """Round up to a multiple of a value's size, where values begin."""
    return (num_bytes + value_bytes - 1) // value_bytes * value_bytes
