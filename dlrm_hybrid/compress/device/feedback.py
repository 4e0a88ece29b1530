"""Error feedback on devices: what `gradient.error_feedback` does, where the gradients are.

Shapes: N elements of T tensors, K of them sent; E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import TypeGuard, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.compress.device.ops import DeviceOps, ops_for
from dlrm_hybrid.compress.device.residual import DeviceResidual, Selections
from dlrm_hybrid.compress.device.rules import Kth, rule_on_device
from dlrm_hybrid.compress.device.shard import Selection, Shard
from dlrm_hybrid.compress.device.sums import Blocks
from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, Selected, Sent
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.fragments import FragmentSelector
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.methods.randomk import RandomSelector
from dlrm_hybrid.compress.gradient.selector import FromLeader, LargestOfAll, Selector, Union
from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.compress.host import fetched_numbers
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.compress.update import Update
from dlrm_hybrid.kernels.levels.rounding import round_to_levels
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import Elements

_HOST_ONLY = (".residual", ".momentum")  # what an original keeps on the CPU and this does not


@final
class DeviceSent(Sent):
    """What is sent of tensors on devices; who asks for its elements has them copied.

    Args:
        residual: that it was taken from.
        selections: rounded to the type on the wire.
        dtype: of the values on the wire.
        elements: what of it is sent, if the host knows.

    Attributes:
        selections: as given.
    """

    def __init__(
        self,
        residual: DeviceResidual,
        selections: Selections,
        dtype: Dtype,
        elements: Elements | None = None,
    ) -> None:
        self._residual, self.selections, self._dtype = residual, selections, dtype
        self._elements = elements

    @property
    @override
    def dtype(self) -> Dtype:
        return self._dtype

    def copied(self) -> DeviceSent:
        """The same with values in memory of their own."""
        selections = [Selection(own.indices_K, own.values_K.clone()) for own in self.selections]
        return DeviceSent(self._residual, selections, self._dtype)

    @cached_property
    def selected(self) -> Selected:
        """The same on the host."""
        elements = self._elements or self._residual.elements(self.selections)
        return Selected(self._residual.layout, elements, self._dtype)

    @override
    def elements(self, names: Sequence[str] | None = None) -> Elements:
        return self.selected.elements(names)

    @override
    def sections(self) -> dict[str, Section]:
        return self.selected.sections()


@final
class DeviceFeedback(Compressor):
    """Sends selected elements, and keeps the others on the devices.

    It selects the same as the compressor on the CPU, and its state has the same names; only, a
    value that rounds to zero in half precision is sent all the same. Levels are found on the host,
    which sends them: only what was selected goes there, and comes back rounded.

    Args:
        original: a fresh compressor on the CPU, for which `can_move` is true.
        homes: the device of each gradient.
        operations: makes what computes.

    Attributes:
        layout: of the tensors.
        homes: as given.
        residual: what waits on the devices.
    """

    def __init__(
        self,
        original: ErrorFeedback,
        homes: Sequence[torch.device],
        operations: Callable[[Blocks], DeviceOps] = ops_for,
    ) -> None:
        self.layout, self.homes = original.layout, homes
        self._selector, self._state = original.selector, original.selected
        self._options = original.options
        thresholds = _innermost(original.selector)

        def shard_of(layout: Layout, device: torch.device) -> Shard:
            rule = Kth()
            if isinstance(thresholds, ThresholdSelector):
                rule = rule_on_device(thresholds.rule)
                assert rule is not None, "can_move refuses this"
            return Shard(layout, device, original.options, rule, operations)

        self.residual = DeviceResidual(self.layout, homes, shard_of)
        self._host_views = {
            name: view for name, view in original.tensors().items() if not name.endswith(_HOST_ONLY)
        }
        self._start_report()

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return self._selector.rounds

    @property
    @override
    def sends_levels(self) -> bool:
        return self._options.levels

    def launch(self, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """Launch a step up to the selection, of a method that selects by thresholds of its own.

        Args:
            gradients: float32 of all tensors, contiguous, at home; by `finish` they hold zeros.
            step: counted from 0.

        Returns:
            numbers of each device for `finish`, int64; all at the first home, for one wait.
        """
        selector, state = self._thresholds
        self.residual.begin(gradients, step)
        return self.residual.launch(selector, state, step)

    def finish(self, numbers: Sequence[Sequence[int]]) -> DeviceSent:
        """What is sent after `launch`.

        Raises:
            DivergedError: a gradient, or its sum with the residual, was not finite.
        """
        selections, counts_T = self.residual.finish(*self._thresholds, numbers)
        return self._sent(selections, counts_T)

    @property
    def _thresholds(self) -> tuple[ThresholdSelector, Thresholds]:
        assert isinstance(self._selector, ThresholdSelector)
        assert isinstance(self._state, Thresholds)
        return self._selector, self._state

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        copies = [gradients[name].clone() for name in self.layout.names]
        sent = yield from self.encode_in_place(copies, step)
        return sent.selected

    def encode_in_place(
        self, gradients: Sequence[Tensor], step: int
    ) -> Generator[Collective, Sections, DeviceSent]:
        """As `encode`, but the gradients become zeros, and what is sent stays there."""
        if self.is_own:
            return self.finish(fetched_numbers(self.launch(gradients, step)))
        self.residual.begin(gradients, step)
        try:
            indices = yield from self._selector.select(self.residual, self._state, step)
        except GeneratorExit:  # a round has failed elsewhere: nothing is sent
            self._damp()
            raise
        sent = self._sent(self.residual.take(indices), indices.counts)
        self._damp()
        return sent

    @property
    def is_own(self) -> bool:
        """Whether each trainer selects by thresholds of its own."""
        return isinstance(self._selector, ThresholdSelector)

    def _sent(self, selections: Selections, counts_T: Int64s) -> DeviceSent:
        elements, levels = None, [None for _ in selections]
        if self.sends_levels:
            offsets_E, local_K, values_K = self.residual.elements(selections)
            rounded_K = np.empty_like(values_K)
            round_to_levels(offsets_E, values_K, rounded_K)
            # The devices give back what rounding took while the host codes the message.
            returned = self.residual.received(Elements(offsets_E, local_K, rounded_K))
            levels = [own.values_K for own in returned]
            kept_K = rounded_K != 0
            offsets_E = np.append(0, np.cumsum(kept_K))[offsets_E]
            elements = Elements(offsets_E, local_K[kept_K], rounded_K[kept_K])
            counts_T = np.diff(offsets_E)
        self._steps += 1
        self._sent_T += counts_T
        masks_all = bool(self.rounds) and not self.sends_levels
        rows = zip(self.residual.each(), selections, levels, strict=True)
        rounded = [shard.rounded(own, to_K, masks_all=masks_all) for (shard, _), own, to_K in rows]
        return DeviceSent(self.residual, rounded, self._options.dtype, elements)

    def _damp(self) -> None:
        for shard, _ in self.residual.each():
            shard.damp()

    def received(self, part: Update | Sent) -> Selections:
        """What a trainer has sent, on the devices."""
        if isinstance(part, DeviceSent):
            return part.selections
        return self.residual.received(part if isinstance(part, Elements) else part.elements())

    @override
    def take_back(self, sent: Sent) -> None:
        # What was sent did not lose its damped part, so it comes back damped.
        factor = float(np.float32(self._options.low_pass))
        assert isinstance(sent, DeviceSent)
        selections = sent.selections
        if factor < 1:
            selections = [Selection(own.indices_K, own.values_K * factor) for own in selections]
        self.residual.put_back(selections)

    @override
    def flush(self) -> dict[str, Tensor]:
        return self.residual.flush()

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self._host_views | self.residual.tensors()

    @override
    def report(self) -> dict[str, SentReport]:
        self.residual.settle()
        reports = [
            SentReport(elements=self._steps * spec.count, sent=count)
            for spec, count in zip(self.layout.specs, self._sent_T.tolist(), strict=True)
        ]
        self._start_report()
        return dict(zip(self.layout.names, self._state.report(reports), strict=True))

    def _start_report(self) -> None:
        self._steps = 0
        self._sent_T = np.zeros(len(self.layout.specs), np.int64)


def can_move(compressor: Compressor) -> TypeGuard[ErrorFeedback]:
    """Whether `DeviceFeedback` can stand in for a compressor."""
    if not isinstance(compressor, ErrorFeedback):
        return False
    selector, options = _innermost(compressor.selector), compressor.options
    if isinstance(selector, ThresholdSelector):
        selects = selector.settings.scope == "tensor" and rule_on_device(selector.rule) is not None
    else:
        selects = isinstance(selector, LargestOfAll | FragmentSelector | RandomSelector)
    return (
        selects
        and (options.drain is None or options.drain.mode == "none")
        and all(isinstance(transform, Momentum) for transform in options.transforms)
    )


def _innermost(selector: Selector) -> Selector:
    """What selects on one trainer."""
    while isinstance(selector, FromLeader | Union):
        selector = selector.inner
    return selector
