"""The threshold rules on a device: each as its original in `gradient.methods`, for all tensors.

What an original decides by looking at a count is here decided on the device: all counts that it may
need are taken in one pass, or the step that it may need is launched for the tensors that do. So no
rule waits for the host.

Shapes: T tensors, J thresholds for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2, nan
from statistics import NormalDist
from typing import NamedTuple, Protocol, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.device.ops import DeviceOps, Moments, Ranks
from dlrm_hybrid.compress.device.sums import Blocks, Sums, sent
from dlrm_hybrid.compress.gradient.methods import dgc, gaussian, redsync, sidco
from dlrm_hybrid.compress.gradient.methods.hard import FixedThreshold
from dlrm_hybrid.compress.gradient.methods.sidco import TINY
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold, ExactThreshold
from dlrm_hybrid.compress.gradient.rule import RuleState, ThresholdFinder
from dlrm_hybrid.rng import fold

LOOKS = 7  # nodes of a binary tree of three looks, in the order of a heap


@final
@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """The tensors that need a threshold in this step.

    Attributes:
        x: gradient plus residual.
        ops: to compute with.
        ranks: how many elements of each tensor should reach it.
        due: the tensors.
        due_T: bool, the same.
        states: of the rule, of each tensor.
        largest: ranks of the largest magnitudes.
    """

    x: Sums
    ops: DeviceOps
    ranks: Ranks
    due: Sequence[int]
    due_T: Tensor
    states: Sequence[RuleState]
    largest: Ranks

    @property
    def k(self) -> Tensor:
        """k, how many elements should reach each threshold; whole numbers in float64 (T)."""
        return self.ranks.ks_T.double()


class Estimate(NamedTuple):
    """Thresholds, and numbers for the rule's state, once the host has them.

    Attributes:
        taus_T: float32; of tensors that are not due anything.
        notes_MT: int64, M numbers for each tensor.
    """

    taus_T: Tensor
    notes_MT: Sequence[Tensor] = ()


class DeviceRule(Protocol):
    """Finds the thresholds of all tensors; remembers nothing but what the original's state does."""

    def taus(self, query: Query) -> Estimate:
        """Find thresholds that about `query.k` elements reach."""
        ...

    def noted(self, query: Query, notes_MT: Sequence[Sequence[int]]) -> None:
        """Change the states of the tensors that were due by what `taus` has noted."""


@final
class Kth(DeviceRule):
    """`ExactThreshold` and `CountedThreshold`: the k-th magnitude."""

    @override
    def taus(self, query: Query) -> Estimate:
        return Estimate(query.ops.kth(query.x, query.ranks, query.due_T))


@final
@dataclass(frozen=True, slots=True)
class Fixed(DeviceRule):
    """`FixedThreshold`: one magnitude for all.

    Attributes:
        magnitude: above 0.
    """

    magnitude: float

    @override
    def taus(self, query: Query) -> Estimate:
        return Estimate(torch.full_like(query.ranks.ks_T, self.magnitude, dtype=torch.float32))


@final
@dataclass(frozen=True, slots=True)
class DeviceGaussian(DeviceRule):
    """`gaussian.Gaussian`: a normal distribution's threshold, moved at most twice."""

    rule: gaussian.Gaussian

    @override
    def taus(self, query: Query) -> Estimate:
        moments, sizes_T = query.ops.moments(query.x), query.x.blocks.sizes_T
        total = moments.total if self.rule.fit == "signed" else moments.excess
        mean = total / sizes_T
        variance = (moments.squares - mean * total).clamp(min=0) / (sizes_T - 1).clamp(min=1)
        spread = _quantiles(query) * variance.sqrt()
        tau = torch.where(variance.isfinite(), (mean + spread).clamp(min=0), 0.0)
        lower, higher = tau * gaussian.LOWER, tau * gaussian.HIGHER
        tree = [tau, lower, higher]
        tree += [
            t * factor for t in (lower, higher) for factor in (gaussian.LOWER, gaussian.HIGHER)
        ]
        taus_T7 = _above(torch.stack(tree, 1))
        counts_T7 = query.ops.looks(query.x, taus_T7, query.due_T)
        k_T1 = query.k[:, None]
        fits = (2 * k_T1 <= 3 * counts_T7) & (3 * counts_T7 <= 4 * k_T1)
        node_T1 = _descended(fits, 3 * counts_T7 < 2 * k_T1)
        return _or_kth(
            query, taus_T7.gather(1, node_T1), counts_T7.gather(1, node_T1), query.largest
        )


@final
@dataclass(frozen=True, slots=True)
class DeviceRedSync(DeviceRule):
    """`redsync.RedSync`: between mean and maximum, three halvings or five steps down."""

    rule: redsync.RedSync

    @override
    def taus(self, query: Query) -> Estimate:
        moments = query.ops.moments(query.x)
        bisects = self.rule.search == "bisect"
        parts = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8) if bisects else redsync.TRIMMED
        parts_J = sent(parts, torch.float64, query.x.blocks.device)
        mean_T1 = (moments.excess / query.x.blocks.sizes_T)[:, None]
        taus_TJ = _above(mean_T1 + parts_J * (moments.largest[:, None] - mean_T1))
        counts_TJ = query.ops.looks(query.x, taus_TJ, query.due_T)
        k_T1 = query.k[:, None]
        if bisects:
            fits = (k_T1 < counts_TJ) & (counts_TJ < 2 * k_T1)
            node_T1 = _descended(fits, 2 * counts_TJ < k_T1)
        else:
            node_T1 = _first(counts_TJ >= k_T1)
        return _or_kth(query, taus_TJ.gather(1, node_T1), counts_TJ.gather(1, node_T1), query.ranks)


@final
class DeviceDgc(DeviceRule):
    """`dgc.SampledThreshold`: of the same sample, lowered or made exact on the device."""

    def __init__(self, rule: dgc.SampledThreshold) -> None:
        self._rule = rule
        self._sampling: tuple[Ranks, Sums, Ranks, DeviceOps] | None = None  # for as many elements

    @override
    def taus(self, query: Query) -> Estimate:
        x, ops, settings = query.x, query.ops, self._rule.settings
        sample, ranks, sample_ops = self._sample(query)
        if x.waits:
            ops.moments(x)  # what is drawn must have been added
        rows = [cast("list[int]", state["samples"].tolist()) for state in query.states]
        numbers = [number for row in rows for number in row]
        seeds = [fold(self._rule.seed, "sample", number) for number in numbers]
        ops.draw(x, sample, sent(seeds, torch.int64, x.blocks.device))
        taus = [sample_ops.kth(sample, ranks, query.due_T).double()]
        for _ in range(dgc.LOOKS):
            taus.append(taus[-1] * dgc.LOWER)
        taus_TJ = torch.stack(taus, 1).float()
        counts_TJ = ops.looks(x, taus_TJ, query.due_T)
        is_enough = counts_TJ >= settings.lowest * query.k[:, None]
        node_T1 = _first(is_enough | (taus_TJ == 0))
        tau_T, counts_T = taus_TJ.gather(1, node_T1)[:, 0], counts_TJ.gather(1, node_T1)[:, 0]
        crowded_T = (counts_T > settings.highest * query.k) & query.due_T
        exact_T = ops.kth(x, query.ranks, crowded_T)
        return Estimate(torch.where(crowded_T, exact_T, tau_T), (counts_T,))

    def _sample(self, query: Query) -> tuple[Sums, Ranks, DeviceOps]:
        """Room for the samples, and the ranks of the thresholds in them."""
        if self._sampling is None or self._sampling[0] is not query.ranks:
            blocks, part = query.x.blocks, self._rule.settings.part
            pairs = [*zip(blocks.counts, query.ranks.ks, strict=True)]
            drawn = [min(n, max(ceil(n * part), ceil(dgc.LEAST * n / max(1, k)))) for n, k in pairs]
            triples = zip(drawn, pairs, strict=True)
            ks = [ceil(size * k / max(1, count)) for size, (count, k) in triples]
            sample = Sums(Blocks(drawn, blocks.device, blocks.chunk))
            ops = query.ops.of(sample.blocks)
            self._sampling = query.ranks, sample, Ranks(sample.blocks, ks), ops
        return self._sampling[1:]

    @override
    def noted(self, query: Query, notes_MT: Sequence[Sequence[int]]) -> None:
        for tensor in query.due:
            samples = query.states[tensor]["samples"]
            samples += int(notes_MT[0][tensor] > 0)


@final
@dataclass(frozen=True, slots=True)
class DeviceSidco(DeviceRule):
    """`sidco.Sidco`: a distribution fitted in stages, of whose number the state keeps account."""

    rule: sidco.Sidco

    @override
    def taus(self, query: Query) -> Estimate:
        moments = query.ops.moments(query.x)
        k_T, nonzero_T = query.k, moments.nonzero
        most_T = (nonzero_T / k_T).log2().ceil().clamp(min=1)
        pairs = zip(query.ranks.ks, query.x.blocks.counts, strict=True)
        bounds = [max(1, ceil(log2(max(1, count) / max(1, k)))) for k, count in pairs]
        states: list[list[int]] = [state["stages"].tolist() for state in query.states]
        state_T4 = sent(states, torch.int64, k_T.device)
        stages_T = torch.minimum(state_T4[:, 0], most_T)
        deepest = max(min(states[tensor][0], bounds[tensor]) for tensor in query.due)
        tau_T1, counts_T1 = self._estimates(query, moments, stages_T[:, None], deepest)
        tau_T, counts_T = tau_T1[:, 0], counts_T1[:, 0]
        notes = (torch.where(tau_T.isnan(), -1, counts_T), nonzero_T)
        if self._may_stray(query, states):
            elements_T = state_T4[:, 3] + counts_T
            quality_T = elements_T / ((state_T4[:, 2] + 1) * k_T)
            strays_T = (quality_T - 1).abs() > self.rule.tolerance
            strays_T &= (state_T4[:, 2] + 1 >= self.rule.window) & ~tau_T.isnan()
            strays_T &= query.due_T & (k_T < nonzero_T)
            deepest = max(bounds[tensor] for tensor in query.due)
            choices_J = torch.arange(1.0, deepest + 1, device=k_T.device, dtype=torch.float64)
            choices_TJ = choices_J.expand(len(states), -1)
            taus_TJ, counts_TJ = self._estimates(query, moments, choices_TJ, deepest, strays_T)
            error_TJ = (counts_TJ - k_T[:, None]).double().abs()
            is_none = taus_TJ.isnan() | (choices_TJ > most_T[:, None])
            best_T1 = error_TJ.masked_fill(is_none, inf).argmin(1, keepdim=True)
            tau_T = torch.where(strays_T, taus_TJ.gather(1, best_T1)[:, 0], tau_T)
            counts_T = torch.where(strays_T, counts_TJ.gather(1, best_T1)[:, 0], counts_T)
            notes = (*notes, best_T1[:, 0] + 1)
        failed_T = tau_T.isnan() | (counts_T <= 0) | (counts_T > sidco.FAR * k_T)
        failed_T &= query.due_T & (k_T < nonzero_T)
        exact_T = query.ops.kth(query.x, query.ranks, failed_T)
        tau_T = torch.where(failed_T, exact_T, tau_T.float())
        return Estimate(torch.where(k_T < nonzero_T, tau_T, 0.0), notes)

    def _may_stray(self, query: Query, states: Sequence[Sequence[int]]) -> bool:
        settings = self.rule
        ends = any(states[tensor][2] + 1 >= settings.window for tensor in query.due)
        return settings.adaptation == "best" and ends

    def _estimates(
        self,
        query: Query,
        moments: Moments,
        choices_TJ: Tensor,
        deepest: int,
        active_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Thresholds for J numbers of stages, and what reaches them; NaN where there is none."""
        active_T = query.due_T if active_T is None else active_T
        first = self.rule.first_density
        density_T1 = (query.k / moments.nonzero)[:, None]
        once_TJ = self._first(moments, density_T1).expand_as(choices_TJ)
        taus_TJ = self._first(moments, torch.full_like(density_T1, first)).expand_as(choices_TJ)
        ratios_TJ = (density_T1 / first) ** (1 / (choices_TJ - 1))
        for stage in range(deepest - 1):
            totals, squares, counts = query.ops.excesses(query.x, taus_TJ, active_T)
            means, variances = _fitted_moments(totals, squares, counts)
            further = taus_TJ + self._fit(means, variances, ratios_TJ)
            taus_TJ = torch.where(stage < choices_TJ - 1, further, taus_TJ)
        is_direct = (choices_TJ == 1) | (density_T1 >= first)
        taus_TJ = torch.where(is_direct, once_TJ, taus_TJ)
        return taus_TJ, query.ops.looks(query.x, taus_TJ.float(), active_T)

    def _first(self, moments: Moments, ratio_T1: Tensor) -> Tensor:
        mean, variance = _fitted_moments(moments.excess, moments.squares, moments.nonzero)
        return self._fit(mean[:, None], variance[:, None], ratio_T1)

    def _fit(self, mean: Tensor, variance: Tensor, ratio: Tensor) -> Tensor:
        """The distance that a part `ratio` exceeds; see `sidco.exponential` and `sidco.pareto`."""
        if self.rule.distribution == "exponential":
            return torch.where(variance.isnan(), nan, -mean * ratio.log())
        square = (mean * mean / variance).clamp(max=2.0)  # NaN stays
        shape, scale = 0.5 * (1 - square), 0.5 * mean * (square + 1)
        bent = scale * (-shape * ratio.log()).expm1() / shape
        return torch.where(shape.abs() < TINY, -scale * ratio.log(), bent)

    @override
    def noted(self, query: Query, notes_MT: Sequence[Sequence[int]]) -> None:
        counts_T, nonzero_T, *best = notes_MT
        for tensor in query.due:
            state, k = query.states[tensor], query.ranks.ks[tensor]
            if k >= nonzero_T[tensor] or counts_T[tensor] < 0:
                continue
            if self.rule.window_ends(counts_T[tensor], state):
                most = max(1, ceil(log2(nonzero_T[tensor] / k)))
                if self.rule.stray(state, k, most) and best:
                    state["stages"][0] = best[0][tensor]


def rule_on_device(rule: ThresholdFinder) -> DeviceRule | None:
    """The same rule on a device; None where it computes on the CPU only."""
    match rule:
        case ExactThreshold() | CountedThreshold():
            return Kth()
        case FixedThreshold():
            return Fixed(rule.magnitude)
        case gaussian.Gaussian():
            return DeviceGaussian(rule)
        case redsync.RedSync():
            return DeviceRedSync(rule)
        case dgc.SampledThreshold():
            return DeviceDgc(rule)
        case sidco.Sidco() if rule.distribution != "gamma":
            return DeviceSidco(rule)
        case _:
            return None


def _above(taus: Tensor) -> Tensor:
    """The smallest float32 above thresholds, as `rule.above`."""
    return taus.float().nextafter(torch.full((), inf, device=taus.device))


def _first(is_met_TJ: Tensor) -> Tensor:
    """The first of J that is met, else the last; int64 (T, 1)."""
    is_met_TJ = is_met_TJ.clone()
    is_met_TJ[:, -1] = True
    return is_met_TJ.int().argmax(1, keepdim=True)


def _descended(fits_TJ: Tensor, goes_left_TJ: Tensor) -> Tensor:
    """Where a search in a binary tree of three looks ends: at what fits, or at a leaf."""
    node_T1 = torch.zeros_like(fits_TJ[:, :1], dtype=torch.int64)
    for _ in range(2):
        child_T1 = 2 * node_T1 + 2 - goes_left_TJ.gather(1, node_T1).long()
        node_T1 = torch.where(fits_TJ.gather(1, node_T1), node_T1, child_T1)
    return node_T1


def _or_kth(query: Query, tau_T1: Tensor, counts_T1: Tensor, ranks: Ranks) -> Estimate:
    """A threshold where something reaches it, else the magnitude of a rank."""
    misses_T = (counts_T1[:, 0] == 0) & query.due_T
    return Estimate(torch.where(misses_T, query.ops.kth(query.x, ranks, misses_T), tau_T1[:, 0]))


def _quantiles(query: Query) -> Tensor:
    """What k of N elements of a normal distribution exceed on either side, float64 (T)."""
    normal = NormalDist()
    pairs = zip(query.ranks.ks, query.x.blocks.counts, strict=True)
    quantiles = [normal.inv_cdf(1 - k / count / 2) if count else 0.0 for k, count in pairs]
    return sent(quantiles, torch.float64, query.x.blocks.device)


def _fitted_moments(totals: Tensor, squares: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Means, and unbiased variances that are NaN where nothing can be fitted; see `sidco`."""
    means = totals / counts
    variances = (squares - means * totals) / (counts - 1)
    fits = (counts >= sidco.FEW) & (variances > sidco.SAME * means * means)
    return means, torch.where(fits, variances, nan)
