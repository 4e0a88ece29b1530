"""What holds for every compressor of gradients."""

import numpy as np
import pytest
import torch
from gradient_rows import ROWS, SPECS, Row, decoded, gradients_of, residual_of, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.compress.gradient.compressor import Spec
from dlrm_hybrid.types import DivergedError

ALL_ROWS = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
STEPS = 12


@ALL_ROWS
def test_sent_plus_kept_is_gradient_plus_kept_before(row: Row) -> None:
    compressor = row.make(SPECS)
    dropped = 0
    for step in range(STEPS):
        gradients = gradients_of(step)
        before = {name: one.clone() for name, one in gradients.items()}
        kept = {spec: residual_of(compressor, spec) for spec in SPECS}
        drains = {spec: drains_of(compressor.tensors(), spec) for spec in SPECS}
        sections = compressor.encode(gradients, step)
        assert list(sections) == [spec.name for spec in SPECS]
        for spec in SPECS:
            if row.drops and drains_of(compressor.tensors(), spec) > drains[spec]:
                kept[spec][:] = 0
                dropped += 1
            section = sections[spec.name]
            assert (section.tensor, section.count) == (spec.id, spec.count)
            left_N = decoded(section) + residual_of(compressor, spec)
            total_N = gradients[spec.name].view(-1).numpy() + kept[spec]
            np.testing.assert_array_equal(left_N, total_N)
            assert torch.equal(gradients[spec.name], before[spec.name])
    assert (dropped > 0) is row.drops


@ALL_ROWS
@settings(max_examples=15)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.just(67)),
        elements=st.sampled_from([0.0, -0.0, 0.5, -0.5, 0.5009765625, 3.0, 1e-30, 7e4]),
    )
)
def test_ties_zeros_and_extremes_keep_the_law(row: Row, gradients_SN: np.ndarray) -> None:
    spec = Spec(0, "x", (67,))
    compressor = row.make([spec])
    for step, gradient_N in enumerate(gradients_SN):
        kept_N, drains = residual_of(compressor, spec), drains_of(compressor.tensors(), spec)
        section = compressor.encode({"x": torch.from_numpy(gradient_N)}, step)["x"]
        if row.drops and drains_of(compressor.tensors(), spec) > drains:
            kept_N[:] = 0
        left_N = decoded(section) + residual_of(compressor, spec)
        np.testing.assert_array_equal(left_N, gradient_N + kept_N)


@ALL_ROWS
def test_zeros_send_nothing_and_leave_no_trace(row: Row) -> None:
    compressor = row.make(SPECS)
    zeros = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    sections = compressor.encode(zeros, 0)
    assert not any(decoded(section).any() for section in sections.values())
    assert not any(residual_of(compressor, spec).any() for spec in SPECS)
    fresh, gradients = row.make(SPECS), gradients_of(1)
    after, at_once = compressor.encode(gradients, 1), fresh.encode(gradients, 1)
    assert bits_of(after) == bits_of(at_once)


@ALL_ROWS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("step", [0, 3])
def test_what_is_not_finite_ends_the_run_or_reaches_the_server(
    row: Row, bad: float, step: int
) -> None:
    compressor = row.make(SPECS)
    for before in range(step):
        compressor.encode(gradients_of(before), before)
    gradients = gradients_of(step)
    gradients["layer.weight"][7, 7] = bad
    if not row.checks:
        sent_N = decoded(compressor.encode(gradients, step)["layer.weight"])
        assert sent_N[7 * 20 + 7] == pytest.approx(bad, nan_ok=True)
        return
    with pytest.raises(DivergedError, match=rf"^step {step + 1}: .* layer\.weight is not finite"):
        compressor.encode(gradients, step)


@ALL_ROWS
def test_a_run_resumed_in_mid_cycle_is_the_run_itself(row: Row) -> None:
    straight, saved = row.make(SPECS), row.make(SPECS)
    for step in range(7):
        straight.encode(gradients_of(step), step)
        saved.encode(gradients_of(step), step)
    assert state_of(straight) == state_of(saved)
    resumed = row.make(SPECS)
    state = {name: view.clone() for name, view in saved.tensors().items()}
    saved.encode(gradients_of(100), 100)
    views = resumed.tensors()
    assert list(views) == list(state)
    for name, view in views.items():
        view.copy_(state[name])
    for step in range(7, 2 * STEPS):
        gradients = gradients_of(step)
        assert bits_of(straight.encode(gradients, step)) == bits_of(resumed.encode(gradients, step))
    assert state_of(straight) == state_of(resumed)


@ALL_ROWS
def test_a_report_counts_what_was_sent_and_begins_anew(row: Row) -> None:
    compressor = row.make(SPECS)
    sent = {spec.name: 0 for spec in SPECS}
    for step in range(STEPS):
        for name, section in compressor.encode(gradients_of(step), step).items():
            sent[name] += np.count_nonzero(decoded(section))
    reports = compressor.report()
    for spec in SPECS:
        report = reports[spec.name]
        assert report.elements == STEPS * spec.count
        assert report.sent == (sent[spec.name] if row.checks else report.elements)
        assert (report.threshold is None) is not row.checks
    assert {(one.elements, one.sent, one.renewals) for one in compressor.report().values()} == {
        (0, 0, 0)
    }


def drains_of(tensors: dict[str, torch.Tensor], spec: Spec) -> int:
    view = tensors.get(f"{spec.name}.drains")
    return 0 if view is None else int(view.item())


def bits_of(sections: dict) -> dict:
    return {name: (one.encoding, one.dtype, bytes(one.payload)) for name, one in sections.items()}
