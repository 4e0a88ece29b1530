import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.model.optimizer import Constant, Linear, StalenessWarmup, WarmupDecay


def test_constant_stays():
    assert {Constant(base_lr=0.3).lr(step) for step in (0, 1, 10**9)} == {0.3}


def test_linear_starts_at_the_base_rate_and_reaches_zero_at_the_end():
    schedule = Linear(base_lr=0.5, steps=10)
    assert [schedule.lr(step) for step in (0, 5, 9)] == pytest.approx([0.5, 0.25, 0.05])
    assert schedule.lr(10) == schedule.lr(11) == 0


def _reference(base_lr: float, warmup: int, start: int, length: int, steps: int) -> list[float]:
    """The stateful rule: counts from 1, remembers its last rate."""
    rates: list[float] = []
    last = base_lr
    for count in range(1, steps + 1):
        if count < warmup:
            last = base_lr * (1 - (warmup - count) / warmup)
        elif start <= count < start + length:
            last = max(1e-7, base_lr * ((length - (count - start)) / length) ** 2)
        rates.append(last if length or count < warmup else base_lr)
    return rates


@given(
    warmup=st.integers(0, 12),
    wait=st.integers(0, 8),
    length=st.one_of(st.just(0), st.integers(1, 20)),
)
def test_warmup_decay_equals_a_rule_with_memory(warmup: int, wait: int, length: int):
    start = warmup + wait
    schedule = WarmupDecay(
        base_lr=0.1, warmup_steps=warmup, decay_start_step=start, decay_steps=length
    )
    rates = [schedule.lr(step) for step in range(50)]
    assert rates == pytest.approx(_reference(0.1, warmup, start, length, 50), rel=1e-12)


def test_a_stale_gradient_gets_its_whole_rate_by_and_by():
    given = Linear(base_lr=0.6, steps=200)
    warm = StalenessWarmup(schedule=given, staleness=9, steps=100)
    assert warm.lr(0) == pytest.approx(0.6 / 9)
    assert warm.lr(50) == pytest.approx(0.45 / 3)
    for step in (100, 101, 150):
        assert warm.lr(step) == given.lr(step)
    for fresh in (0, 1):
        same = StalenessWarmup(schedule=given, staleness=fresh, steps=100)
        assert [same.lr(step) for step in range(200)] == [given.lr(step) for step in range(200)]
