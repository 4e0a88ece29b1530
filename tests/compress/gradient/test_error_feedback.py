"""What is special about residuals and thresholds; the common laws are in test_gradient_laws.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from agreeing import encoded
from gradient_rows import SPECS, Options, decoded, gradients_of, options_of, residual_of, sparsifier
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.compress.gradient.methods.dgc import Dgc
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode, Renewal
from dlrm_hybrid.compress.gradient.transforms import Clip, Momentum, Scale
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import FLOATS, Dtype, Section
from dlrm_hybrid.wire.sparse import sparse

GOLDEN = Spec(0, "x", (8,))
LARGE = Spec(0, "x", (40, 50))


def sent_of(compressor: ErrorFeedback, gradient: Sequence[float], step: int) -> dict[int, float]:
    sections = encoded(compressor, {"x": torch.tensor(gradient, dtype=torch.float32)}, step)
    sent_N = decoded(sections["x"])
    return {int(index): float(sent_N[index]) for index in np.flatnonzero(sent_N)}


def test_controlled_renewals_hold_the_density_that_fixed_ones_lose() -> None:
    sent: dict[str, float] = {}
    for renewal in get_args(Renewal):
        compressor = sparsifier([LARGE], options_of(sparsity=0.95, steps=50, renewal=renewal))
        for step in range(50):
            gradient = np.random.default_rng(step).standard_normal((40, 50)).astype(np.float32)
            encoded(compressor, {"x": torch.from_numpy(gradient)}, step)
        report = compressor.report()["x"]
        sent[renewal] = report.sent / report.elements
    assert 0.8 * 0.05 <= sent["controlled"] <= 1.35 * 0.05
    assert sent["fixed"] > 2.5 * 0.05


def test_a_zero_gradient_at_a_renewal_does_not_open_the_gate() -> None:
    compressor = sparsifier([LARGE], options_of(steps=100, renewal="fixed"))
    assert sent_of(compressor, [0.0] * 2000, 0) == {}
    assert compressor.report()["x"].threshold is None
    gradient = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    sent_N = decoded(encoded(compressor, {"x": torch.from_numpy(gradient)}, 1)["x"])
    assert np.count_nonzero(sent_N) == 200


def test_a_threshold_of_zero_sends_all_that_is_not_zero() -> None:
    compressor = sparsifier([GOLDEN], options_of(sparsity=0.25, steps=9, renewal="fixed"))
    assert sent_of(compressor, [0, 0, 3, 0, 0, -1, 0, 0], 0) == {2: 3, 5: -1}
    assert compressor.report()["x"].threshold == 0


@pytest.mark.parametrize("mode", ["discard", "flush"])
def test_the_ledger_of_drains_is_exact(mode: DrainMode) -> None:
    options: Options = options_of(sparsity=0.75, drain=mode, steps=4)
    compressor = sparsifier([GOLDEN], options)
    given_N, sent_N = np.zeros(8), np.zeros(8)
    drained, norms = 0, 0.0
    for step in range(60):
        gradient_N = np.random.default_rng(step).integers(-64, 65, 8) / 64
        before_N = residual_of(compressor, GOLDEN)
        section = encoded(compressor, {"x": torch.from_numpy(gradient_N).float()}, step)["x"]
        given_N += gradient_N
        sent_N += decoded(section)
        count = int(compressor.tensors()["x.drains"].item())
        if count > drained and mode == "flush":
            np.testing.assert_array_equal(decoded(section), before_N + gradient_N)
            assert not residual_of(compressor, GOLDEN).any()
        elif count > drained:
            norms += float(np.linalg.norm(before_N.astype(np.float64)))
        drained = count
    assert 8 <= drained <= 32
    lost, lost_norms = compressor.tensors()["x.discarded"].tolist()
    assert lost_norms == norms
    assert given_N.sum() == sent_N.sum() + residual_of(compressor, GOLDEN).sum() + lost
    if mode == "flush":
        assert lost == 0
        np.testing.assert_array_equal(given_N, sent_N + residual_of(compressor, GOLDEN))


def test_a_flush_does_not_put_off_a_fixed_renewal() -> None:
    options = options_of(drain="flush", every=1, renewal="fixed", rule="exact", steps=4)
    compressor = sparsifier([LARGE], options)
    thresholds: list[float | None] = []
    for step in range(9):
        encoded(compressor, gradients_of(step, [LARGE]), step)
        thresholds.append(compressor.report()["x"].threshold)
    assert [len(set(thresholds[first : first + 4])) for first in (0, 4)] == [1, 1]
    assert len(set(thresholds)) == 3


def test_what_is_flushed_takes_nobodys_place_in_a_stage() -> None:
    specs = [Spec(place, f"x{place}", (30,)) for place in range(4)]
    options = options_of(
        drain="flush", renewal="fixed", rule="exact", steps=1, scope="stage", sends_ties=False
    )
    compressor, drained = sparsifier(specs, options), 0
    rng = np.random.default_rng(5)
    for step in range(40):
        given = {
            spec.name: torch.from_numpy(rng.integers(-5, 6, 30) * 1.0).float() for spec in specs
        }
        sums = [residual_of(compressor, spec) + given[spec.name].numpy() for spec in specs]
        drains = [compressor.tensors()[f"{spec.name}.drains"].item() for spec in specs]
        sections = encoded(compressor, given, step)
        sum_N = np.concatenate(sums)
        leaves_N = np.zeros(120, bool)
        leaves_N[np.argsort(-np.abs(sum_N), kind="stable")[:12]] = True
        for place, spec in enumerate(specs):
            flushed = compressor.tensors()[f"{spec.name}.drains"].item() > drains[place]
            drained += flushed
            own_N = leaves_N[30 * place : 30 * place + 30]
            expected_N = sums[place] if flushed else np.where(own_N, sums[place], 0)
            np.testing.assert_array_equal(decoded(sections[spec.name]), expected_N)
    assert 20 < drained < 100


PAIR = (Spec(3, "a", (40,)), Spec(5, "b", (3, 9)))


def topk(scope: Literal["tensor", "stage"], sparsity: float = 0.9) -> Options:
    return options_of(sparsity=sparsity, steps=1, renewal="fixed", scope=scope, sends_ties=False)


def flat(values: dict) -> np.ndarray:
    return np.concatenate([values[spec.name] for spec in PAIR])


def by_sorting(sums: list[np.ndarray], keep: int) -> np.ndarray:
    """The `keep` largest of all, the first of equals; zeros stay."""
    total_N = np.concatenate(sums)
    order = np.lexsort((np.arange(total_N.size), -np.abs(total_N)))[:keep]
    sent_N = np.zeros_like(total_N)
    sent_N[order] = total_N[order]
    return sent_N


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.just(67)),
        elements=st.sampled_from([0.0, 0.5, -0.5, 1.0, 2.0]),
    )
)
def test_exactly_the_largest_of_a_stage_leave_the_first_of_equals(gradients_SN: np.ndarray) -> None:
    compressor = sparsifier(PAIR, topk("stage"))
    for step, gradient_N in enumerate(gradients_SN):
        parts = {"a": torch.from_numpy(gradient_N[:40]), "b": torch.from_numpy(gradient_N[40:])}
        kept = {spec.name: residual_of(compressor, spec) for spec in PAIR}
        sums = [kept[name] + part.numpy() for name, part in parts.items()]
        sections = encoded(compressor, {"a": parts["a"], "b": parts["b"].view(3, 9)}, step)
        sent_N = flat({name: decoded(section) for name, section in sections.items()})
        np.testing.assert_array_equal(sent_N, by_sorting(sums, 7))
        kept = {spec.name: residual_of(compressor, spec) for spec in PAIR}
        np.testing.assert_array_equal(flat(kept), np.concatenate(sums) - sent_N)


def test_a_stage_has_one_threshold_and_one_life() -> None:
    options = options_of(scope="stage", steps=4)
    compressor = sparsifier(SPECS, options)
    sent = 0
    for step in range(12):
        sections = encoded(compressor, gradients_of(step), step)
        sent += sum(np.count_nonzero(decoded(section)) for section in sections.values())
        thresholds = {
            compressor.tensors()[f"{spec.name}.threshold"].item() for spec in SPECS if spec.count
        }
        assert len(thresholds) == 1
    renewals = {report.renewals for report in compressor.report().values()}
    assert len(renewals) == 1 and renewals.pop() >= 3
    assert 0.7 < sent / (12 * 34) < 1.5


def test_a_stage_of_no_tensors_sends_nothing() -> None:
    assert encoded(sparsifier([], topk("stage")), {}, 0) == {}


EVERY_STEP = options_of(sparsity=0.75, steps=1, renewal="fixed")


def corrected(
    momentum: float,
    *,
    masking: bool = True,
    nesterov: bool = False,
    clip_norm: float | None = None,
    specs: tuple[Spec, ...] = (GOLDEN,),
) -> ErrorFeedback:
    own = Momentum(momentum=momentum, nesterov=nesterov, masking=masking)
    clip = () if clip_norm is None else (Clip(clip_norm),)
    options = replace(EVERY_STEP, feedback=replace(EVERY_STEP.feedback, transforms=(*clip, own)))
    return sparsifier(specs, options)


def drawn(step: int) -> np.ndarray:
    """Sixteenths, so that sums are exact."""
    return np.random.default_rng(step).integers(-64, 65, 8).astype(np.float32) / 16


def sent_by(compressor: ErrorFeedback, gradient_N: np.ndarray, step: int) -> np.ndarray:
    return decoded(encoded(compressor, {"x": torch.from_numpy(gradient_N)}, step)["x"])


@pytest.mark.parametrize("masking", [True, False])
def test_sent_elements_have_neither_residual_nor_momentum(masking: bool) -> None:
    compressor = corrected(0.5, masking=masking)
    momentum_N, residual_N = np.zeros(8, np.float32), np.zeros(8, np.float32)
    for step in range(10):
        sent_N = sent_by(compressor, drawn(step), step)
        momentum_N = np.float32(0.5) * momentum_N + drawn(step)
        total_N = residual_N + momentum_N
        leaves = sent_N != 0
        np.testing.assert_array_equal(sent_N[leaves], total_N[leaves])
        residual_N = np.where(leaves, np.float32(0), total_N)
        if masking:
            momentum_N[leaves] = 0
        np.testing.assert_array_equal(residual_of(compressor, GOLDEN), residual_N)
        np.testing.assert_array_equal(compressor.tensors()["x.momentum"].numpy(), momentum_N)


def test_long_gradients_are_cut_to_the_bound() -> None:
    gradient_N = np.full(8, 3, np.float32)
    norm = float(np.linalg.norm(gradient_N))
    for clip_norm, factor in ((norm, 1.0), (2 * norm, 1.0), (norm / 2, 0.5)):
        compressor = corrected(0.0, clip_norm=clip_norm)
        total_N = sent_by(compressor, gradient_N, 0) + residual_of(compressor, GOLDEN)
        np.testing.assert_allclose(total_N, factor * gradient_N, rtol=1e-6)


def test_densities_fall_over_the_first_steps() -> None:
    warm = Dgc(density=0.25, warmup_sparsities=(0.25, 0.5), warmup_steps=3)
    assert [warm.sparsity_at(step) for step in range(8)] == [0.25] * 3 + [0.5] * 3 + [0.75] * 2
    assert replace(warm, density=0.6, warmup_steps=1).sparsity_at(1) == 0.4
    assert replace(warm, density=0.25, warmup_steps=0).sparsity_at(0) == 0.75


def test_a_warm_up_sends_more_at_first_even_all_of_a_tensor() -> None:
    options = options_of(sparsity=0.75, steps=1, renewal="fixed", warm=2)
    pair = Spec(1, "pair", (2,))
    compressor = sparsifier([GOLDEN, pair], options)
    sent: list[tuple[int, int]] = []
    for step in range(6):
        rng = np.random.default_rng(step)
        gradients = {
            spec.name: torch.from_numpy(rng.standard_normal(spec.shape).astype(np.float32))
            for spec in (GOLDEN, pair)
        }
        sections = encoded(compressor, gradients, step)
        sent.append(
            (np.count_nonzero(decoded(sections["x"])), np.count_nonzero(decoded(sections["pair"])))
        )
    assert sent == [(6, 2), (6, 2), (4, 1), (4, 1), (2, 1), (2, 1)]


MANY = (*SPECS, Spec(11, "wide.weight", (70, 90)), Spec(12, "wide.bias", (130,)))


def plain_step(
    spec: Spec, sum_N: np.ndarray, tau: float | None, dtype: Dtype
) -> tuple[Section, np.ndarray]:
    """The section of what is sent of a sum, and what is kept."""
    reaches_N = (np.abs(sum_N) >= (0 if tau is None else np.float32(tau))) & (sum_N != 0)
    rounded_N = np.where(reaches_N, narrow(sum_N, dtype), np.float32(0))
    indices_K = np.flatnonzero(rounded_N).astype(np.int32)
    kept_N = np.where(reaches_N, sum_N - rounded_N, sum_N)
    return sparse(spec.id, spec.count, indices_K, rounded_N[indices_K], dtype), kept_N


@pytest.mark.parametrize("dtype", sorted(FLOATS))
@pytest.mark.parametrize("renewal", get_args(Renewal))
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.75, 0.99])
@pytest.mark.parametrize("scale", [None, lambda step: 0.1 / (step + 1)], ids=["whole", "scaled"])
def test_sections_and_residuals_are_those_of_plain_steps(
    dtype: Dtype, renewal: Renewal, sparsity: float, scale: Callable[[int], float] | None
) -> None:
    transforms = () if scale is None else (Scale(scale),)
    options = options_of(
        sparsity=sparsity, renewal=renewal, steps=4, dtype=dtype, transforms=transforms
    )
    compressor = sparsifier(MANY, options)
    kept = {spec.name: np.zeros(spec.count, np.float32) for spec in MANY}
    # A factor that takes some values below the smallest that float16 holds.
    for step, factor in enumerate([1, 1e-6, 1, 0, 1, 1e-7, 1, 1]):
        gradients = {name: one * factor for name, one in gradients_of(step, MANY).items()}
        sections = encoded(compressor, gradients, step)
        reports = compressor.report()
        for spec in MANY:
            gradient_N = gradients[spec.name].view(-1).numpy()
            if scale is not None:
                gradient_N = gradient_N * np.float32(scale(step))
            sum_N = kept[spec.name] + gradient_N
            tau = reports[spec.name].threshold
            expected, kept[spec.name] = plain_step(spec, sum_N, tau, dtype)
            assert sections[spec.name] == expected
            assert residual_of(compressor, spec).tobytes() == kept[spec.name].tobytes()


def test_sums_of_thresholds_do_not_depend_on_when_they_are_reported() -> None:
    often, once = sparsifier(MANY, options_of(steps=3)), sparsifier(MANY, options_of(steps=3))
    sums = dict.fromkeys((spec.name for spec in MANY), (0.0, 0, 0))
    for step in range(9):
        encoded(often, gradients_of(step, MANY), step)
        encoded(once, gradients_of(step, MANY), step)
        for name, report in often.report().items():
            before, thresholds, renewals = sums[name]
            tau = 0.0 if report.threshold is None else report.threshold
            assert report.threshold_sum == tau
            sums[name] = (before + tau, thresholds + report.thresholds, renewals + report.renewals)
    assert sums == {
        name: (report.threshold_sum, report.thresholds, report.renewals)
        for name, report in once.report().items()
    }


@pytest.mark.parametrize(
    "gradient", [torch.zeros(8, dtype=torch.float64), torch.zeros(16)[::2], torch.zeros(9)]
)
def test_memory_that_is_no_such_gradient_is_not_read(gradient: torch.Tensor) -> None:
    compressor = sparsifier([Spec(0, "x", (8,))], options_of())
    with pytest.raises(ValueError, match="^gradient x: .* (not contiguous float32|not 8)"):
        encoded(compressor, {"x": gradient}, 0)
