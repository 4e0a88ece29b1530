"""The tensors of one device: their residuals, and what a step launches to select from them.

Shapes: N elements of T tensors, K of them sent; E = T + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.device.ops import DeviceOps, Marks, Ranks
from dlrm_hybrid.compress.device.plain import reaching
from dlrm_hybrid.compress.device.rules import DeviceRule, Estimate, Query
from dlrm_hybrid.compress.device.sums import Blocks, Sums, pointers, sent
from dlrm_hybrid.compress.gradient.error_feedback import FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.rule import RuleState
from dlrm_hybrid.compress.gradient.transforms import Momentum
from dlrm_hybrid.wire.section import Dtype

_ROOM, _ROOMY = 1024, 2.5  # places for what is selected: so many, and so many times k


class Selection(NamedTuple):
    """Elements that are sent, on the device.

    Attributes:
        indices_K: int32, increasing, in all tensors one after the other.
        values_K: float32, rounded to the type on the wire.
    """

    indices_K: Tensor
    values_K: Tensor


class Orders(NamedTuple):
    """What the host's state asks of a step.

    Attributes:
        taus_T: float32, the thresholds.
        due: the tensors that need new ones.
        ks: how many elements of each tensor should reach its threshold.
        states: of the rule, of each tensor.
    """

    taus_T: Float32s
    due: Sequence[int]
    ks: Sequence[int]
    states: Sequence[RuleState]


class Facts(NamedTuple):
    """What a step has found, once the host has it.

    Attributes:
        flags: of each tensor's gradient, then of any; see `ops`.
        splits: where the selected elements of each tensor begin, then K.
        taus_T: float32, the thresholds.
        notes_MT: of the rule, M numbers for each tensor; see `Estimate`.
    """

    flags: Sequence[int]
    splits: Sequence[int]
    taus_T: Float32s
    notes_MT: Sequence[Sequence[int]]

    @property
    def counts(self) -> list[int]:
        """How many elements of each tensor were selected."""
        return [last - first for first, last in pairwise(self.splits)]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """What was launched and waits for the host."""

    gradients: Sequence[Tensor]
    marks: Marks
    listed: tuple[Tensor, Tensor]
    taus_T: Tensor


@final
class Shard:
    """The tensors of one device, their residuals and momenta.

    Args:
        layout: of the tensors.
        device: that they are on.
        options: what happens to gradients besides selecting.
        rule: finds thresholds.
        operations: makes what computes.

    Attributes:
        layout, device, rule: as given.
        blocks: how the tensors are spread over the device.
        ops: to compute with.
        query: of the last step, to the rule.
        addresses_T: int64, of the gradients of the last step, on the device.
    """

    query: Query

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        options: FeedbackOptions,
        rule: DeviceRule,
        operations: Callable[[Blocks], DeviceOps],
    ) -> None:
        self.layout, self.device, self.rule = layout, device, rule
        self.blocks = Blocks(layout.counts, device)
        self.ops = operations(self.blocks)
        self._dtype, self._low_pass = options.dtype, float(np.float32(options.low_pass))
        self._x = Sums(self.blocks)
        self._residual_addresses_T = addresses(self._x.residuals, device)
        self._momentum = _momentum_of(options)
        if self._momentum is not None:
            self._momenta_N = torch.zeros_like(self._x.residual_N)
            nesterov = self._momentum.nesterov
            self._ahead_N = torch.zeros_like(self._momenta_N) if nesterov else None
            joining_N = self._momenta_N if self._ahead_N is None else self._ahead_N
            self._joining = self.blocks.parts(joining_N)
            self._joining_addresses_T = addresses(self._joining, device)
        self._ranks = self._largest = Ranks(self.blocks, [1] * len(layout.specs))
        self._step: _Launch | None = None
        self._places: list[int] = []
        self._orders: list[list[int]] = []
        self.addresses_T = addresses([], device)

    @property
    def fault_1(self) -> Tensor:
        """The flag of all tensors together: where it is set nothing joins a residual."""
        return self._x.fault

    def inspect(self, gradients: Sequence[Tensor]) -> None:
        """Take the gradients of a step, and look whether they are finite."""
        if self._low_pass < 1:
            self._before_N = self._x.residual_N.clone()
        self._locate(gradients)
        self._x.begin(gradients, self.addresses_T)
        self.ops.inspect(self._x)

    def _blend(self) -> None:
        """Let momenta join in place of the gradients, if there are any."""
        x = self._x
        if self._momentum is not None:
            self.ops.blend(x, self._momenta_N, self._momentum.momentum, self._ahead_N)
            x.replace(self._joining, self._joining_addresses_T)

    def join(self) -> Tensor:
        """Let the gradients join the residual, and leave zeros; returns flags, see `Facts`."""
        x, gradients = self._x, self._x.gradients
        self._blend()
        nothing_T = torch.full_like(self.blocks.sizes_T, inf, dtype=torch.float32)
        self.ops.mark(x, nothing_T, gradients, self.addresses_T)
        return x.flags_E.long()

    def launch(self, orders: Orders) -> Tensor:
        """Launch a step up to the selection; returns numbers for `facts`, int64 on the device."""
        x, gradients = self._x, self._x.gradients
        self._blend()
        if orders.ks != self._ranks.ks:
            self._ranks = Ranks(self.blocks, orders.ks)
        taus_T, due_T = self._ordered(orders)
        self.query = Query(
            x, self.ops, self._ranks, orders.due, due_T, orders.states, self._largest
        )
        estimate = Estimate(taus_T)
        if orders.due:
            estimate = self.rule.taus(self.query)
            taus_T = torch.where(due_T, estimate.taus_T, taus_T)
        marks = self.ops.mark(x, taus_T, gradients, self.addresses_T)
        room = _ROOM + int(_ROOMY * sum(orders.ks))
        listed = self.ops.compact(marks, room, gradients, self.addresses_T)
        self._step = _Launch(gradients, marks, listed, taus_T)
        return torch.cat(
            [x.flags_E.long(), marks.splits_E, taus_T.view(torch.int32).long(), *estimate.notes_MT]
        )

    def _locate(self, gradients: Sequence[Tensor]) -> None:
        """Bring the gradients' addresses to the device where they have changed."""
        places = pointers(gradients)
        if places != self._places:
            self._places = places
            self.addresses_T = sent(places, torch.int64, self.device)

    def _ordered(self, orders: Orders) -> tuple[Tensor, Tensor]:
        """Thresholds, float32, and which are due, bool, on the device; sent where they changed."""
        taus, due = orders.taus_T.view(np.int32).tolist(), orders.due
        rows = [taus, [int(tensor in due) for tensor in range(len(taus))]]
        if rows != self._orders:
            self._orders = rows
            orders_2T = sent(rows, torch.int32, self.device)
            self._ordered_2 = orders_2T[0].view(torch.float32), orders_2T[1] != 0
        return self._ordered_2

    def announced(self, numbers_M: Tensor) -> Tensor:
        """How many elements were selected, int64 (1); -1 if a gradient is broken."""
        tensors = len(self.layout.specs)
        fault_1, count_1 = numbers_M[tensors : tensors + 1], numbers_M[2 * tensors + 1 :][:1]
        return torch.where(fault_1 != 0, -1, count_1)

    def facts(self, numbers: Sequence[int]) -> Facts:
        """Read what `launch` has returned."""
        tensors = len(self.layout.specs)
        flags, splits = numbers[: tensors + 1], numbers[tensors + 1 : 2 * tensors + 2]
        rest = numbers[2 * tensors + 2 :]
        rows = [rest[start : start + tensors] for start in range(0, len(rest), tensors)]
        taus_T = np.array(rows[0] if rows else [], np.int32).view(np.float32)
        return Facts(flags, splits, taus_T, rows[1:])

    def selected(self, facts: Facts, surplus: Sequence[int]) -> Selection:
        """The elements that the last step has selected.

        Args:
            facts: of the step.
            surplus: how many more than may be sent were selected of each tensor.
        """
        launch, self._step = self._step, None
        assert launch is not None
        elements = self._listed(launch, facts.splits[-1])
        if any(surplus):
            elements = self._put_back_ties(launch, elements, facts.splits, surplus)
        return Selection(*elements)

    def _listed(self, launch: _Launch, count: int) -> tuple[Tensor, Tensor]:
        """All that was selected; lists now what had no room."""
        indices_K, values_K = launch.listed
        room = indices_K.numel()
        if count > room:
            args = (launch.gradients, self.addresses_T)
            indices_K, rest_K = self.ops.compact(launch.marks, count, *args)
            rest_K[:room] = values_K  # which have been cleared
            values_K = rest_K
        return indices_K[:count], values_K[:count]

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
        to_K = torch.where(drops_K, kept, torch.arange(splits[-1], device=self.device) - behind_K)
        back_K = torch.where(drops_K, behind_K - 1, dropped)
        rest = [x.new_empty(kept + 1).scatter_(0, to_K, x)[:kept] for x in elements]
        back = [x.new_empty(dropped + 1).scatter_(0, back_K, x)[:dropped] for x in elements]
        self.put_back(Selection(back[0], back[1]))
        return rest[0], rest[1]

    def norms(self, pieces: Sequence[slice]) -> Tensor:
        """The L2 norms of parts of the padded vector, float64."""
        parts = [self._x.residual_N[piece] for piece in pieces]
        norms_L = torch.zeros(len(pieces), dtype=torch.float64, device=self.device)
        for number, part in enumerate(parts):
            wide = part.double()
            norms_L[number] = wide.dot(wide).sqrt()
        return norms_L

    def largest(self, pieces: Sequence[slice], ks: Sequence[int]) -> Selection:
        """What reaches the k-th magnitude of each part of the padded vector, but no zeros."""
        x_N, is_due = self._x.residual_N, [k > 0 for k in ks]
        blocks = Blocks([piece.stop - piece.start for piece in pieces], self.device)
        is_whole = len(pieces) == 1 and blocks.size == x_N.numel()
        parts = Sums(blocks, x_N if is_whole else None)
        if not is_whole:
            for part, piece in zip(parts.residuals, pieces, strict=True):
                part.copy_(x_N[piece])
        due = sent(is_due, torch.bool, self.device)
        ranks = Ranks(blocks, [max(1, k) for k in ks])
        taus = self.ops.of(blocks).kth(parts, ranks, due) if any(is_due) else due.float()
        mask_N = torch.zeros_like(x_N, dtype=torch.bool)
        for piece, tau, k in zip(pieces, taus, ks, strict=True):
            if k:
                mask_N[piece] = reaching(x_N[piece], tau)
        padded_K = mask_N.nonzero().view(-1)
        indices_K = self.blocks.unpadded(padded_K).int()
        return Selection(indices_K, x_N.index_select(0, padded_K))

    def at(self, indices_K: Tensor) -> Selection:
        """Some elements, which stay."""
        padded_K = self.blocks.padded(indices_K.long())
        return Selection(indices_K, self._x.residual_N.index_select(0, padded_K))

    def take(self, indices_K: Tensor) -> Selection:
        """Remove some elements."""
        padded_K = self.blocks.padded(indices_K.long())
        values_K = self._x.residual_N.index_select(0, padded_K)
        self._x.residual_N.index_fill_(0, padded_K, 0.0)
        return Selection(indices_K, values_K)

    def rounded(
        self, selection: Selection, rounded_K: Tensor | None, *, masks_all: bool
    ) -> Selection:
        """What is sent of a selection; the residual keeps what rounding takes.

        Args:
            selection: the elements, with their values.
            rounded_K: these rounded; None to round them to the type on the wire.
            masks_all: those that round to zero lose their momentum, too.
        """
        indices_K, values_K = selection
        masks = self._momentum is not None and self._momentum.masking
        if self._dtype is Dtype.FLOAT32 and not masks:
            return selection
        padded_K = self.blocks.padded(indices_K.long())
        if rounded_K is None:
            rounded_K = _narrowed(values_K, self._dtype)
        if self._dtype is not Dtype.FLOAT32:
            self._x.residual_N[padded_K] = values_K - rounded_K
        if masks:
            momenta_K = self._momenta_N.index_select(0, padded_K)
            leaves_K = torch.ones_like(rounded_K, dtype=torch.bool) if masks_all else rounded_K != 0
            self._momenta_N[padded_K] = momenta_K.masked_fill(leaves_K, 0.0)
        return Selection(indices_K, rounded_K)

    def damp(self) -> None:
        """Keep only a part of what the residual has gained in this step; see `ErrorFeedback`."""
        if self._low_pass < 1:
            self._x.residual_N.sub_(self._before_N).mul_(self._low_pass).add_(self._before_N)

    def put_back(self, selection: Selection) -> None:
        """Let what was selected, and has reached nobody, wait for later steps."""
        self.ops.scatter(*selection, self._x.residuals, self._residual_addresses_T)

    def flush(self) -> dict[str, Tensor]:
        """Take out the residuals, by tensor."""
        residual_N = self._x.residual_N.clone()
        self._x.residual_N.zero_()
        return dict(zip(self.layout.names, self._shaped(residual_N), strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.<what>" of residuals and momenta."""
        vectors = [("residual", self._x.residual_N)]
        if self._momentum is not None:
            vectors.append(("momentum", self._momenta_N))
        return {
            f"{name}.{what}": part
            for what, padded_N in vectors
            for name, part in zip(self.layout.names, self._shaped(padded_N), strict=True)
        }

    def _shaped(self, padded_N: Tensor) -> list[Tensor]:
        pairs = zip(self.layout.specs, self.blocks.parts(padded_N), strict=True)
        return [part.view(spec.shape) for spec, part in pairs]


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where tensors are, int64 (T) on the device."""
    return sent(pointers(tensors), torch.int64, device)


def _momentum_of(options: FeedbackOptions) -> Momentum | None:
    momenta = [transform for transform in options.transforms if isinstance(transform, Momentum)]
    return momenta[0] if momenta else None


def _narrowed(values_K: Tensor, dtype: Dtype) -> Tensor:
    """The nearest values of a type, at most its largest, as float32."""
    if dtype is Dtype.FLOAT32:
        return values_K
    kind = torch.bfloat16 if dtype is Dtype.BFLOAT16 else torch.float16
    largest = torch.finfo(kind).max
    return values_K.clamp(-largest, largest).to(kind).to(torch.float32)
