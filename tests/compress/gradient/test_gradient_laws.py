"""What holds for every compressor of gradients."""

import numpy as np
import pytest
import torch
from agreeing import encoded
from gradient_rows import ROWS as MADE_ROWS
from gradient_rows import SPECS, Row, decoded, gradients_of, residual_of, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from method_rows import METHOD_ROWS, MethodRow
from plain_torch import in_plain_torch

from dlrm_hybrid.compress.gradient.compressor import Compressor, Dense
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import array_of

ROWS: list[Row | MethodRow] = [*METHOD_ROWS, *MADE_ROWS]
DRAWN = [row for row in METHOD_ROWS if row.draws]
ALL_ROWS = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
KEEPING_ROWS = pytest.mark.parametrize(
    "row", [row for row in ROWS if row not in DRAWN], ids=lambda row: row.name
)
DRAWN_ROWS = pytest.mark.parametrize("row", DRAWN, ids=lambda row: row.name)
STEPS = 12
# For each of some fifty rows: a part of the examples that the profile asks for.
EXAMPLES = settings.default.max_examples // 7 if settings.default else 7


@ALL_ROWS
def test_plain_torch_selects_and_draws_the_same(row: Row | MethodRow) -> None:
    kernels, plain = row.make(SPECS), row.make(SPECS)
    for step in range(STEPS):
        sections = encoded(kernels, gradients_of(step), step)
        with in_plain_torch():
            assert bits_of(encoded(plain, gradients_of(step), step)) == bits_of(sections)
        for spec in SPECS:
            kept = [residual_of(one, spec).tobytes() for one in (kernels, plain)]
            assert kept[0] == kept[1]


@ALL_ROWS
def test_gradients_on_another_device_are_refused_by_name(row: Row | MethodRow) -> None:
    compressor = row.make(SPECS)
    gradients = gradients_of(0) | {"layer.bias": torch.empty(16, device="meta")}
    reason = "gradient layer.bias is on meta.* computes on the CPU: pass its .cpu()"
    with pytest.raises(ValueError, match=reason):
        encoded(compressor, gradients, 0)


@KEEPING_ROWS
def test_sent_plus_kept_is_gradient_plus_kept_before(row: Row | MethodRow) -> None:
    """And what stays is no larger than what leaves, in as few bytes as may be."""
    compressor = row.make(SPECS)
    dropped, counts = 0, dict.fromkeys((spec.name for spec in SPECS), 0)
    for step in range(STEPS):
        gradients = gradients_of(step)
        before = {name: one.clone() for name, one in gradients.items()}
        kept = {spec: residual_of(compressor, spec) for spec in SPECS}
        joining = joining_of(row, compressor, gradients)
        drains = {spec: drains_of(compressor.tensors(), spec) for spec in SPECS}
        sections = encoded(compressor, gradients, step)
        assert list(sections) == [spec.name for spec in SPECS]
        sent = {spec: decoded(sections[spec.name]) for spec in SPECS}
        assert not row.sends_always or any(sent_N.any() for sent_N in sent.values())
        for spec, sent_N in sent.items():
            if row.drops and drains_of(compressor.tensors(), spec) > drains[spec]:
                kept[spec][:] = 0
                dropped += 1
            section, left_N = sections[spec.name], residual_of(compressor, spec)
            assert (section.tensor, section.count) == (spec.id, spec.count)
            np.testing.assert_array_equal(sent_N + left_N, joining[spec.name] + kept[spec])
            assert torch.equal(gradients[spec.name], before[spec.name])
            assert_larger(row, sent_N, left_N)
            assert_short(row, compressor, sent_N, len(section.payload))
            counts[spec.name] += np.count_nonzero(sent_N)
    assert (dropped > 0) is row.drops
    assert_reported(row, compressor, counts)


def assert_larger(row: Row | MethodRow, sent_N: np.ndarray, left_N: np.ndarray) -> None:
    """What was sent than what is left."""
    if row.sends_largest and not row.rounds:
        smallest = np.abs(sent_N[sent_N != 0]).min(initial=np.inf)
        assert np.abs(left_N).max(initial=0) <= smallest
        # So the residual is that much shorter than the sum: a contraction.
        part = 1 - np.count_nonzero(sent_N) / max(1, sent_N.size)
        assert square_of(left_N) <= part * square_of(sent_N + left_N) * (1 + 1e-6)


def assert_short(
    row: Row | MethodRow, compressor: Compressor, sent_N: np.ndarray, length: int
) -> None:
    """As any plain encoding."""
    if not row.checks:
        assert length == 4 * sent_N.size
        return
    width, sent = 2 if row.rounds else 4, np.count_nonzero(sent_N)
    plain = [(4 + width) * sent, width * -(-sent_N.size // (8 * width)) + width * sent]
    # Levels are coded again before they travel.
    assert length <= (plain[0] if compressor.sends_levels else min(plain))


def assert_reported(row: Row | MethodRow, compressor: Compressor, sent: dict[str, int]) -> None:
    """What was sent, once."""
    reports = compressor.report()
    for spec in SPECS:
        report = reports[spec.name]
        assert report.elements == STEPS * spec.count
        assert report.sent == (sent[spec.name] if row.checks else report.elements)
        assert (report.threshold is None) is not row.has_threshold
    assert {(one.elements, one.sent, one.renewals) for one in compressor.report().values()} == {
        (0, 0, 0)
    }


@KEEPING_ROWS
@settings(max_examples=EXAMPLES)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.just(67)),
        elements=st.sampled_from([0.0, -0.0, 0.5, -0.5, 0.5009765625, 3.0, 1e-30, 7e4]),
    )
)
def test_ties_zeros_and_extremes_keep_the_law(
    row: Row | MethodRow, gradients_SN: np.ndarray
) -> None:
    spec = Spec(0, "x", (67,))
    compressor = row.make([spec])
    for step, gradient_N in enumerate(gradients_SN):
        kept_N, drains = residual_of(compressor, spec), drains_of(compressor.tensors(), spec)
        gradients = {"x": torch.from_numpy(gradient_N)}
        joining_N = joining_of(row, compressor, gradients)["x"]
        section = encoded(compressor, gradients, step)["x"]
        if row.drops and drains_of(compressor.tensors(), spec) > drains:
            kept_N[:] = 0
        left_N = decoded(section) + residual_of(compressor, spec)
        np.testing.assert_array_equal(left_N, joining_N + kept_N)


@ALL_ROWS
def test_a_flush_takes_out_all_that_is_held_back(row: Row | MethodRow) -> None:
    compressor = row.make(SPECS)
    for step in range(STEPS):
        encoded(compressor, gradients_of(step), step)
    kept = {spec.name: residual_of(compressor, spec) for spec in SPECS}
    flushed = compressor.flush()
    assert bool(flushed) == any(one.any() for one in kept.values())
    for name, tensor in flushed.items():
        assert tensor.numpy().tobytes() == kept[name].tobytes()
    shapes = [tuple(one.shape) for one in flushed.values()]
    assert shapes == [tuple(spec.shape) for spec in SPECS][: len(flushed)]
    assert not any(residual_of(compressor, spec).any() for spec in SPECS)
    assert not any(bool(one.any()) for one in compressor.flush().values())


@ALL_ROWS
def test_zeros_send_nothing_and_leave_no_trace(row: Row | MethodRow) -> None:
    compressor = row.make(SPECS)
    zeros = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
    sections = encoded(compressor, zeros, 0)
    assert not any(decoded(section).any() for section in sections.values())
    assert not any(residual_of(compressor, spec).any() for spec in SPECS)
    fresh, gradients = row.make(SPECS), gradients_of(1)
    after, at_once = encoded(compressor, gradients, 1), encoded(fresh, gradients, 1)
    assert bits_of(after) == bits_of(at_once)


@ALL_ROWS
def test_what_is_not_finite_ends_the_run_or_reaches_the_server(row: Row | MethodRow) -> None:
    for bad, step in ((np.nan, 0), (np.inf, 3), (-np.inf, 3)):
        compressor = row.make(SPECS)
        for before in range(step):
            encoded(compressor, gradients_of(before), before)
        gradients = gradients_of(step)
        gradients["layer.weight"][7, 7] = bad
        if not row.checks:
            sent_N = decoded(encoded(compressor, gradients, step)["layer.weight"])
            assert sent_N[7 * 20 + 7] == pytest.approx(bad, nan_ok=True)
            continue
        told = rf"^step {step + 1}: .* layer\.weight is not finite"
        with pytest.raises(DivergedError, match=told):
            encoded(compressor, gradients, step)


@ALL_ROWS
def test_a_run_resumed_in_mid_cycle_is_the_run_itself(row: Row | MethodRow) -> None:
    straight, saved = row.make(SPECS), row.make(SPECS)
    for step in range(7):
        encoded(straight, gradients_of(step), step)
        encoded(saved, gradients_of(step), step)
    assert state_of(straight) == state_of(saved)
    resumed = row.make(SPECS)
    state = {name: view.clone() for name, view in saved.tensors().items()}
    encoded(saved, gradients_of(100), 100)
    views = resumed.tensors()
    assert list(views) == list(state)
    for name, view in views.items():
        view.copy_(state[name])
    for step in range(7, 2 * STEPS):
        gradients = gradients_of(step)
        assert bits_of(encoded(straight, gradients, step)) == bits_of(
            encoded(resumed, gradients, step)
        )
    assert state_of(straight) == state_of(resumed)


@DRAWN_ROWS
def test_what_is_drawn_is_right_on_average(row: MethodRow) -> None:
    compressor, draws = row.make(SPECS), 500
    rng = np.random.default_rng(5)
    # No element lies beyond two deviations, so none is clipped.
    given = {spec: rng.uniform(-1, 1, spec.shape).astype(np.float32) for spec in SPECS}
    gradients = {spec.name: torch.from_numpy(gradient) for spec, gradient in given.items()}
    sums = {spec: np.zeros(spec.count) for spec in SPECS}
    for step in range(draws):
        for spec, section in zip(SPECS, encoded(compressor, gradients, step).values(), strict=True):
            sums[spec] += decoded(section)
    drawn = 0
    for spec, gradient in given.items():
        size_N = np.abs(gradient.reshape(-1).astype(np.float64))
        scale = size_N.max(initial=0) * (1 + 2**-11)
        error_N = np.abs(sums[spec] / draws - gradient.reshape(-1))
        drawn += np.count_nonzero(error_N)
        assert (error_N <= 5 * np.sqrt((scale * size_N - size_N**2) / draws) + 1e-6).all()
    assert drawn > 100, "everything came as it was"


@DRAWN_ROWS
def test_a_drawn_tensor_takes_two_bits_an_element_or_less(row: MethodRow) -> None:
    per_byte = 5 if row.options == ("gradient.encoding=trits",) else 4
    sections = encoded(row.make(SPECS), gradients_of(0), 0)
    large = [spec for spec in SPECS if spec.count >= 256]
    assert large
    for spec in large:
        assert len(sections[spec.name].payload) == 4 + -(-spec.count // per_byte)


def joining_of(
    row: Row | MethodRow, compressor: Compressor, gradients: dict[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """What will join the residuals."""
    state = compressor.tensors()
    return {
        spec.name: row.joins(gradients[spec.name].reshape(-1).numpy(), state, spec.name)
        for spec in compressor.layout.specs
    }


def square_of(values_N: np.ndarray) -> float:
    return float(np.square(values_N.astype(np.float64)).sum())


def drains_of(tensors: dict[str, torch.Tensor], spec: Spec) -> int:
    view = tensors.get(f"{spec.name}.drains")
    return 0 if view is None else int(view.item())


def bits_of(sections: dict) -> dict:
    return {name: (one.encoding, one.dtype, bytes(one.payload)) for name, one in sections.items()}


def test_without_compression_sections_view_the_gradients() -> None:
    gradients = gradients_of(0)
    sections = encoded(Dense(Layout(SPECS)), gradients | {"other": torch.zeros(4)}, 0)
    for spec in SPECS:
        sent, own = array_of(sections[spec.name]), gradients[spec.name].numpy()
        assert np.shares_memory(sent, own) == (own.size > 0)
