"""All that one server owns of one stage: gradients in, what has changed out.

Its tensors lie one behind the other, so that a step is one sum, one call of the optimizer and one
look at what to tell, whatever their number.

Shapes: T tensors of N elements in all, which lie between E = T + 1 places; K elements.
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

from dlrm_hybrid.compress.update import Update, decode
from dlrm_hybrid.kernels.scatter import put
from dlrm_hybrid.parallel.dense.aggregate import Aggregate, Array, Int32s, Mean
from dlrm_hybrid.parallel.dense.master import Learning, Master
from dlrm_hybrid.parallel.dense.mirror import SUFFIX, Published
from dlrm_hybrid.parallel.dense.sections import check_tensors, digest_of, unit_bytes
from dlrm_hybrid.parallel.finite import check_finite
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.telemetry.traffic import Versions
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.levels import levels
from dlrm_hybrid.wire.section import Dtype, Section

_ALL = ""  # the name that its weights have together


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How versions are kept.

    Attributes:
        staleness: versions by which a worker may be behind.
        pull: type of the values that workers are told.
        tells_levels: means of ternary gradients are told instead, where they can be.
    """

    staleness: int
    pull: Dtype
    tells_levels: bool


class Learned(NamedTuple):
    """Elements that have moved; lasts until the next step.

    Attributes:
        places_K: ascending, among the N.
        weight_K: the weights there.
    """

    places_K: Int32s
    weight_K: Array


class Averaged(NamedTuple):
    """Ternary means that all elements have learned from; lasts until the next step.

    Attributes:
        mean_N: float32.
        units: of each tensor, see `Mean.units`.
        trainers: how many sent what this is the mean of.
    """

    mean_N: Array
    units: Sequence[float | None]
    trainers: int


@final
class Unit:
    """Weights of one stage, learned from the pushes of its workers.

    Args:
        tensors: of the unit.
        values: their initial values by name, float32; copied.
        learning: optimizer and learning rates.
        keeping: of versions.

    Attributes:
        versions: all that were told since this was made.
    """

    def __init__(
        self,
        tensors: Sequence[DenseTensor],
        values: Mapping[str, Tensor],
        learning: Learning,
        keeping: Keeping,
    ) -> None:
        self._tensors = tensors
        self._firsts_E = np.array([0, *accumulate(one.count for one in tensors)], np.int64)
        weight_N = torch.cat([values[tensor.name].detach().reshape(-1) for tensor in tensors])
        self._master = Master({_ALL: weight_N}, learning)
        self._published = Published(tensors, self._firsts_E, weight_N.numpy(), keeping.pull)
        self._aggregate = Aggregate(self._firsts_E)
        self._tells_levels = keeping.tells_levels
        versions = range(keeping.staleness)
        self.versions = Versions()
        self._older = deque(self._published.value_N.copy() for _ in versions)

    @property
    def num_bytes(self) -> int:
        """Size as float32."""
        return unit_bytes(self._tensors)

    def gradients(self, sections: Sequence[Section], what: str) -> Update:
        """The gradients that a push holds; raises DlrmError, its message begins with `what`."""
        check_tensors(sections, self._tensors, what)
        return decode(sections, what)

    def learn(
        self, pushes: Sequence[Update], step: int, sender: Callable[[int], str]
    ) -> Learned | Averaged | None:
        """Make the version `step + 1`; what has changed, None for everything.

        Args:
            pushes: gradients of `step`, in trainer order.
            step: of the learning rate.
            sender: names who sent the push with this position.

        Raises:
            DivergedError: a gradient is not finite; names trainer, step and tensor.
        """
        if self._older:
            self._older.rotate()
            np.copyto(self._older[0], self._published.value_N)
        mean = self._aggregate.mean(pushes)
        if not mean.is_finite:
            self._blame(pushes, mean, step, sender)
        if mean.places_K is not None and not self._master.moves_all:
            weight_K = self._master.learn_at(_ALL, mean.places_K, mean.values_K, step)
            return Learned(mean.places_K, weight_K)
        self._master.learn(_ALL, torch.from_numpy(self._spread(mean)), step)
        if self._tells_levels and any(unit is not None for unit in mean.units):
            return Averaged(mean.values_K, mean.units, len(pushes))
        return None

    def tell(self, learned: Learned | Averaged | None) -> list[Section]:
        """Publish what was learned last: the sections that say what has changed."""
        elements = int(self._firsts_E[-1])
        told = learned.places_K.size if isinstance(learned, Learned) else elements
        self.versions = self.versions.plus(Versions(elements, told))
        if isinstance(learned, Averaged):
            return self._means(learned)
        return self._published.tell_all() if learned is None else self._published.tell(*learned)

    def _means(self, learned: Averaged) -> list[Section]:
        """Levels, and views of the weights of what was not ternary."""
        sections = self.sections(behind=0)
        for place, (first, last) in enumerate(pairwise(self._firsts_E.tolist())):
            unit, number = learned.units[place], self._tensors[place].id
            if unit is not None:
                mean_N = learned.mean_N[first:last]
                sections[place] = levels(number, mean_N, unit, learned.trainers)
        return sections

    def digest(self, behind: int) -> int:
        """Of the version that many before the last one published."""
        return digest_of([self._version(behind)])

    def sections(self, behind: int) -> list[Section]:
        """Views of all values of a version."""
        parts = np.split(self._version(behind), self._firsts_E[1:-1])
        return [dense(one.id, part_N) for one, part_N in zip(self._tensors, parts, strict=True)]

    def weights(self) -> dict[str, Tensor]:
        """Views of the weights by name."""
        return self._named("", self._master.weights[_ALL])

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold; see `ParameterServer.tensors`."""
        held = dict(self._master.tensors())
        if self._published.is_rounded:
            held[SUFFIX] = torch.from_numpy(self._published.value_N)
        for behind, value_N in enumerate(self._older, start=1):
            held[f".behind{behind}"] = torch.from_numpy(value_N)
        return {
            name: view
            for end, flat_N in held.items()
            for name, view in self._named(end, flat_N).items()
        }

    def _named(self, end: str, flat_N: Tensor) -> dict[str, Tensor]:
        """Views of all tensors in `flat_N`, by their names with `end` behind."""
        spans = pairwise(self._firsts_E.tolist())
        return {
            f"{tensor.name}{end}": flat_N[first:last].view(tensor.shape)
            for tensor, (first, last) in zip(self._tensors, spans, strict=True)
        }

    def _version(self, behind: int) -> Array:
        return self._older[behind - 1] if behind else self._published.value_N

    def _spread(self, mean: Mean) -> Array:
        """Zeros written out."""
        if mean.places_K is None:
            return mean.values_K
        spread_N = np.zeros(self._firsts_E[-1], np.float32)
        put(mean.places_K, mean.values_K, spread_N)
        return spread_N

    def _blame(
        self, pushes: Sequence[Update], mean: Mean, step: int, sender: Callable[[int], str]
    ) -> None:
        """Raise DivergedError for the first tensor whose mean is not finite."""
        cuts_E = self._firsts_E
        if mean.places_K is not None:
            cuts_E = np.searchsorted(mean.places_K, self._firsts_E)
        for place, (first, last) in enumerate(pairwise(cuts_E.tolist())):
            given = [push.values_of(place) for push in pushes]
            name = self._tensors[place].name
            check_finite(name, step, mean.values_K[first:last], given, sender)
