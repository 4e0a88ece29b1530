"""Residual plus gradient of a step on devices, from which a selection is taken.

It answers the selectors of the CPU (`gradient.selector.Accumulated`). What they agree on with other
trainers is known to the host as indices; values stay where they are.

Shapes: N elements of T tensors on D devices, K of them selected; E = T + 1 offsets, L parts of N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Float64s, Int32s, Int64s
from dlrm_hybrid.compress.device.ops import BROKEN, OVERFLOWN, USED
from dlrm_hybrid.compress.device.shard import Facts, Orders, Selection, Shard
from dlrm_hybrid.compress.device.sums import beside, current
from dlrm_hybrid.compress.gradient.compressor import Selected
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.selector import largest
from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector
from dlrm_hybrid.compress.host import fetched, fetched_numbers, not_finite
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Elements

Selections = Sequence[Selection]
"""What is selected on each device."""


@final
class DeviceResidual:
    """The residuals of all tensors, which the gradients of a step join.

    Args:
        layout: of the tensors.
        homes: the device of each.
        shard_of: makes what computes on a device, of the tensors there.

    Attributes:
        layout, homes: as given.
        shards: one for each device, with the numbers of its tensors.
        used_T: bool, whether each gradient of the last step was not all zeros.
    """

    def __init__(
        self,
        layout: Layout,
        homes: Sequence[torch.device],
        shard_of: Callable[[Layout, torch.device], Shard],
    ) -> None:
        self.layout, self.homes = layout, homes
        members = [
            [tensor for tensor, home in enumerate(homes) if home == device]
            for device in dict.fromkeys(homes)
        ]
        parts = [Layout([layout.specs[tensor] for tensor in own]) for own in members]
        pairs = zip(parts, members, strict=True)
        self.shards = [(shard_of(part, homes[own[0]]), own) for part, own in pairs]
        self._by_shard = Layout([*chain.from_iterable(part.specs for part in parts)])
        self.used_T = np.ones(len(homes), bool)
        self._step, self._waits = 0, False
        self._met: tuple[Indices, Float32s] | None = None  # what `meeting` has found, with values
        self._done: tuple[Thresholds, Sequence[Facts], Sequence[int]] | None = None

    def each(self) -> Iterator[tuple[Shard, Sequence[int]]]:
        """The shards and the numbers of their tensors; the device of each is the current one."""
        for shard, tensors in self.shards:
            with current(shard.device):
                yield shard, tensors

    def begin(self, gradients: Sequence[Tensor], step: int) -> None:
        """Take the gradients of a step.

        Args:
            gradients: float32 of all tensors, contiguous, at home; they become zeros.
            step: counted from 0, for messages.
        """
        self._step, self._waits, self._met = step, True, None
        for shard, tensors in self.each():
            shard.inspect([gradients[tensor] for tensor in tensors])
        if len(self.shards) > 1:
            # What is broken on one device must change nothing on the others, either.
            faults = [shard.fault_1 for shard, _ in self.shards]
            for shard, _ in self.each():
                copies = [fault_1.to(shard.device) for fault_1 in faults]
                shard.fault_1.copy_(torch.cat(copies).amax(0, keepdim=True))

    def launch(self, selector: ThresholdSelector, state: Thresholds, step: int) -> list[Tensor]:
        """Let the gradients join, and launch the selection of what meets thresholds.

        Returns:
            numbers of each device for `finish`, int64; all at the first home, for one wait.
        """
        self.settle()
        self._waits = False
        taus_T = selector.begin(state, step)
        due = {*state.due(selector.settings, step)}
        numbers: list[Tensor] = []
        for shard, tensors in self.each():
            orders = Orders(
                taus_T[tensors],
                [local for local, tensor in enumerate(tensors) if tensor in due],
                [state.ks[tensor] for tensor in tensors],
                [state.rule_states[tensor] for tensor in tensors],
            )
            numbers.append(shard.launch(orders).to(self.homes[0]))
        return numbers

    def announced(self, numbers: Sequence[Tensor]) -> Tensor:
        """How many elements were selected, int64 (1) at the first home; -1 for a failure."""
        pairs = zip(self.shards, numbers, strict=True)
        counts_D = torch.cat([shard.announced(own).to(self.homes[0]) for (shard, _), own in pairs])
        return torch.where((counts_D < 0).any(), -1, counts_D.sum(0, keepdim=True))

    def finish(
        self, selector: ThresholdSelector, state: Thresholds, numbers: Sequence[Sequence[int]]
    ) -> tuple[Selections, Int64s]:
        """Take out the elements that meet thresholds; and how many of each tensor do.

        Raises:
            DivergedError: a gradient, or its sum with the residual, was not finite.
        """
        pairs = zip(self.shards, numbers, strict=True)
        found = [shard.facts(own) for (shard, _), own in pairs]
        self._require_finite([facts.flags for facts in found])
        selections: list[Selection] = []
        counts = [0] * len(self.homes)
        for (shard, tensors), facts in zip(self.each(), found, strict=True):
            own = zip(tensors, facts.counts, strict=True)
            surplus = [max(0, count - state.ks[tensor]) for tensor, count in own]
            if selector.settings.sends_ties:
                surplus = [0] * len(tensors)
            selections.append(shard.selected(facts, surplus))
            for tensor, count, over in zip(tensors, facts.counts, surplus, strict=True):
                counts[tensor] = count - over
        self._done = state, found, counts
        return selections, np.array(counts, np.int64)

    def settle(self) -> None:
        """Let the state know of the last thresholds: what they are, what rules note, and counts.

        Done when it is needed, for the device would wait for it in `finish`.
        """
        if self._done is None:
            return
        (state, found, counts), self._done = self._done, None
        renewed: dict[int, float] = {}
        for (shard, tensors), facts in zip(self.shards, found, strict=True):
            due = shard.query.due
            if due:
                shard.rule.noted(shard.query, facts.notes_MT)
            renewed |= {tensors[local]: float(facts.taus_T[local]) for local in due}
        state.end(renewed, counts, ())

    def require_finite(self) -> None:
        """Let the gradients join, and look whether all sums are finite; see `Accumulated`."""
        if self._waits:
            self._waits = False
            flags = [shard.join().to(self.homes[0]) for shard, _ in self.each()]
            self._require_finite(fetched_numbers(flags))

    def _require_finite(self, flags_DE: Sequence[Sequence[int]]) -> None:
        flags_T = np.zeros(len(self.homes), np.int64)
        for (_, tensors), flags_E in zip(self.shards, flags_DE, strict=True):
            flags_T[tensors] = flags_E[:-1]
        self.used_T = flags_T & USED > 0
        if any(flags_E[-1] for flags_E in flags_DE):
            broken = np.flatnonzero(flags_T & (BROKEN | OVERFLOWN)).item(0)
            raise not_finite(self._step, self.layout.names[broken], "the learning rate")

    def meeting(self, selector: ThresholdSelector, state: Thresholds, step: int) -> Indices:
        """The elements that meet thresholds, which stay; see `Accumulated`."""
        numbers = fetched_numbers(self.launch(selector, state, step))
        selections, _ = self.finish(selector, state, numbers)
        self.put_back(selections)
        offsets_E, local_K, values_K = self.elements(selections)
        self._met = Indices(self.layout, offsets_E, local_K), values_K
        return self._met[0]

    def norms(self, fragments: Sequence[slice]) -> Float64s:
        """The L2 norms of parts; see `Accumulated`."""
        self.require_finite()
        norms_L = np.empty(len(fragments))
        pieces_D = self._pieces(fragments)
        launched = [
            shard.norms([piece for _, piece in pieces]).to(self.homes[0])
            for (shard, _), pieces in zip(self.each(), pieces_D, strict=True)
        ]
        for pieces, own_L in zip(pieces_D, fetched(launched), strict=True):
            norms_L[[number for number, _ in pieces]] = own_L.numpy()
        return norms_L

    def largest(self, quotas: Sequence[tuple[slice, int]]) -> list[Int32s]:
        """The k largest of each part; see `Accumulated`.

        Each device lists what reaches its own k-th magnitude; the host takes k of all that.
        """
        self.require_finite()
        selections: list[Selection] = []
        pieces_D = self._pieces([part for part, _ in quotas])
        for (shard, _), pieces in zip(self.each(), pieces_D, strict=True):
            ks = [min(quotas[number][1], place.stop - place.start) for number, place in pieces]
            selections.append(shard.largest([place for _, place in pieces], ks))
        offsets_E, local_K, values_K = self.elements(selections)
        flat_K = Indices(self.layout, offsets_E, local_K).flat
        chosen: list[Int32s] = []
        for part, k in quotas:
            ends = np.searchsorted(flat_K, [part.start, part.stop])
            own = slice(ends.item(0), ends.item(1))
            chosen.append(flat_K[own][largest(values_K[own], min(k, own.stop - own.start))])
        return chosen

    def _pieces(self, parts: Sequence[slice]) -> list[list[tuple[int, slice]]]:
        """Where parts are in the padded vector of each shard that has some, with their numbers."""
        begins_L: Int64s = np.array([part.start for part in parts], np.int64)
        ends_L: Int64s = np.array([part.stop for part in parts], np.int64)
        bounds_2L = np.stack((begins_L, ends_L))
        pieces_D: list[list[tuple[int, slice]]] = []
        for shard, tensors in self.shards:
            firsts_T, places_T = self.layout.offsets[tensors], np.array(shard.blocks.places)
            starts_L = np.searchsorted(firsts_T, begins_L, "right")
            stops_L = np.searchsorted(firsts_T, ends_L, "left")
            own_2L = np.array([starts_L, stops_L]).clip(1) - 1
            within_2L = (bounds_2L - firsts_T[own_2L]).clip(0, shard.layout.sizes[own_2L])
            ends = (places_T[own_2L] + within_2L).T.tolist()
            pieces_D.append([(n, slice(*pair)) for n, pair in enumerate(ends) if pair[0] < pair[1]])
        return pieces_D

    def values_at(self, indices: Indices) -> Float32s:
        """The values at some elements, which stay; see `Accumulated`."""
        if self._met is not None and indices is self._met[0]:
            return self._met[1]
        self.require_finite()
        pairs = zip(self.each(), self._located(indices), strict=True)
        return self.elements([shard.at(flat_K) for (shard, _), flat_K in pairs]).values_K

    def take(self, indices: Indices) -> Selections:
        """Remove elements that are finite."""
        pairs = zip(self.each(), self._located(indices), strict=True)
        return [shard.take(flat_K) for (shard, _), flat_K in pairs]

    def put_back(self, selections: Selections) -> None:
        """Let what was selected, and has reached nobody, wait for later steps."""
        for (shard, _), selection in zip(self.each(), selections, strict=True):
            shard.put_back(selection)

    def add(self, selections: Selections, gradients: Sequence[Tensor]) -> None:
        """Add what a trainer has sent to the gradients of the last step."""
        for (shard, tensors), selection in zip(self.each(), selections, strict=True):
            targets = [gradients[tensor] for tensor in tensors]
            shard.ops.scatter(*selection, targets, shard.addresses_T)

    def elements(self, selections: Selections) -> Elements:
        """Copy what was selected to the host."""
        with beside(self.homes):
            pairs = [torch.cat([x.indices_K, x.values_K.view(torch.int32)]) for x in selections]
            parts = [np.split(words_2K.numpy(), 2) for words_2K in fetched(pairs)]
        chosen = [
            Indices.of_flat(shard.layout, flat_K)
            for (shard, _), (flat_K, _) in zip(self.shards, parts, strict=True)
        ]
        offsets_E = np.cumsum([0, *chain.from_iterable(own.counts for own in chosen)])
        local_K = np.concatenate([own.local_K for own in chosen])
        values_K = np.concatenate([words_K for _, words_K in parts]).view(np.float32)
        elements = Elements(offsets_E, local_K, values_K)
        return Selected(self._by_shard, elements, Dtype.FLOAT32).elements(self.layout.names)

    def received(self, elements: Elements) -> Selections:
        """Copy elements to the devices."""
        parts = self._split(elements)
        return [Selection(flat_K, uploaded(own_K, flat_K.device)) for flat_K, own_K in parts]

    def _located(self, indices: Indices) -> list[Tensor]:
        """Copy indices to the devices, int32, in all tensors of a device."""
        # The indices stand for the values, which nobody needs.
        elements = Elements(indices.splits_E, indices.local_K, indices.local_K.view(np.float32))
        return [flat_K for flat_K, _ in self._split(elements)]

    def _split(self, elements: Elements) -> Iterator[tuple[Tensor, Float32s]]:
        """The elements of each device: their indices in all its tensors, there; and values."""
        selected = Selected(self.layout, elements, Dtype.FLOAT32)
        for shard, _ in self.shards:
            offsets_E, local_K, values_K = selected.elements(shard.layout.names)
            yield uploaded(Indices(shard.layout, offsets_E, local_K).flat, shard.device), values_K

    def flush(self) -> dict[str, Tensor]:
        """Take out the residuals, by tensor."""
        return {name: part for shard, _ in self.each() for name, part in shard.flush().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.<what>" of residuals and momenta."""
        self.settle()
        views = [shard.tensors() for shard, _ in self.shards]
        return dict(chain.from_iterable(own.items() for own in views))


def uploaded(array_K: Int32s | Float32s, device: torch.device) -> Tensor:
    """Copy an array to a device; the host does not wait until it is there."""
    tensor_K = torch.from_numpy(array_K)
    if device.type == "cuda":
        tensor_K = tensor_K.pin_memory()  # or it would wait
    return tensor_K.to(device, non_blocking=True)
