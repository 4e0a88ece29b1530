"""A bucket: the weights of one stage on one server, updated by pushes, published as versions.

Its tensors are concatenated, so that an update is one sum, one call of the optimizer and one search
for what to publish, whatever their number.

Shapes: T tensors of N elements in all, E = T + 1 offsets between them; K elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.host import require_host
from dlrm_hybrid.compress.update import DenseUpdate, Update
from dlrm_hybrid.kernels.scatter import collect, mean_of_all, put, scatter_add
from dlrm_hybrid.model.optimizer import STEP
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.master import MasterWeights, OptimizerConfig, copy_into
from dlrm_hybrid.parallel.dense.published import (
    EveryChange,
    LargestChanges,
    PublishedWeights,
    ReplicaWeights,
    SparseChange,
    Stamps,
)
from dlrm_hybrid.parallel.dense.pulls import Pulls
from dlrm_hybrid.parallel.dense.sections import BucketReader, bucket_bytes, digest_of
from dlrm_hybrid.parallel.finite import check_finite
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.telemetry.traffic import Versions
from dlrm_hybrid.types import ConfigError, Group
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.gradient_levels import UpdateSender
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import Elements, addresses_of
from dlrm_hybrid.wire.ternary import levels

WORD_BITS = 64


class Mean(NamedTuple):
    """Mean gradient of a bucket, its tensors concatenated.

    Attributes:
        indices_K: increasing; None for all elements.
        values_K: float32.
        is_finite: whether every value is finite.
        units: per tensor, the unit all trainers share (`DenseUpdate.units`) or None; () if sparse.
    """

    indices_K: Int32s | None
    values_K: Float32s
    is_finite: bool
    units: Sequence[float | None]


@final
class Aggregate:
    """Averages the pushes of a bucket, in buffers kept between updates.

    Args:
        offsets_E: where each tensor begins among the N, and the end of the last.
    """

    def __init__(self, offsets_E: Int64s) -> None:
        self._offsets_E = offsets_E
        elements = int(offsets_E[-1])
        self._mean_N = np.empty(elements, np.float32)
        self._sum_N = np.zeros(elements, np.float32)
        self._touched_W = np.zeros(-(-elements // WORD_BITS), np.uint64)
        self._indices_N = np.empty(elements, np.int32)

    def mean(self, pushes: Sequence[Update]) -> Mean:
        """The mean over all trainers; an element that a trainer has not sent counts as 0.

        The result may view a buffer: it is valid until the next call.
        """
        dense = [push for push in pushes if isinstance(push, DenseUpdate)]
        if len(dense) == len(pushes):
            return self._dense(dense)
        for push in pushes:
            sparse = push if isinstance(push, Elements) else push.elements()
            scatter_add(self._offsets_E, *sparse, self._sum_N, self._touched_W)
        count, is_finite = collect(
            self._touched_W, self._sum_N, len(pushes), self._indices_N, self._mean_N
        )
        return Mean(self._indices_N[:count], self._mean_N[:count], is_finite, ())

    def _dense(self, pushes: Sequence[DenseUpdate]) -> Mean:
        # The kernel reads float32 at addresses that are multiples of 4.
        arrays = [values_N for push in pushes for values_N in push.values]
        aligned = [np.require(values_N, requirements="A") for values_N in arrays]
        addresses_XT = addresses_of(aligned).reshape(len(pushes), -1)
        is_finite = mean_of_all(addresses_XT, self._offsets_E, self._mean_N)
        units_T = [
            several[0] if len(set(several)) == 1 else None
            for several in zip(*(push.units for push in pushes), strict=True)
        ]
        return Mean(None, self._mean_N, is_finite, units_T)


_ALL = ""  # name of the concatenated weights
_EVERY_WORKER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a parameter server makes, publishes and checks versions.

    Attributes:
        policy: decides when versions are made.
        optimizers: optimizer of each stage, with its learning rates.
        check_every: versions between two comparisons of the replicas with the published weights.
        attempt: how often the run has been restarted.
        pull: how versions travel.
        publishes_means: publish means of ternary gradients instead where possible; needs float32
            pulls without sparsity.
    """

    policy: SyncPolicy
    optimizers: Sequence[OptimizerConfig]
    check_every: int
    attempt: int
    pull: Pulls = Pulls()
    publishes_means: bool = False


class TernaryMean(NamedTuple):
    """Change: every element was updated by this ternary mean; valid until the next update.

    Attributes:
        mean_N: float32.
        units: unit of each tensor, see `Mean.units`.
        trainers: number of trainers averaged.
    """

    mean_N: Float32s
    units: Sequence[float | None]
    trainers: int


Change = SparseChange | TernaryMean | None
"""The elements that an update has changed; None for all."""


@final
class Bucket:
    """Master weights of one stage on one server, updated by the pushes of its workers.

    Args:
        tensors: tensors of the bucket.
        values: their initial values by name, float32; copied.
        options: how it is updated and published.
        followers: ranks that each get versions of their own; all others share one.

    Raises:
        ValueError: a value is not contiguous float32 in the CPU's memory.
        ConfigError: the options cannot be combined with followers; names the key.

    Attributes:
        num_bytes: size as float32.
        versions: counters of all that was published.
    """

    def __init__(
        self,
        tensors: Sequence[DenseTensor],
        values: Mapping[str, Tensor],
        options: ServerOptions,
        followers: Sequence[int],
    ) -> None:
        for tensor in tensors:
            require_host(values[tensor.name], "weight", tensor.name)
        self._tensors = tensors
        self._offsets_E = np.array([0, *accumulate(tensor.count for tensor in tensors)], np.int64)
        weight_N = torch.cat([values[tensor.name].detach().reshape(-1) for tensor in tensors])
        self._master = MasterWeights({_ALL: weight_N}, options.optimizers[tensors[0].stage])
        layout = Layout([Spec(tensor.id, tensor.name, tensor.shape) for tensor in tensors])
        self._published = _published(layout, weight_N.numpy(), options, bool(followers))
        self._stamps = Stamps(weight_N.numpy())
        self._followers = {
            worker: ReplicaWeights(_every_change(layout, weight_N.numpy(), options), self._stamps)
            for worker in followers
        }
        self._senders = {
            worker: UpdateSender([tensor.shape for tensor in tensors])
            for worker in (followers or (_EVERY_WORKER,))
            if options.pull.levels
        }
        self._readers: dict[int, BucketReader] = {}
        self._aggregate = Aggregate(self._offsets_E)
        self._publishes_means = options.publishes_means
        self.num_bytes = bucket_bytes(tensors)
        self.versions = Versions()
        self._older = deque(self._published.value_N.copy() for _ in range(options.policy.history))

    def gradients(self, sections: Sequence[Section], what: str, worker: int) -> Update:
        """Decode a worker's push; raises DlrmError, whose message begins with `what`."""
        reader = self._readers.get(worker)
        if reader is None:
            reader = self._readers[worker] = BucketReader(self._tensors)
        return reader.decode(sections, what)

    def apply(self, pushes: Sequence[Update], number: int, sender: Callable[[int], str]) -> Change:
        """Update the weights by the mean of some pushes; returns what changed.

        Args:
            pushes: gradients, in the order in which they are summed.
            number: push number, which sets the learning rate.
            sender: names the sender of the push at an index.

        Raises:
            DivergedError: a gradient is not finite; names trainer, step and tensor.
        """
        if self._older:
            self._older.rotate()
            np.copyto(self._older[0], self._published.value_N)
        mean = self._aggregate.mean(pushes)
        if not mean.is_finite:
            self._blame(pushes, mean, number, sender)
        moves_all = mean.indices_K is None or self._master.moves_all
        if self._followers:
            self._stamps.moved(None if moves_all else mean.indices_K)
        if mean.indices_K is not None and not moves_all:
            weight_K = self._master.apply_sparse(_ALL, mean.indices_K, mean.values_K, number)
            return SparseChange(mean.indices_K, weight_K)
        self._master.apply_gradient(_ALL, torch.from_numpy(self._scattered(mean)), number)
        if self._publishes_means and any(unit is not None for unit in mean.units):
            return TernaryMean(mean.values_K, mean.units, len(pushes))
        return None

    def publish(self, change: Change, number: int, worker: int) -> list[Section]:
        """The sections of a new version for a worker, whose replica then counts as updated.

        Args:
            change: the result of `apply`.
            number: push number, the argument of `apply`.
            worker: rank of one of the receivers.

        Raises:
            DivergedError: a weight is not finite.
        """
        if isinstance(change, TernaryMean):
            self._count(int(self._offsets_E[-1]))
            return self._means(change)
        published = self._followers.get(worker, self._published)
        sent, elements = published.publish(change, number)
        self._count(elements)
        sender = self._senders.get(worker if self._followers else _EVERY_WORKER)
        if sender is None:
            return [*sent.sections().values()]
        return [sender.encode(self._tensors[0].id, sent.elements())]

    def equalize(self, worker: int, *, everything: bool) -> list[Section]:
        """Sections that make a follower's replica equal to the weights, in float32.

        Args:
            worker: rank of the follower.
            everything: send all elements; else those in which the replica is known to differ.
        """
        if everything and worker in self._senders:
            self._senders[worker].restart()  # a worker that just joined has fresh state
        sent, elements = self._followers[worker].equalize(everything=everything)
        self._count(elements)
        return [*sent.sections().values()]

    def restart(self, values: Mapping[str, Tensor]) -> None:
        """Resume from the tensors of `pieces`; versions that are not there begin as the weights.

        Raises:
            DataError: a value is missing or has another shape.
        """
        copy_into(self._views(self._master.tensors()), values)
        for value_N in (self._published.value_N, *self._older):
            np.copyto(value_N, self._master.weights[_ALL].numpy())
        versions = self._versions()
        copy_into({name: versions[name] for name in versions.keys() & values.keys()}, values)
        for follower in self._followers.values():
            follower.equalize(everything=True)

    def _count(self, published: int) -> None:
        self.versions = self.versions.plus(Versions(int(self._offsets_E[-1]), published))

    def _means(self, change: TernaryMean) -> list[Section]:
        """LEVELS sections of ternary means, and views of the weights of other tensors."""
        sections = self.sections(behind=0)
        for index, (first, last) in enumerate(pairwise(self._offsets_E.tolist())):
            unit, tensor = change.units[index], self._tensors[index].id
            if unit is not None:
                mean_N = change.mean_N[first:last]
                sections[index] = levels(tensor, mean_N, unit, change.trainers)
        return sections

    def digest(self, behind: int, worker: int) -> int:
        """Digest of the version `behind` versions before the last one published to a worker."""
        follower = self._followers.get(worker)
        return digest_of([self._version(behind) if follower is None else follower.value_N])

    def sections(self, behind: int) -> list[Section]:
        """Sections that view all values of the version `behind` versions before the newest."""
        parts = np.split(self._version(behind), self._offsets_E[1:-1])
        return [dense(t.id, part_N) for t, part_N in zip(self._tensors, parts, strict=True)]

    def weights(self) -> dict[str, Tensor]:
        """Views of the weights by name."""
        return self._named("", self._master.weights[_ALL])

    def pieces(self) -> list[Piece]:
        """Views of all that a checkpoint must hold; see `ParameterServer.pieces`."""
        weights = full_pieces(self._views(self._master.tensors()))
        return [*weights, *full_pieces(self._versions(), Group.VERSIONS)]

    def _versions(self) -> dict[str, Tensor]:
        older = enumerate(self._older, start=1)
        flat = {f".behind{behind}": torch.from_numpy(value_N) for behind, value_N in older}
        return self._views(flat) | self._published.tensors()

    def _views(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: view
            for end, flat_N in flat.items()
            for name, view in self._named(end, flat_N).items()
        }

    def _named(self, end: str, flat_N: Tensor) -> dict[str, Tensor]:
        """Views of all tensors in `flat_N`, by their names, each followed by `end`.

        Updates are counted for all tensors together: each gets the same step counter.
        """
        if end == f".{STEP}":
            return {f"{tensor.name}{end}": flat_N for tensor in self._tensors}
        spans = pairwise(self._offsets_E.tolist())
        return {
            f"{tensor.name}{end}": flat_N[first:last].view(tensor.shape)
            for tensor, (first, last) in zip(self._tensors, spans, strict=True)
        }

    def _version(self, behind: int) -> Float32s:
        return self._older[behind - 1] if behind else self._published.value_N

    def _scattered(self, mean: Mean) -> Float32s:
        """The mean as a dense array, zeros written out."""
        if mean.indices_K is None:
            return mean.values_K
        full_N = np.zeros(self._offsets_E[-1], np.float32)
        put(mean.indices_K, mean.values_K, full_N)
        return full_N

    def _blame(
        self, pushes: Sequence[Update], mean: Mean, number: int, sender: Callable[[int], str]
    ) -> None:
        """Raise DivergedError for the first tensor whose mean is not finite."""
        cuts_E = self._offsets_E
        if mean.indices_K is not None:
            cuts_E = np.searchsorted(mean.indices_K, self._offsets_E)
        for index, (first, last) in enumerate(pairwise(cuts_E.tolist())):
            parts = [push.values_of(index) for push in pushes]
            name = self._tensors[index].name
            check_finite(name, number, mean.values_K[first:last], parts, sender)


def _published(
    layout: Layout, weight_N: Float32s, options: ServerOptions, has_followers: bool
) -> PublishedWeights:
    """The weights published to workers that share versions; beside followers, the masters."""
    if has_followers and options.publishes_means:
        raise ConfigError("gradient.pull=levels: trainers must all be sent the same")
    if options.pull.left_out is None:
        if has_followers:
            return EveryChange(layout, weight_N, Dtype.FLOAT32)
        return _every_change(layout, weight_N, options)
    if has_followers:
        raise ConfigError(
            f"pull.sparsity = {options.pull.sparsity}: trainers must all be sent the same"
        )
    pull, sparsity = options.pull, options.pull.left_out
    return LargestChanges(layout, weight_N, pull.dtype, sparsity, levels=pull.levels)


def _every_change(layout: Layout, weight_N: Float32s, options: ServerOptions) -> EveryChange:
    return EveryChange(layout, weight_N, options.pull.dtype, levels=options.pull.levels)
