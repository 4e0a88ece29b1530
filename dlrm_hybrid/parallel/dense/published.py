"""Published weights: what servers have sent so far, which every replica equals bit for bit.

Unless a sparsity is set, they are the weights themselves in float32; in half precision the rounded
difference between weight and published weight is sent, and both sides add it; levels round it to
integer multiples of a quantum. With a sparsity only the largest differences are published. Either
way the rest stays in the difference, which is error feedback without a residual of its own.

Shapes: T tensors of N elements in all; K elements that are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.compress.gradient.compressor import Selected, Sent, Whole
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold
from dlrm_hybrid.compress.gradient.residual import Residual, not_finite
from dlrm_hybrid.compress.gradient.thresholded import ThresholdSelector
from dlrm_hybrid.kernels.levels.rounding import add_levels, round_to_levels
from dlrm_hybrid.kernels.magnitudes import compact
from dlrm_hybrid.kernels.scatter import gather, publish, put
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import dense, narrow, packed
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import Elements

PUBLISHED = "published"
SUFFIX = f".{PUBLISHED}"
# Most versions that a threshold serves. A new one for each costs five times as much.
LIFESPAN = 1000


def adds(sections: Sequence[Section]) -> bool:
    """Whether sections hold differences to add: only full values come in float32."""
    return any(section.dtype is not Dtype.FLOAT32 for section in sections)


class SparseChange(NamedTuple):
    """Elements that have moved; valid until the next update.

    Attributes:
        indices_K: increasing, among the N.
        weight_K: their weights.
    """

    indices_K: Int32s
    weight_K: Float32s


class Published(NamedTuple):
    """The values that bring replicas up to the published weights, and their number.

    Attributes:
        sent: values of the tensors; may view the weights.
        elements: number of elements in `sent`.
    """

    sent: Sent
    elements: int


class PublishedWeights(Protocol):
    """The published values of a bucket, which its replicas hold.

    Attributes:
        value_N: values of all tensors; may be the weights themselves.
    """

    value_N: Float32s

    def publish(self, change: SparseChange | None, number: int) -> Published:
        """Follow the weights; returns what replicas need to follow too.

        Args:
            change: the elements that have moved; None for all.
            number: push number.

        Raises:
            DivergedError: a weight is not finite.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold beside the weights."""
        ...


@final
class EveryChange(PublishedWeights):
    """Publishes every element that has changed.

    Args:
        layout: layout of the bucket.
        weight_N: weights of all tensors, updated in place.
        dtype: type of values on the wire.
        levels: send integer multiples of a quantum, exact in BFLOAT16.
    """

    def __init__(
        self, layout: Layout, weight_N: Float32s, dtype: Dtype, *, levels: bool = False
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._levels = levels
        self._weight_N = weight_N
        self._is_rounded = dtype is not Dtype.FLOAT32
        self.value_N = weight_N.copy() if self._is_rounded else weight_N

    @override
    def publish(self, change: SparseChange | None, number: int) -> Published:
        if self._levels:
            return self._in_levels(change, number)
        if change is None:
            return Published(self._all(), self._layout.size)
        return Published(self._some(*change), change.indices_K.size)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self._layout.tensors(self.value_N, PUBLISHED) if self._is_rounded else {}

    def differs(self) -> NDArray[np.bool_] | None:
        """Mask of the N elements whose bits differ from the weights'; None if none can differ."""
        if not self._is_rounded:
            return None
        return self.value_N.view(np.uint32) != self._weight_N.view(np.uint32)

    def equalize(self, change: SparseChange | None) -> Published:
        """Copy the weights of these elements, None for all; returns them in float32."""
        layout = self._layout
        if change is None:
            np.copyto(self.value_N, self._weight_N)
            parts = zip(layout.specs, layout.parts(self._weight_N), strict=True)
            whole = Whole({spec.name: dense(spec.id, part_N) for spec, part_N in parts})
            return Published(whole, layout.size)
        put(*change, self.value_N)
        return Published(_selected(layout, *change, Dtype.FLOAT32), change.indices_K.size)

    def _all(self) -> Whole:
        sent_N = self._weight_N
        if self._is_rounded:
            sent_N = narrow(self._weight_N - self.value_N, self._dtype)
            np.add(self.value_N, sent_N, out=self.value_N)
        parts = zip(self._layout.specs, self._layout.parts(sent_N), strict=True)
        return Whole({spec.name: packed(spec.id, part_N, self._dtype) for spec, part_N in parts})

    def _some(self, indices_K: Int32s, weight_K: Float32s) -> Selected:
        sent_K = weight_K
        if self._dtype is Dtype.BFLOAT16:
            sent_K = np.empty_like(weight_K)
            publish(indices_K, weight_K, self.value_N, sent_K)
        elif self._is_rounded:
            value_K = np.empty_like(weight_K)
            gather(indices_K, self.value_N, value_K)
            sent_K = narrow(weight_K - value_K, self._dtype)
            put(indices_K, value_K + sent_K, self.value_N)
        return _selected(self._layout, indices_K, sent_K, self._dtype)

    def _in_levels(self, change: SparseChange | None, number: int) -> Published:
        layout, value_N = self._layout, self.value_N
        if change is None:
            change = SparseChange(np.arange(layout.size, dtype=np.int32), self._weight_N)
        value_K = np.empty_like(change.weight_K)
        gather(change.indices_K, value_N, value_K)
        # Weights that overflow are found when they are rounded; numpy need not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            lacks_K = change.weight_K - value_K
        indices = Indices.of_flat(layout, change.indices_K)
        return _published_levels(layout, indices, lacks_K, value_N, number)


@final
class LargestChanges(PublishedWeights):
    """Publishes the elements that differ most from the weights, however long ago they moved.

    In float32 it copies their weights, so that no remainder of them is left.

    Args:
        layout: layout of the bucket.
        weight_N: weights of all tensors, updated in place.
        dtype: type of values on the wire.
        sparsity: fraction of each tensor's elements that is not published.
        levels: as for `EveryChange`.
    """

    def __init__(
        self,
        layout: Layout,
        weight_N: Float32s,
        dtype: Dtype,
        sparsity: float,
        *,
        levels: bool = False,
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._levels = levels
        self._weight_N = weight_N
        self.value_N = weight_N.copy()
        self._selector = _selector(sparsity)
        self._thresholds = self._selector.init(layout)
        self._differences = Residual(layout)
        self._no_gradients = [None] * len(layout.specs)

    @override
    def publish(self, change: SparseChange | None, number: int) -> Published:
        layout, x = self._layout, self._differences
        # Computed anew each time: a running sum would drift from what replicas lack.
        np.subtract(self._weight_N, self.value_N, out=x.residual_N)
        x.begin(self._no_gradients, number, ())
        indices = self._selector.choose(x, self._thresholds, number)
        if self._levels:
            return _published_levels(layout, indices, x.take(indices), self.value_N, number)
        if self._dtype is Dtype.FLOAT32:
            sent_K = self._weight_N[indices.flat]
            self.value_N[indices.flat] = sent_K
        else:
            sent_K = narrow(x.take(indices), self._dtype)
            self.value_N[indices.flat] += sent_K
        elements = Elements(indices.splits_E, indices.local_K, sent_K)
        return Published(Selected(layout, elements, self._dtype), sent_K.size)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self._layout.tensors(self.value_N, PUBLISHED) | self._thresholds.tensors()


def _selected(layout: Layout, indices_K: Int32s, sent_K: Float32s, dtype: Dtype) -> Selected:
    indices = Indices.of_flat(layout, indices_K)
    return Selected(layout, Elements(indices.splits_E, indices.local_K, sent_K), dtype)


def _published_levels(
    layout: Layout, indices: Indices, lacks_K: Float32s, value_N: Float32s, number: int
) -> Published:
    """Move published weights towards the weights by levels, but not those that round to zero."""
    splits_E, local_K, rounded_K = indices.splits_E, indices.local_K, np.empty_like(lacks_K)
    fault = round_to_levels(splits_E, lacks_K, rounded_K)
    if fault >= 0:
        raise not_finite(number, layout.specs[fault].name)
    add_levels(layout.offsets, splits_E, local_K, rounded_K, value_N)
    size = int(splits_E[-1])
    elements = Elements(splits_E, local_K[:size], rounded_K[:size])
    return Published(Selected(layout, elements, Dtype.BFLOAT16), size)


def _selector(sparsity: float) -> ThresholdSelector:
    settings = Dct(density=1 - sparsity, lifespan=LIFESPAN, renewal="controlled")
    return ThresholdSelector(settings, CountedThreshold())


# Updates are numbered by the bits of float32, which order as their values do, from the smallest
# that is not subnormal to the largest: so the kernel that lists large values lists late stamps, in
# a third of numpy's time.
_FIRST, _LAST = 0x00800000, 0x7F7FFFFF


@final
class Stamps:
    """The last update that moved each element of a bucket.

    Args:
        weight_N: weights of the bucket, updated in place.

    Attributes:
        updates: number of the last one.
    """

    def __init__(self, weight_N: Float32s) -> None:
        self.updates = _FIRST
        self._weight_N = weight_N
        self._stamp_N = np.zeros(weight_N.size, np.float32)
        self._late_N = np.empty(weight_N.size, np.int32)
        self._all_moved = 0  # last update that moved all elements; saves writing N stamps

    def moved(self, indices_K: Int32s | None) -> None:
        """Record an update that moved these elements; None for all.

        Raises:
            DlrmError: more than 2.1e9 updates in one attempt.
        """
        if self.updates == _LAST:
            raise DlrmError(f"more than {_LAST - _FIRST} updates of a bucket in one attempt")
        self.updates += 1
        if indices_K is None:
            self._all_moved = self.updates
        else:
            stamp_K = np.full(indices_K.size, _stamp(self.updates), np.float32)
            put(indices_K, stamp_K, self._stamp_N)

    def since(self, update: int) -> SparseChange | None:
        """The elements moved after this update, None for all; valid until the next call."""
        if self._all_moved > update:
            return None
        count = compact(self._stamp_N, _stamp(update + 1), self._late_N)
        return self.at(self._late_N[:count])

    def at(self, indices_K: Int32s) -> SparseChange:
        """Look up the weights of these elements."""
        weight_K = np.empty(indices_K.size, np.float32)
        gather(indices_K, self._weight_N, weight_K)
        return SparseChange(indices_K, weight_K)


def _stamp(update: int) -> float:
    """The float32 with these bits."""
    return float(np.uint32(update).view(np.float32))


@final
class ReplicaWeights(PublishedWeights):
    """The replica of one worker, which is sent the elements moved since its last version.

    Args:
        published: the weights that the worker has been sent.
        stamps: stamps of the bucket.
    """

    def __init__(self, published: EveryChange, stamps: Stamps) -> None:
        self._published = published
        self._stamps = stamps
        self._sent = stamps.updates
        self.value_N = published.value_N

    @override
    def publish(self, change: SparseChange | None, number: int) -> Published:
        return self._published.publish(self._lacks(), number)

    def equalize(self, *, everything: bool) -> Published:
        """Make the replica equal to the weights; returns the float32 values to send.

        Args:
            everything: send every element; else the replica is known to equal `value_N`.
        """
        lacks = self._lacks()
        differs_N = self._published.differs()
        if everything:
            lacks = None
        elif differs_N is not None:
            lacks = self._stamps.at(np.flatnonzero(differs_N).astype(np.int32))
        return self._published.equalize(lacks)

    @override
    def tensors(self) -> dict[str, Tensor]:
        """Nothing: at a checkpoint every replica is made equal to the weights."""
        return {}

    def _lacks(self) -> SparseChange | None:
        change = self._stamps.since(self._sent)
        self._sent = self._stamps.updates
        return change
