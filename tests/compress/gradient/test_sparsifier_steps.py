"""Every step of a sparsifier against the same in plain numpy, one tensor after the other."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from agreeing import encoded
from gradient_rows import SPECS, gradients_of, options_of, residual_of, sparsifier

from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.compress.gradient.methods.thresholded import Renewal
from dlrm_hybrid.compress.gradient.transforms import Scale
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import FLOATS, Dtype, Section
from dlrm_hybrid.wire.sparse import sparse

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
