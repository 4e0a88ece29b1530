"""What is special about residual and threshold; the common laws are in test_gradient_laws.py."""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from agreeing import encoded
from gradient_rows import Options, decoded, gradients_of, options_of, residual_of, sparsifier

from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode, Renewal

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
    drained = 0
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
        drained = count
    assert 8 <= drained <= 32
    lost = compressor.tensors()["x.discarded"][0].item()
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


def test_the_ledger_adds_up_the_norms_of_what_was_lost() -> None:
    compressor = sparsifier([GOLDEN], options_of(sparsity=0.75, drain="discard"))
    norms = 0.0
    for step in range(30):
        drains, before_N = compressor.tensors()["x.drains"].item(), residual_of(compressor, GOLDEN)
        gradient_N = np.random.default_rng(step).standard_normal(8)
        encoded(compressor, {"x": torch.from_numpy(gradient_N).float()}, step)
        if compressor.tensors()["x.drains"].item() > drains:
            norms += float(np.linalg.norm(before_N.astype(np.float64)))
    assert norms > 0
    assert compressor.tensors()["x.discarded"][1].item() == norms
