"""What travels over a boundary between two stages, as sections of a frame.

    sender                                        receiver
    encode           ──── activations ────▶       decode
    decode_gradient  ◀─── their gradients ────    encode_gradient

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.kernels.scatter import scatter
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

Sections = tuple[Section, ...]
Saved = Any
"""What a codec keeps from forward to backward; nobody else looks into it."""


@dataclass(frozen=True, slots=True)
class Key:
    """Which activations these are."""

    batch: int
    boundary: int
    microbatch: int

    def __str__(self) -> str:
        return f"batch {self.batch}, boundary {self.boundary}, micro-batch {self.microbatch}"


class ActivationCodec(Protocol):
    """Both ends of a boundary; all tensors are float32 (B, N), detached and contiguous.

    What `decode` and `decode_gradient` return is memory allocated by torch, never a view of the
    payload: MKL rounds products differently where an operand lies at an address that is no
    multiple of 16, and a payload may lie anywhere.
    """

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """Sender, forward; the sections may view x_BN."""
        ...

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """Receiver, forward; raises DlrmError if the sections do not make that shape."""
        ...

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """Receiver, backward; `saved` is from its own `decode`, the sections may view g_BN."""
        ...

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """Sender, backward; `saved` is from its own `encode`; raises as `decode`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that lasts from step to step, for checkpoints; empty where nothing does."""
        ...

    def report(self) -> dict[int, BoundaryReport]:
        """Per boundary what was sent since the last call; empty where nothing is left out."""
        ...


MOST_WAITING = 64  # tensors whose thresholds are held


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReport:
    """What one end of a boundary has sent since the last report.

    Attributes:
        elements: of the tensors, summed over micro-batches.
        kept: of these, how many travelled as numbers.
        threshold_sum: of the tensors' means of the magnitudes from which elements are kept. Each
            mean is rounded to float32, so that the sum is exact: it is the same however steps are
            gathered into reports.
        thresholds: tensors that have thresholds.
    """

    elements: int
    kept: int
    threshold_sum: float
    thresholds: int

    @property
    def threshold(self) -> float | None:
        """Their mean over all tensors; None without thresholds."""
        return self.threshold_sum / self.thresholds if self.thresholds else None


@final
class Tally:
    """Sums up tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def add(
        self, boundary: int, elements: int, kept: int, thresholds_R: NDArray[np.float32]
    ) -> None:
        """Count one tensor; its thresholds are float32, any number of them, and are kept."""
        sums = self._sums.setdefault(boundary, _Sums())
        sums.elements += elements
        sums.kept += kept
        if thresholds_R.size:
            sums.waiting.append(thresholds_R)
        if len(sums.waiting) == MOST_WAITING:
            sums.take_means()

    def take(self) -> dict[int, BoundaryReport]:
        """The sums per boundary; begins anew."""
        sums, self._sums = self._sums, {}
        return {boundary: one.report() for boundary, one in sorted(sums.items())}


@dataclass(slots=True)
class _Sums:
    elements: int = 0
    kept: int = 0
    threshold_sum: float = 0.0
    thresholds: int = 0
    waiting: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])

    def take_means(self) -> None:
        """Of what waits: many at a time cost less than one between steps, out of cold caches."""
        for thresholds_R in self.waiting:
            self.threshold_sum += float(np.float32(thresholds_R.mean(dtype=np.float64)))
        self.thresholds += len(self.waiting)
        self.waiting.clear()

    def report(self) -> BoundaryReport:
        self.take_means()
        return BoundaryReport(
            elements=self.elements,
            kept=self.kept,
            threshold_sum=self.threshold_sum,
            thresholds=self.thresholds,
        )


def only_section(
    sections: Sections, dtype: Dtype, shape: Sequence[int], key: Key, *, dense: bool
) -> Section:
    """The one section of a tensor of this type and shape; DENSE, or any encoding.

    Raises:
        DlrmError: there is none, another or one more; names batch, boundary and micro-batch.
    """
    for section in sections if len(sections) == 1 else ():
        is_fitting = (section.dtype, section.count) == (dtype, prod(shape))
        if is_fitting and (section.encoding is Encoding.DENSE or not dense):
            return section
    expected = f"{'DENSE ' if dense else ''}{dtype.name} of {' x '.join(map(str, shape))} elements"
    raise DlrmError(f"{key}: {_shown(sections)}, expected {expected}")


def dense_tensor(sections: Sections, shape: torch.Size, key: Key) -> Tensor:
    """A tensor sent as it is, in memory of torch; raises as `only_section`."""
    section = only_section(sections, Dtype.FLOAT32, shape, key, dense=True)
    tensor = torch.empty(shape)
    np.copyto(host_array(tensor.view(-1), "received", "activation"), array_of(section))
    return tensor


def scattered(
    indices_K: NDArray[np.int32], values_K: NDArray[np.float32], shape: torch.Size
) -> Tensor:
    """A tensor of values at flat positions, ascending, and of 0 elsewhere; K of them."""
    tensor = torch.empty(shape)
    scatter(indices_K, values_K, host_array(tensor.view(-1), "received", "activation"))
    return tensor


def _shown(sections: Sections) -> str:
    shown = (f"{one.encoding.name} {one.dtype.name} of {one.count}" for one in sections)
    return ", ".join(shown) or "nothing"


@final
class PerBoundaryCodec(ActivationCodec):
    """Passes everything on to the codec of the boundary in the key."""

    def __init__(self, codecs: Mapping[int, ActivationCodec]) -> None:
        """A codec for every boundary of the worker, by number."""
        self._codecs = dict(codecs)

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        return self._codecs[key.boundary].encode(x_BN, key)

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        return self._codecs[key.boundary].decode(sections, shape, key)

    @override
    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        return self._codecs[key.boundary].encode_gradient(g_BN, saved, key)

    @override
    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        return self._codecs[key.boundary].decode_gradient(sections, saved, key)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor
            for codec in self._codecs.values()
            for name, tensor in codec.tensors().items()
        }

    @override
    def report(self) -> dict[int, BoundaryReport]:
        reports: dict[int, BoundaryReport] = {}
        for codec in self._codecs.values():
            reports.update(codec.report())
        return reports
