"""Random k without feedback is right on average; with it, all trainers draw the same elements."""

import numpy as np
from agreeing import encoded
from gradient_rows import SPECS, decoded, gradients_of
from method_rows import MethodRow

UNBIASED = MethodRow(method="randomk", options=("gradient.feedback=false",))


def test_what_is_sent_is_right_on_average() -> None:
    compressor, gradients, steps = UNBIASED.make(SPECS), gradients_of(0), 1000
    sums = {spec.name: np.zeros(spec.count) for spec in SPECS}
    for step in range(steps):
        for name, section in encoded(compressor, gradients, step).items():
            sums[name] += decoded(section)
    count = sum(spec.count for spec in SPECS)
    factor = count / (count - count * 9 // 10)
    for name, gradient in gradients.items():
        values_N = gradient.reshape(-1).numpy().astype(np.float64)
        error_N = np.abs(sums[name] / steps - values_N)
        assert (error_N <= 5 * np.abs(values_N) * np.sqrt((factor - 1) / steps) + 1e-6).all()


def test_the_elements_of_a_step_depend_on_the_step_alone() -> None:
    one, other = MethodRow(method="randomk").make(SPECS), UNBIASED.make(SPECS)
    drawn: list[list[int]] = []
    for step in range(3):
        dense = {name: view.fill_(1.0) for name, view in gradients_of(step).items()}
        both = [encoded(compressor, dense, step) for compressor in (one, other)]
        chosen = [
            np.flatnonzero(np.concatenate([decoded(section) for section in sections.values()]))
            for sections in both
        ]
        assert chosen[0].tolist() == chosen[1].tolist()
        drawn.append(chosen[0].tolist())
    assert drawn[0] != drawn[1] != drawn[2]
