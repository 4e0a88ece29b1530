"""Error feedback on a device: selection by thresholds, as `gradient.error_feedback` does it.

Shapes: N elements of T tensors, K of them sent; E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeGuard, cast, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.device.ops import (
    BROKEN,
    OVERFLOWN,
    USED,
    DeviceOps,
    Marks,
    Ranks,
    ops_for,
)
from dlrm_hybrid.compress.device.rules import Estimate, Query, rule_on_device
from dlrm_hybrid.compress.device.sums import Blocks, Sums, current, sent
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, Selected, Sent
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Indices
from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.compress.host import not_finite
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Elements

_ROOM, _ROOMY = 1024, 2.5  # places for what is selected: so many, and so many times k
_HOST_ONLY = (".residual", ".momentum")  # what an original keeps on the CPU and this does not


class Selection(NamedTuple):
    """Elements that are sent, on the device.

    Attributes:
        indices_K: int32, increasing, in all tensors one after the other.
        values_K: float32, rounded to the type on the wire.
    """

    indices_K: Tensor
    values_K: Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """What was launched and waits for the host: see `DeviceFeedback.begin`."""

    step: int
    gradients: Sequence[Tensor]
    alone: bool
    marks: Marks
    listed: tuple[Tensor, Tensor]
    query: Query
    taus_T: Tensor
    estimate: Estimate


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
        blocks: how the tensors are spread over it.
        ops: to compute with.
        addresses_T: int64, of the gradients of the last step, on the device.
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
        self.blocks = Blocks(self.layout.counts, device)
        self.ops = operations(self.blocks)
        self._x = Sums(self.blocks)
        self._residual_addresses_T = addresses(self._x.residuals, device)
        self._host_views = {
            name: view for name, view in original.tensors().items() if not name.endswith(_HOST_ONLY)
        }
        self._momentum = _momentum_of(original.options)
        if self._momentum is not None:
            self._momenta_N = torch.zeros_like(self._x.residual_N)
            nesterov = self._momentum.nesterov
            self._ahead_N = torch.zeros_like(self._momenta_N) if nesterov else None
            joining_N = self._momenta_N if self._ahead_N is None else self._ahead_N
            self._joining = self.blocks.parts(joining_N)
            self._joining_addresses_T = addresses(self._joining, device)
        self._ranks = Ranks(self.blocks, state.ks)
        self._largest = Ranks(self.blocks, [1] * len(state.ks))
        self._step: _Launch | None = None
        self._done: tuple[Query, Sequence[int], Sequence[int]] | None = None
        self._pointers: list[int] = []
        self._orders: list[list[int]] = []
        self.addresses_T = addresses([], device)
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
        x, state = self._x, self._state
        self._locate(gradients)
        x.begin(gradients, self.addresses_T)
        self.ops.inspect(x)
        if self._momentum is not None:
            self.ops.blend(x, self._momenta_N, self._momentum.momentum, self._ahead_N)
            x.replace(self._joining, self._joining_addresses_T)
        taus = self._selector.begin(state, step)
        if state.ks != self._ranks.ks:
            self._ranks = Ranks(self.blocks, state.ks)
        due = state.due(self._selector.settings, step)
        taus_T, due_T = self._ordered(taus, due)
        query = Query(x, self.ops, self._ranks, due, due_T, state.rule_states, self._largest)
        estimate = Estimate(taus_T)
        if due:
            estimate = self._rule.taus(query)
            taus_T = torch.where(due_T, estimate.taus_T, taus_T)
        marks = self.ops.mark(x, taus_T, gradients, self.addresses_T)
        room = _ROOM + int(_ROOMY * sum(state.ks))
        listed = self.ops.compact(marks, room, gradients, self.addresses_T, clear=not alone)
        self._step = _Launch(step, gradients, alone, marks, listed, query, taus_T, estimate)
        return torch.cat(
            [x.flags_E.long(), marks.splits_E, taus_T.view(torch.int32).long(), *estimate.notes_MT]
        )

    def _locate(self, gradients: Sequence[Tensor]) -> None:
        """Bring the gradients' addresses to the device where they have changed."""
        pointers = [gradient.data_ptr() for gradient in gradients]
        if pointers != self._pointers:
            self._pointers = pointers
            self.addresses_T = sent(pointers, torch.int64, self.home)

    def _ordered(self, taus: Float32s, due: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Thresholds, float32, and which are due, bool, on the device; sent where they changed."""
        orders = [taus.view(np.int32).tolist(), [int(tensor in due) for tensor in range(taus.size)]]
        if orders != self._orders:
            self._orders = orders
            orders_2T = sent(orders, torch.int32, self.home)
            self._ordered_2 = orders_2T[0].view(torch.float32), orders_2T[1] != 0
        return self._ordered_2

    def announced(self, numbers_M: Tensor) -> Tensor:
        """How many elements were selected, int64 (1) on the device; -1 if a gradient is broken."""
        tensors = len(self.layout.specs)
        total_1 = numbers_M[2 * tensors + 1 : 2 * tensors + 2]
        return torch.where(numbers_M[tensors : tensors + 1] != 0, -1, total_1)

    def require_finite(self, numbers: Sequence[int]) -> None:
        """Raise DivergedError if a gradient, or its sum with the residual, was not finite."""
        assert self._step is not None
        if numbers[len(self.layout.specs)]:
            broken = [flag & (BROKEN | OVERFLOWN) > 0 for flag in numbers]
            name = self.layout.specs[broken.index(True)].name
            raise not_finite(self._step.step, name, "the learning rate")

    def used(self, numbers: Sequence[int]) -> list[bool]:
        """Whether each tensor's gradient was not all zeros."""
        return [flag & USED > 0 for flag in numbers[: len(self.layout.specs)]]

    def finish(self, numbers: Sequence[int]) -> Selection:
        """The elements that were selected; raises as `require_finite`."""
        self.require_finite(numbers)
        launch, self._step = self._step, None
        assert launch is not None
        tensors = len(self.layout.specs)
        splits = numbers[tensors + 1 : 2 * tensors + 2]
        counts = [last - first for first, last in pairwise(splits)]
        surplus = self._surplus(counts)
        elements = self._listed(launch, splits[-1])
        if any(surplus):
            elements = self._put_back_ties(launch, elements, splits, surplus)
            counts = [count - over for count, over in zip(counts, surplus, strict=True)]
        self._done = launch.query, numbers[2 * tensors + 2 :], counts
        return self._rounded(launch, *elements)

    def _listed(self, launch: _Launch, count: int) -> tuple[Tensor, Tensor]:
        """All that was selected; lists now what had no room."""
        indices_K, values_K = launch.listed
        room = indices_K.numel()
        if count > room:
            args = (launch.gradients, self.addresses_T)
            indices_K, rest_K = self.ops.compact(launch.marks, count, *args, clear=not launch.alone)
            rest_K[:room] = values_K  # which may have been cleared
            values_K = rest_K
        return indices_K[:count], values_K[:count]

    def _settle(self) -> None:
        """Let the state know of the last step: thresholds, what rules note, and counts.

        Done when it is needed, for the device would wait for it in `finish`.
        """
        if self._done is None:
            return
        (query, numbers, counts), self._done = self._done, None
        tensors = len(counts)
        taus = np.array(numbers[:tensors], np.int32).view(np.float32)
        if query.due:
            starts = range(tensors, len(numbers), tensors)
            self._rule.noted(query, [numbers[start : start + tensors] for start in starts])
        self._state.end({tensor: float(taus[tensor]) for tensor in query.due}, counts, ())
        self._steps += 1
        self._sent_T += np.array(counts, np.int64)

    def put_back(self, selection: Selection) -> None:
        """Let what was selected, and has reached nobody, wait for later steps."""
        self.ops.scatter(*selection, self._x.residuals, self._residual_addresses_T)

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
        parts = self._shaped(self._x.residual_N.clone())
        self._x.residual_N.zero_()
        return {spec.name: part for spec, part in zip(self.layout.specs, parts, strict=True)}

    @override
    def tensors(self) -> dict[str, Tensor]:
        self._settle()
        views = dict(self._host_views)
        vectors = [("residual", self._x.residual_N)]
        if self._momentum is not None:
            vectors.append(("momentum", self._momenta_N))
        for what, padded_N in vectors:
            pairs = zip(self.layout.specs, self._shaped(padded_N), strict=True)
            views |= {f"{spec.name}.{what}": part for spec, part in pairs}
        return views

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

    def _shaped(self, padded_N: Tensor) -> list[Tensor]:
        pairs = zip(self.layout.specs, self.blocks.parts(padded_N), strict=True)
        return [part.view(spec.shape) for spec, part in pairs]

    def _surplus(self, counts: Sequence[int]) -> list[int]:
        """How many more than k of each tensor were selected where ties are not sent."""
        if self._selector.settings.sends_ties:
            return [0] * len(counts)
        return [max(0, count - k) for count, k in zip(counts, self._state.ks, strict=True)]

    def _put_back_ties(
        self,
        launch: _Launch,
        elements: tuple[Tensor, Tensor],
        splits: Sequence[int],
        surplus: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Keep k of each tensor: of those that equal the threshold, the last ones return."""
        values_K = elements[1]
        drops_K = torch.zeros_like(values_K, dtype=torch.bool)
        for tensor, over in enumerate(surplus):
            if over:
                span = slice(splits[tensor], splits[tensor + 1])
                ties = values_K[span].abs() == launch.taus_T[tensor]
                until = ties.cumsum(0)
                drops_K[span] = ties & (until > until[-1] - over)
        kept, dropped = splits[-1] - sum(surplus), sum(surplus)
        # Of known sizes, so that nobody waits: the last place takes what does not belong there.
        behind_K = drops_K.cumsum(0)
        to_K = torch.where(drops_K, kept, torch.arange(splits[-1], device=self.home) - behind_K)
        back_K = torch.where(drops_K, behind_K - 1, dropped)
        rest = [x.new_empty(kept + 1).scatter_(0, to_K, x)[:kept] for x in elements]
        back = [x.new_empty(dropped + 1).scatter_(0, back_K, x)[:dropped] for x in elements]
        self.put_back(Selection(back[0], back[1]))
        if launch.alone:  # the gradients still hold them
            self.ops.scatter(back[0], -back[1], launch.gradients, self.addresses_T)
        return rest[0], rest[1]

    def _rounded(self, launch: _Launch, indices_K: Tensor, values_K: Tensor) -> Selection:
        """Round what is sent; the residual keeps the difference."""
        dtype = self._options.dtype
        masks = self._momentum is not None and self._momentum.masking
        if dtype is Dtype.FLOAT32 and not masks:
            return Selection(indices_K, values_K)
        padded_K = self.blocks.padded(indices_K.long())
        if masks:
            self._momenta_N.index_fill_(0, padded_K, 0.0)  # to assign a number would wait
        if dtype is Dtype.FLOAT32:
            return Selection(indices_K, values_K)
        rounded_K = _narrowed(values_K, dtype)
        lost_K = values_K - rounded_K
        self._x.residual_N[padded_K] = lost_K
        if launch.alone:
            self.ops.scatter(indices_K, -lost_K, launch.gradients, self.addresses_T)
        return Selection(indices_K, rounded_K)

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


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where tensors are, int64 (T) on the device."""
    return sent([tensor.data_ptr() for tensor in tensors], torch.int64, device)


def _momentum_of(options: FeedbackOptions) -> Momentum | None:
    momenta = [transform for transform in options.transforms if isinstance(transform, Momentum)]
    return momenta[0] if momenta else None


def _narrowed(values_K: Tensor, dtype: Dtype) -> Tensor:
    """The nearest values of half precision, at most its largest, as float32."""
    kind = torch.bfloat16 if dtype is Dtype.BFLOAT16 else torch.float16
    largest = torch.finfo(kind).max
    return values_K.clamp(-largest, largest).to(kind).to(torch.float32)
