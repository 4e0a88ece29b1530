"""Error feedback on a device: selection by thresholds, as `gradient.error_feedback` does it.

Shapes: N elements of T tensors, K of them sent; E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TypeGuard, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.device.ops import BROKEN, OVERFLOWN, USED, DeviceOps, ops_for
from dlrm_hybrid.compress.device.rules import rule_on_device
from dlrm_hybrid.compress.device.shard import Facts, Orders, Selection, Shard
from dlrm_hybrid.compress.device.sums import Blocks, current
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, Selected, Sent
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.compress.host import fetched, not_finite
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.compress.update import Update
from dlrm_hybrid.wire.sparse import Elements

_HOST_ONLY = (".residual", ".momentum")  # what an original keeps on the CPU and this does not


@final
class DeviceFeedback(Compressor):
    """Sends what reaches thresholds, and keeps the rest on the device.

    It selects the same as the compressor on the CPU, and its state has the same names; only, a
    value that rounds to zero in half precision is sent all the same.

    Args:
        original: a fresh compressor on the CPU, for which `can_move` is true.
        homes: the device of each gradient.
        operations: makes what computes.

    Attributes:
        layout: of the tensors.
        homes: as given.
    """

    def __init__(
        self,
        original: ErrorFeedback,
        homes: Sequence[torch.device],
        operations: Callable[[Blocks], DeviceOps] = ops_for,
    ) -> None:
        selector, state = original.selector, original.selected
        assert isinstance(selector, ThresholdSelector) and isinstance(state, Thresholds)
        self.layout, self.homes = original.layout, homes
        self._selector, self._state = selector, state
        self._options = original.options
        self._members = [
            [tensor for tensor, home in enumerate(homes) if home == device]
            for device in dict.fromkeys(homes)
        ]
        self._shards: list[Shard] = []
        for tensors in self._members:
            rule = rule_on_device(selector.rule)
            assert rule is not None, "can_move refuses this"
            args = (self._part(tensors), homes[tensors[0]], self._options, rule, operations)
            self._shards.append(Shard(*args))
        self._by_shard = self._part([*chain.from_iterable(self._members)])
        sizes = [shard.layout.size for shard in self._shards]
        *starts, _ = accumulate(sizes, initial=0)
        self._starts = [np.int32(start) for start in starts]  # of each shard's elements
        self._host_views = {
            name: view for name, view in original.tensors().items() if not name.endswith(_HOST_ONLY)
        }
        self._step: int | None = None  # that was launched and waits for the host
        self._done: tuple[Sequence[Facts], Sequence[int]] | None = None
        self._start_report()

    def _part(self, tensors: Sequence[int]) -> Layout:
        return Layout([self.layout.specs[tensor] for tensor in tensors])

    def _each(self) -> Iterator[tuple[Shard, Sequence[int]]]:
        """The shards and the numbers of their tensors; the device of each is the current one."""
        for shard, tensors in zip(self._shards, self._members, strict=True):
            with current(shard.device):
                yield shard, tensors

    def begin(self, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """Launch a step up to the selection.

        Args:
            gradients: float32 of all tensors, contiguous, at home; by `finish` they hold zeros.
            step: counted from 0.

        Returns:
            numbers of each device for `finish`, int64; all at the first home, for one wait.
        """
        self._settle()
        state = self._state
        taus_T = self._selector.begin(state, step)
        due = {*state.due(self._selector.settings, step)}
        self._step = step
        for shard, tensors in self._each():
            shard.inspect([gradients[tensor] for tensor in tensors])
        if len(self._shards) > 1:
            self._share_faults()
        numbers: list[Tensor] = []
        for shard, tensors in self._each():
            orders = Orders(
                taus_T[tensors],
                [local for local, tensor in enumerate(tensors) if tensor in due],
                [state.ks[tensor] for tensor in tensors],
                [state.rule_states[tensor] for tensor in tensors],
            )
            numbers.append(shard.launch(orders).to(self.homes[0]))
        return numbers

    def _share_faults(self) -> None:
        """Let a gradient that is broken on one device change nothing on the others, either."""
        faults = [shard.fault_1 for shard in self._shards]
        for shard, _ in self._each():
            copies = [fault_1.to(shard.device) for fault_1 in faults]
            shard.fault_1.copy_(torch.cat(copies).amax(0, keepdim=True))

    def announced(self, numbers: Sequence[Tensor]) -> Tensor:
        """How many elements were selected, int64 (1) at the first home; -1 for a failure."""
        pairs = zip(self._shards, numbers, strict=True)
        counts_D = torch.cat([shard.announced(own).to(self.homes[0]) for shard, own in pairs])
        return torch.where((counts_D < 0).any(), -1, counts_D.sum(0, keepdim=True))

    def used(self, numbers: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """Whether each tensor's gradient was not all zeros, bool (T)."""
        used_T = np.empty(len(self.homes), bool)
        for tensors, own in zip(self._members, numbers, strict=True):
            used_T[tensors] = np.array(own[: len(tensors)]) & USED > 0
        return used_T

    def finish(self, numbers: Sequence[Sequence[int]]) -> list[Selection]:
        """The elements that were selected on each device.

        Raises:
            DivergedError: a gradient, or its sum with the residual, was not finite.
        """
        assert self._step is not None
        found = [shard.facts(own) for shard, own in zip(self._shards, numbers, strict=True)]
        self._require_finite(found)
        self._step = None
        selections: list[Selection] = []
        counts = [0] * len(self.homes)
        for (shard, tensors), facts in zip(self._each(), found, strict=True):
            surplus = self._surplus(facts.counts, tensors)
            selections.append(shard.selected(facts, surplus))
            for tensor, count, over in zip(tensors, facts.counts, surplus, strict=True):
                counts[tensor] = count - over
        self._done = found, counts
        return selections

    def _require_finite(self, found: Sequence[Facts]) -> None:
        if not any(facts.flags[-1] for facts in found):
            return
        assert self._step is not None
        broken = [
            tensor
            for tensors, facts in zip(self._members, found, strict=True)
            for tensor, flag in zip(tensors, facts.flags[:-1], strict=True)
            if flag & (BROKEN | OVERFLOWN)
        ]
        raise not_finite(self._step, self.layout.names[min(broken)], "the learning rate")

    def _settle(self) -> None:
        """Let the state know of the last step: thresholds, what rules note, and counts.

        Done when it is needed, for the device would wait for it in `finish`.
        """
        if self._done is None:
            return
        (found, counts), self._done = self._done, None
        renewed: dict[int, float] = {}
        for shard, tensors, facts in zip(self._shards, self._members, found, strict=True):
            due = shard.query.due
            if due:
                shard.rule.noted(shard.query, facts.notes_MT)
            renewed |= {tensors[local]: float(facts.taus_T[local]) for local in due}
        self._state.end(renewed, counts, ())
        self._steps += 1
        self._sent_T += np.array(counts, np.int64)

    def put_back(self, selections: Sequence[Selection]) -> None:
        """Let what was selected, and has reached nobody, wait for later steps."""
        for (shard, _), selection in zip(self._each(), selections, strict=True):
            shard.put_back(selection)

    def add(self, selections: Sequence[Selection], gradients: Sequence[Tensor]) -> None:
        """Add what a trainer has sent to the gradients of the last step."""
        for (shard, tensors), selection in zip(self._each(), selections, strict=True):
            targets = [gradients[tensor] for tensor in tensors]
            shard.ops.scatter(*selection, targets, shard.addresses_T)

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        yield from ()
        copies = [gradients[name].clone() for name in self.layout.names]
        launched = fetched(self.begin(copies, step))
        return self.sent(self.finish([cast("list[int]", own_M.tolist()) for own_M in launched]))

    def sent(self, selections: Sequence[Selection]) -> Selected:
        """Copy what was selected to the host, in the form that travels."""
        words = fetched(
            [torch.cat([x.indices_K, x.values_K.view(torch.int32)]) for x in selections]
        )
        halves = [np.split(words_2K.numpy(), 2) for words_2K in words]
        flat_K, values_K = np.zeros(0, np.int32), np.zeros(0, np.float32)
        if halves:
            pairs = zip(halves, self._starts, strict=True)
            flat_K = np.concatenate([own_K + start for (own_K, _), start in pairs])
            values_K = np.concatenate([own_K.view(np.float32) for _, own_K in halves])
        chosen = Indices.of_flat(self._by_shard, flat_K)
        elements = Elements(chosen.splits_E, chosen.local_K, values_K)
        dtype = self._options.dtype
        elements = Selected(self._by_shard, elements, dtype).elements(self.layout.names)
        return Selected(self.layout, elements, dtype)

    def received(self, update: Update) -> list[Selection]:
        """Copy what a trainer has sent to the devices."""
        elements = update if isinstance(update, Elements) else update.elements()
        sent = Selected(self.layout, elements, self._options.dtype)
        offsets_E, local_K, values_K = sent.elements(self._by_shard.names)
        flat_K = Indices(self._by_shard, offsets_E, local_K).flat
        selections: list[Selection] = []
        for shard, start in zip(self._shards, self._starts, strict=True):
            ends = np.searchsorted(flat_K, [start, start + shard.layout.size])
            own = slice(ends.item(0), ends.item(1))
            indices_K, own_K = [
                torch.from_numpy(column_K).to(shard.device, non_blocking=True)
                for column_K in (flat_K[own] - start, values_K[own])
            ]
            selections.append(Selection(indices_K, own_K))
        return selections

    @override
    def take_back(self, sent: Sent) -> None:
        self.put_back(self.received(sent.elements()))

    @override
    def flush(self) -> dict[str, Tensor]:
        return {name: part for shard, _ in self._each() for name, part in shard.flush().items()}

    @override
    def tensors(self) -> dict[str, Tensor]:
        self._settle()
        views = [shard.tensors() for shard in self._shards]
        return self._host_views | dict(chain.from_iterable(own.items() for own in views))

    @override
    def report(self) -> dict[str, SentReport]:
        self._settle()
        reports = [
            SentReport(elements=self._steps * spec.count, sent=count)
            for spec, count in zip(self.layout.specs, self._sent_T.tolist(), strict=True)
        ]
        self._start_report()
        return dict(zip(self.layout.names, self._state.report(reports), strict=True))

    def _surplus(self, counts: Sequence[int], tensors: Sequence[int]) -> list[int]:
        """How many more than k of each tensor were selected where ties are not sent."""
        if self._selector.settings.sends_ties:
            return [0] * len(counts)
        ks = [self._state.ks[tensor] for tensor in tensors]
        return [max(0, count - k) for count, k in zip(counts, ks, strict=True)]

    def _start_report(self) -> None:
        self._steps = 0
        self._sent_T = np.zeros(len(self.layout.specs), np.int64)


def can_move(compressor: Compressor) -> TypeGuard[ErrorFeedback]:
    """Whether `DeviceFeedback` can stand in for a compressor."""
    if not isinstance(compressor, ErrorFeedback):
        return False
    selector, options = compressor.selector, compressor.options
    drain = options.drain
    return (
        isinstance(selector, ThresholdSelector)
        and selector.settings.scope == "tensor"
        and rule_on_device(selector.rule) is not None
        and not options.levels
        and options.low_pass == 1
        and (drain is None or drain.mode == "none")
        and all(isinstance(transform, Momentum) for transform in options.transforms)
    )
