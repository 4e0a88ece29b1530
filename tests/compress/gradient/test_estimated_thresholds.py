"""Thresholds that are guessed: of samples, between mean and maximum, of a normal distribution."""

from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.methods.dgc import Dgc, SampledThreshold
from dlrm_hybrid.compress.gradient.methods.gaussian import Gaussian
from dlrm_hybrid.compress.gradient.methods.hard import FixedThreshold
from dlrm_hybrid.compress.gradient.methods.redsync import RedSync
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder

Float32s = NDArray[np.float32]

DGC = SampledThreshold(Dgc(), 5)
REDSYNC_BISECT, REDSYNC_TRIM = RedSync(search="bisect"), RedSync(search="trim")
GAUSSIAN_SIGNED, GAUSSIAN_MAGNITUDE = Gaussian(fit="signed"), Gaussian(fit="magnitude")
RULES: dict[str, ThresholdFinder] = {
    "dgc": DGC,
    "redsync-bisect": REDSYNC_BISECT,
    "redsync-trim": REDSYNC_TRIM,
    "gaussian-signed": GAUSSIAN_SIGNED,
    "gaussian-magnitude": GAUSSIAN_MAGNITUDE,
}


def drawn(seed: int, count: int = 50_000) -> Float32s:
    return np.random.default_rng(seed).laplace(size=count).astype(np.float32)


def reaching(values_N: Float32s, tau: float) -> int:
    return np.count_nonzero((np.abs(values_N) >= np.float32(tau)) & (values_N != 0))


@pytest.mark.parametrize("name", RULES)
def test_zeros_equal_values_and_one_element_have_thresholds(name: str) -> None:
    rule = RULES[name]
    state = rule.init()
    assert rule.tau(np.zeros(40, np.float32), 4, state) == 0
    equal_N = np.full(40, -0.5, np.float32)
    tau = rule.tau(equal_N, 4, state)
    assert 0 <= tau <= 0.5 if isinstance(rule, Gaussian) else tau == 0.5
    assert 0 < rule.tau(np.array([-3], np.float32), 1, state) <= 3
    bad_N = drawn(0)
    bad_N[7] = np.nan
    rule.tau(bad_N, 4, state)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_something_leaves_and_not_everything(name: str, density: float) -> None:
    rule = RULES[name]
    state = rule.init()
    for seed in range(4):
        values_N = drawn(seed)
        before_N = values_N.copy()
        found = reaching(values_N, rule.tau(values_N, int(density * values_N.size), state))
        assert 0 < found < values_N.size / 2
        np.testing.assert_array_equal(values_N, before_N)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_samples_are_corrected_both_ways(density: float) -> None:
    state, k = DGC.init(), int(density * 50_000)
    taus = [DGC.tau(drawn(seed), k, state) for seed in range(10)]
    found = [reaching(drawn(seed), tau) for seed, tau in enumerate(taus)]
    assert all(0.8 * k <= count <= 1.3 * k for count in found)
    exact = [CountedThreshold().tau(drawn(seed), k, {}) for seed in range(10)]
    assert taus != exact
    assert state["samples"].tolist() == [10]


def test_samples_differ_from_draw_to_draw_and_from_trainer_to_trainer() -> None:
    values_N, state = drawn(3), DGC.init()
    other = SampledThreshold(Dgc(), 6)
    taus = [DGC.tau(values_N, 5000, state) for _ in range(4)]
    assert len({*taus, other.tau(values_N, 5000, other.init())}) == 5
    assert DGC.tau(values_N, 5000, DGC.init()) == taus[0]


def test_a_sample_is_as_sure_as_its_size() -> None:
    """Of S elements a binomial number reaches what a part d should: k̂ / k by √((1 - d) / (d S))."""
    rule, k = SampledThreshold(Dgc(lowest=1e-9, highest=1e9), 5), 10_000
    values_N, state = drawn(7, 100_000), rule.init()
    found = [reaching(values_N, rule.tau(values_N, k, state)) / k for _ in range(80)]
    assert np.mean(found) == pytest.approx(1, abs=0.05)
    assert np.std(found) == pytest.approx(np.sqrt(0.9 / (0.1 * 1000)), rel=0.35)


@pytest.mark.parametrize("count", [320, 5_000, 50_000])
@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("zeros", [0.5, 0.9, 0.99])
def test_a_sample_of_mostly_zeros_stays_in_bounds(count: int, density: float, zeros: float) -> None:
    """Half of the samples say 0 where as many elements are not 0 as should leave."""
    state, k = DGC.init(), int(density * count)
    for seed in range(12):
        values_N = drawn(seed, count)
        values_N[np.random.default_rng(seed).random(count) < zeros] = 0
        found = reaching(values_N, DGC.tau(values_N, k, state))
        assert min(0.8 * k, np.count_nonzero(values_N)) <= found <= 1.3 * k


def test_a_second_selection_finds_exactly_as_many() -> None:
    # The sample is all there is, and its threshold is that of twice as many as wanted.
    rule = SampledThreshold(Dgc(part=1.0, highest=1.0), 0)
    values_N = np.repeat(drawn(1, 500), 2)
    values_N[1::2] *= np.float32(0.999)
    for k in (1, 7, 100):
        assert reaching(values_N, rule.tau(values_N, k, rule.init())) == k


def test_redsync_bisects_between_mean_and_maximum() -> None:
    values_N = np.arange(1, 101, dtype=np.float32)
    # The mean is 50.5, the maximum 100; the middle 75.25 has 25 above it.
    middle = np.nextafter(np.float32(75.25), np.float32(200))
    assert REDSYNC_BISECT.tau(values_N, 20, {}) == middle
    upper = np.nextafter(np.float32(50.5 + 0.75 * 49.5), np.float32(200))
    assert REDSYNC_BISECT.tau(values_N, 10, {}) == upper
    # Too few everywhere: it ends at the third look, where the interval is an eighth.
    lowest = np.nextafter(np.float32(50.5 + 0.125 * 49.5), np.float32(200))
    assert REDSYNC_BISECT.tau(values_N, 95, {}) == lowest
    trimmed = np.nextafter(np.float32(50.5 + 0.6 * 49.5), np.float32(200))
    assert REDSYNC_TRIM.tau(values_N, 15, {}) == trimmed


def test_a_normal_distribution_is_fitted_as_it_is() -> None:
    values_N = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    expected = NormalDist().inv_cdf(1 - 0.01 / 2)
    assert GAUSSIAN_SIGNED.tau(values_N, 2000, {}) == pytest.approx(expected, rel=0.02)
    # Fitted to magnitudes it is far too high, and lowered.
    assert GAUSSIAN_MAGNITUDE.tau(values_N, 2000, {}) < expected


@pytest.mark.parametrize(("large", "is_near"), [(13, True), (14, False), (7, True), (6, False)])
def test_a_normal_fit_is_near_from_two_thirds_to_four_thirds(large: int, is_near: bool) -> None:
    """Of 1,000 values some are near 1, as many of either sign, and 10 should leave."""
    values_N = np.full(1000, 1e-6, np.float32)
    values_N[:large] = np.linspace(0.99, 1.01, large) * (-1) ** np.arange(large)
    first = NormalDist().inv_cdf(1 - 0.01 / 2) * float(np.std(values_N.astype(np.float64), ddof=1))
    assert first < 0.5, "all large values reach the fit"
    tau = GAUSSIAN_SIGNED.tau(values_N, 10, {})
    assert (tau == pytest.approx(first, rel=0.1)) is is_near


def test_the_last_correction_is_not_made() -> None:
    # Half of the values are 1, the others grow: every threshold is far too high.
    values_N = np.concatenate([np.ones(990), np.full(10, 1e4)]).astype(np.float32)
    spread = float(np.std(values_N.astype(np.float64), ddof=1))
    first = float(values_N.mean(dtype=np.float64)) + NormalDist().inv_cdf(1 - 0.2 / 2) * spread
    found = GAUSSIAN_SIGNED.tau(values_N, 200, {})
    assert found == pytest.approx(first / 4, rel=1e-6)


def test_a_hard_threshold_knows_no_values() -> None:
    assert {FixedThreshold(0.5).tau(drawn(seed), 3, {}) for seed in range(3)} == {0.5}
