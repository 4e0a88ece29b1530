"""Momentum at the trainer, and densities that fall over the first steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from agreeing import encoded
from gradient_rows import decoded, options_of, residual_of, sparsifier

from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.compress.gradient.methods.dgc import Dgc
from dlrm_hybrid.compress.gradient.transforms import Clip, Momentum

SPEC = Spec(0, "x", (8,))
EVERY_STEP = options_of(sparsity=0.75, steps=1, renewal="fixed")


def corrected(
    momentum: float,
    *,
    masking: bool = True,
    nesterov: bool = False,
    clip_norm: float | None = None,
    specs: tuple[Spec, ...] = (SPEC,),
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
        np.testing.assert_array_equal(residual_of(compressor, SPEC), residual_N)
        np.testing.assert_array_equal(compressor.tensors()["x.momentum"].numpy(), momentum_N)


def test_all_momenta_are_sent_in_the_end_or_wait() -> None:
    compressor = corrected(0.5, masking=False)
    sent_N, momenta_N, momentum_N = np.zeros(8), np.zeros(8), np.zeros(8)
    for step in range(6):
        momentum_N = 0.5 * momentum_N + drawn(step)
        momenta_N += momentum_N
        sent_N += sent_by(compressor, drawn(step), step)
    np.testing.assert_array_equal(momenta_N, sent_N + residual_of(compressor, SPEC))


def test_long_gradients_are_cut_to_the_bound() -> None:
    gradient_N = np.full(8, 3, np.float32)
    norm = float(np.linalg.norm(gradient_N))
    for clip_norm, factor in ((norm, 1.0), (2 * norm, 1.0), (norm / 2, 0.5)):
        compressor = corrected(0.0, clip_norm=clip_norm)
        total_N = sent_by(compressor, gradient_N, 0) + residual_of(compressor, SPEC)
        np.testing.assert_allclose(total_N, factor * gradient_N, rtol=1e-6)


def test_densities_fall_over_the_first_steps() -> None:
    warm = Dgc(density=0.25, warmup_sparsities=(0.25, 0.5), warmup_steps=3)
    assert [warm.sparsity_at(step) for step in range(8)] == [0.25] * 3 + [0.5] * 3 + [0.75] * 2
    assert replace(warm, density=0.6, warmup_steps=1).sparsity_at(1) == 0.4
    assert replace(warm, density=0.25, warmup_steps=0).sparsity_at(0) == 0.75


def test_a_warm_up_sends_more_at_first_even_all_of_a_tensor() -> None:
    options = options_of(sparsity=0.75, steps=1, renewal="fixed", warm=2)
    pair = Spec(1, "pair", (2,))
    compressor = sparsifier([SPEC, pair], options)
    sent: list[tuple[int, int]] = []
    for step in range(6):
        rng = np.random.default_rng(step)
        gradients = {
            spec.name: torch.from_numpy(rng.standard_normal(spec.shape).astype(np.float32))
            for spec in (SPEC, pair)
        }
        sections = encoded(compressor, gradients, step)
        sent.append(
            (np.count_nonzero(decoded(sections["x"])), np.count_nonzero(decoded(sections["pair"])))
        )
    assert sent == [(6, 2), (6, 2), (4, 1), (4, 1), (2, 1), (2, 1)]
