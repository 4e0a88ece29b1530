"""Error feedback on a device: selection by thresholds, as `gradient.error_feedback` does it.

Shapes: N elements of T tensors, K of them sent; E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard, cast, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.device.ops import BROKEN, OVERFLOWN, USED, DeviceOps, ops_for
from dlrm_hybrid.compress.device.rules import Query, rule_on_device
from dlrm_hybrid.compress.device.shard import Facts, Orders, Selection, Shard
from dlrm_hybrid.compress.device.sums import Blocks, current
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, Selected, Sent
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Indices
from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.compress.host import not_finite
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.wire.sparse import Elements

_HOST_ONLY = (".residual", ".momentum")  # what an original keeps on the CPU and this does not


@final
class DeviceFeedback(Compressor):
    """Sends what reaches thresholds, and keeps the rest on the device.

    It selects the same as the compressor on the CPU, and its state has the same names; only, a
    value that rounds to zero in half precision is sent all the same.

    Args:
        original: a fresh compressor on the CPU, for which `can_move` is true.
        device: of the gradients.
        operations: makes what computes.

    Attributes:
        layout: of the tensors.
        home: the device.
        shard: the tensors there.
    """

    def __init__(
        self,
        original: ErrorFeedback,
        device: torch.device,
        operations: Callable[[Blocks], DeviceOps] = ops_for,
    ) -> None:
        selector, state = original.selector, original.selected
        assert isinstance(selector, ThresholdSelector) and isinstance(state, Thresholds)
        rule = rule_on_device(selector.rule)
        assert rule is not None, "can_move refuses this"
        self.layout, self.home = original.layout, device
        self._selector, self._state, self._rule = selector, state, rule
        self._options = original.options
        self.shard = Shard(self.layout, device, state.ks, original.options, operations)
        self._host_views = {
            name: view for name, view in original.tensors().items() if not name.endswith(_HOST_ONLY)
        }
        self._step: int | None = None  # that was launched and waits for the host
        self._done: tuple[Query, Facts, Sequence[int]] | None = None
        self._start_report()

    def begin(self, gradients: Sequence[Tensor], step: int, *, alone: bool) -> Tensor:
        """Launch a step up to the selection.

        Args:
            gradients: float32 of all tensors, contiguous, on the device; by `finish` they hold what
                is sent where this trainer is alone, else zeros.
            step: counted from 0.
            alone: nobody else sends.

        Returns:
            numbers for `finish`, int64 on the device.
        """
        self._settle()
        state = self._state
        taus_T = self._selector.begin(state, step)
        due = state.due(self._selector.settings, step)
        self._step = step
        orders = Orders(taus_T, due, state.ks, state.rule_states)
        return self.shard.launch(gradients, orders, self._rule, alone=alone)

    def announced(self, numbers_M: Tensor) -> Tensor:
        """How many elements were selected, int64 (1) on the device; -1 if a gradient is broken."""
        tensors = len(self.layout.specs)
        total_1 = numbers_M[2 * tensors + 1 : 2 * tensors + 2]
        return torch.where(numbers_M[tensors : tensors + 1] != 0, -1, total_1)

    def used(self, numbers: Sequence[int]) -> list[bool]:
        """Whether each tensor's gradient was not all zeros."""
        return [flag & USED > 0 for flag in numbers[: len(self.layout.specs)]]

    def finish(self, numbers: Sequence[int]) -> Selection:
        """The elements that were selected.

        Raises:
            DivergedError: a gradient, or its sum with the residual, was not finite.
        """
        assert self._step is not None
        facts = self.shard.facts(numbers)
        if facts.flags[-1]:
            broken = [flag & (BROKEN | OVERFLOWN) > 0 for flag in facts.flags]
            name = self.layout.specs[broken.index(True)].name
            raise not_finite(self._step, name, "the learning rate")
        self._step = None
        surplus = self._surplus(facts.counts)
        selection = self.shard.selected(facts, surplus)
        counts = [count - over for count, over in zip(facts.counts, surplus, strict=True)]
        self._done = self.shard.query, facts, counts
        return selection

    def _settle(self) -> None:
        """Let the state know of the last step: thresholds, what rules note, and counts.

        Done when it is needed, for the device would wait for it in `finish`.
        """
        if self._done is None:
            return
        (query, facts, counts), self._done = self._done, None
        if query.due:
            self._rule.noted(query, facts.notes_MT)
        self._state.end({tensor: float(facts.taus_T[tensor]) for tensor in query.due}, counts, ())
        self._steps += 1
        self._sent_T += np.array(counts, np.int64)

    def put_back(self, selection: Selection) -> None:
        """Let what was selected, and has reached nobody, wait for later steps."""
        self.shard.put_back(selection)

    def add(self, selection: Selection, gradients: Sequence[Tensor]) -> None:
        """Add what a trainer has sent to the gradients of the last step."""
        self.shard.ops.scatter(*selection, gradients, self.shard.addresses_T)

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        yield from ()
        copies = [gradients[spec.name].clone() for spec in self.layout.specs]
        with current(self.home):
            numbers = cast("list[int]", self.begin(copies, step, alone=False).tolist())
            return self.sent(self.finish(numbers))

    def sent(self, selection: Selection) -> Selected:
        """Copy a selection to the host, in the form that travels."""
        words = torch.cat([selection.indices_K, selection.values_K.view(torch.int32)]).cpu().numpy()
        flat_K, values_K = words[: words.size // 2], words[words.size // 2 :].view(np.float32)
        chosen = Indices.of_flat(self.layout, flat_K)
        elements = Elements(chosen.splits_E, chosen.local_K, values_K)
        return Selected(self.layout, elements, self._options.dtype)

    def received(self, elements: Elements) -> Selection:
        """Copy what a trainer has sent to the device."""
        counts_T = np.diff(elements.offsets_E)
        starts_K = np.repeat(self.layout.offsets[:-1], counts_T)
        flat_K = (elements.indices_K + starts_K).astype(np.int32)
        indices_K, values_K = [
            torch.from_numpy(array).to(self.home, non_blocking=True)
            for array in (flat_K, elements.values_K)
        ]
        return Selection(indices_K, values_K)

    @override
    def take_back(self, sent: Sent) -> None:
        self.put_back(self.received(sent.elements()))

    @override
    def flush(self) -> dict[str, Tensor]:
        return self.shard.flush()

    @override
    def tensors(self) -> dict[str, Tensor]:
        self._settle()
        return self._host_views | self.shard.tensors()

    @override
    def report(self) -> dict[str, SentReport]:
        self._settle()
        reports = [
            SentReport(elements=self._steps * spec.count, sent=count)
            for spec, count in zip(self.layout.specs, self._sent_T.tolist(), strict=True)
        ]
        self._start_report()
        names = [spec.name for spec in self.layout.specs]
        return dict(zip(names, self._state.report(reports), strict=True))

    def _surplus(self, counts: Sequence[int]) -> list[int]:
        """How many more than k of each tensor were selected where ties are not sent."""
        if self._selector.settings.sends_ties:
            return [0] * len(counts)
        return [max(0, count - k) for count, k in zip(counts, self._state.ks, strict=True)]

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
