"""What shares a threshold, and what is sent where several elements equal it."""

from typing import Literal

import numpy as np
import torch
from agreeing import encoded
from gradient_rows import SPECS, Options, decoded, gradients_of, options_of, residual_of, sparsifier
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.compress.gradient.layout import Spec

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
