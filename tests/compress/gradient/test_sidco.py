"""SIDCo's fits, stages and their adaptation."""

from collections.abc import Callable
from math import exp, log
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.methods.sidco import Sidco, gamma, pareto
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold

Float32s = NDArray[np.float32]
Distribution = Literal["exponential", "gamma", "pareto"]
Adaptation = Literal["best", "literal", "flip"] | int

# Magnitudes at the middle of 1000 parts of an exponential distribution.
EXPONENTIAL = (-np.log(1 - (np.arange(1, 1001) - 0.5) / 1000)).astype(np.float32)
GOLDEN = {
    ("exponential", 100): (2.301787, 2.301275, 2.301426),
    ("exponential", 10): (4.603574, 4.601776, 4.595222),
    ("pareto", 100): (2.301099, 2.304147, 2.305478),
    ("pareto", 10): (4.591786, 4.588829, 4.600687),
    ("gamma", 100): (2.315716, 2.313178, 2.312065),
    ("gamma", 10): (4.636163, 4.597276, 4.591305),
}
SIZE = 50_000
Draw = Callable[[np.random.Generator], NDArray[np.float64]]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng: rng.standard_normal(SIZE),
    "laplace": lambda rng: rng.laplace(size=SIZE),
    "gamma": lambda rng: rng.gamma(0.5, size=SIZE) * rng.choice([-1, 1], SIZE),
    "student-4": lambda rng: rng.standard_t(4, SIZE),
    "student-2.5": lambda rng: rng.standard_t(2.5, SIZE),
    "mostly zeros": lambda rng: rng.laplace(size=SIZE) * (rng.random(SIZE) < 0.3),
}


def rule_of(
    distribution: Distribution = "exponential",
    adaptation: Adaptation = "best",
    exact_gamma: bool = True,
    tolerance: float = 0.2,
) -> Sidco:
    return Sidco(
        distribution=distribution,
        adaptation=adaptation,
        tolerance=tolerance,
        gamma="exact" if exact_gamma else "closed",
    )


def tau_of(rule: Sidco, values_N: Float32s, k: int) -> float:
    return rule.tau(values_N, k, rule.init())


def qualities(rule: Sidco, draw: Draw, density: float, steps: int) -> list[float]:
    """Elements that reach the estimate, as a part of those wanted, over steps of fresh values."""
    state, k = rule.init(), int(SIZE * density)
    made: list[float] = []
    for step in range(steps):
        values_N = draw(np.random.default_rng(step)).astype(np.float32)
        tau = np.float32(rule.tau(values_N, k, state))
        made.append(np.count_nonzero(np.abs(values_N) >= tau) / k)
    return made


@pytest.mark.parametrize(("distribution", "k"), GOLDEN)
def test_golden_thresholds_by_stages(distribution: Distribution, k: int) -> None:
    found = [
        tau_of(rule_of(distribution, stages, exact_gamma=False), EXPONENTIAL, k)
        for stages in (1, 2, 3)
    ]
    assert found == pytest.approx(GOLDEN[distribution, k], abs=2e-6)
    sent = [np.count_nonzero(np.float32(tau) <= EXPONENTIAL) for tau in found]
    assert all(count in (k, k - 1) for count in sent)


def test_the_exact_gamma_is_the_inverse_of_the_distribution() -> None:
    assert tau_of(rule_of("gamma", 1), EXPONENTIAL, 10) == pytest.approx(4.622332, abs=2e-6)
    # Of shape 2 and scale 3 the part above x is exp(-x/3) (1 + x/3); its mean logarithm is known.
    mean_log = log(3) + 1 - np.euler_gamma
    for ratio in (0.5, 0.25, 0.01, 1e-4):
        place = gamma(6, mean_log, ratio, is_exact=True) / 3
        assert exp(-place) * (1 + place) == pytest.approx(ratio, rel=0.03)
        assert gamma(6, mean_log, ratio, is_exact=False) / 3 != pytest.approx(place, rel=0.02)


def test_a_pareto_tail_fits_itself_and_ends_in_an_exponential() -> None:
    shape, scale = 0.2, 3.0
    mean = scale / (1 - shape)
    variance = mean**2 / (1 - 2 * shape)
    assert pareto(mean, variance, 0.01) == pytest.approx(scale * (0.01**-shape - 1) / shape)
    assert pareto(2.0, 4.0, 0.01) == pytest.approx(-2 * log(0.01))
    assert np.isnan(pareto(2.0, 0.0, 0.01))


@pytest.mark.parametrize("distribution", get_args(Distribution))
@given(st.integers(1, 90), st.sampled_from([1, 2, 4]), st.sampled_from([0.25, 8.0]))
def test_scale_order_and_signs_do_not_matter(
    distribution: Distribution, k: int, stages: int, scale: float
) -> None:
    rng = np.random.default_rng(k)
    values_N = rng.standard_t(4, 500).astype(np.float32)
    rule = rule_of(distribution, stages)
    tau = tau_of(rule, values_N, k)
    assert tau_of(rule, scale * values_N, k) == pytest.approx(scale * tau, rel=1e-5)
    assert tau_of(rule, rng.permutation(-np.abs(values_N)), k) == pytest.approx(tau, rel=1e-5)


@pytest.mark.parametrize("distribution", get_args(Distribution))
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_the_best_number_of_stages_holds_every_tail(
    distribution: Distribution, density: float
) -> None:
    rule = rule_of(distribution)
    for name, draw in DRAWS.items():
        settled = qualities(rule, draw, density, 12)[5:]
        assert 0.7 < np.mean(settled) < 1.3, name


def test_the_papers_rule_stays_at_one_stage_under_heavy_tails() -> None:
    density, draw = 0.001, DRAWS["gamma"]
    literal = rule_of(adaptation="literal")
    state = literal.init()
    values_N = draw(np.random.default_rng(0)).astype(np.float32)
    for _ in range(20):
        literal.tau(values_N, int(SIZE * density), state)
    assert state["stages"][0] == 1
    flipped = rule_of(adaptation="flip")
    assert np.mean(qualities(flipped, draw, density, 40)[-10:]) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize(("density", "most"), [(0.1, 4), (0.01, 7), (0.001, 10)])
def test_there_are_no_more_stages_than_halvings(density: float, most: int) -> None:
    """At most ceil(log2(1 / density)), so that no stage but the first keeps more than a half."""
    values_N = DRAWS["laplace"](np.random.default_rng(3)).astype(np.float32)
    found = [
        tau_of(rule_of(adaptation=stages), values_N, int(SIZE * density))
        for stages in (most - 1, most, most + 1, most + 5)
    ]
    assert found[0] != found[1] == found[2] == found[3]


@pytest.mark.parametrize(("reaching", "sent"), [(20, 20), (400, 400), (401, 100), (2000, 100)])
def test_an_estimate_of_more_than_four_times_as_many_is_not_used(reaching: int, sent: int) -> None:
    """Of 10,000 values some are near 1, all others next to nothing: the fit lies in between."""
    values_N = np.full(10_000, 1e-6, np.float32)
    values_N[:reaching] = np.linspace(1, 1.001, reaching)
    tau = tau_of(rule_of(adaptation=1), values_N, 100)
    assert np.count_nonzero(values_N >= np.float32(tau)) == sent


def test_a_right_estimate_changes_nothing() -> None:
    """The mean is over as many estimates as there were, so exponential values never stray."""
    rule = rule_of(adaptation="literal", tolerance=0.1)
    state = rule.init()
    for _ in range(20):
        rule.tau(EXPONENTIAL, 100, state)
    assert state["stages"].tolist() == [1, 1, 0, 0]
    assert state["stage_error"].item() < 0.02


def test_a_fixed_number_of_stages_stays() -> None:
    rule = rule_of("pareto", 3)
    state = rule.init()
    values_N = DRAWS["student-2.5"](np.random.default_rng(0)).astype(np.float32)
    for _ in range(12):
        rule.tau(values_N, 1000, state)
    assert state["stages"][0] == 3
    one = rule_of("pareto", 1)
    assert rule.tau(values_N, SIZE // 2, state) == tau_of(one, values_N, SIZE // 2)


@pytest.mark.parametrize(
    ("values", "k"), [([1.0] * 50, 5), ([0.0] * 40 + [0.5, 3, 2, 1], 2), ([5.0], 1)]
)
def test_where_nothing_can_be_fitted_exactly_as_many_leave(values: list[float], k: int) -> None:
    values_N = np.array(values, np.float32)
    for distribution in get_args(Distribution):
        found = tau_of(rule_of(distribution), values_N, k)
        if k >= np.count_nonzero(values_N):
            assert found == 0
        else:
            assert found == CountedThreshold().tau(values_N, k, {})


def test_an_estimate_that_nothing_reaches_is_not_used() -> None:
    values_N = np.linspace(1, 1.1, 50, dtype=np.float32)
    rule = rule_of(adaptation=1)
    state = rule.init()
    assert rule.tau(values_N, 5, state) == CountedThreshold().tau(values_N, 5, {})
    assert state["stages"].tolist() == [1, 1, 1, 0]


def test_fewer_elements_than_wanted_all_leave_and_teach_nothing() -> None:
    rule = rule_of()
    state = rule.init()
    assert rule.tau(np.zeros(30, np.float32), 3, state) == 0
    assert rule.tau(np.array([0, 1, 0, -2], np.float32), 2, state) == 0
    assert state["stages"].tolist() == [1, 1, 0, 0]
