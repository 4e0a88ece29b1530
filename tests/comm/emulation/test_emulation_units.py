from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.comm.netem.plan import bits_per_second, seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5gbit", 25 * 10**8), ("1500kbit", 1_500_000)],
)
def test_rates(text: str, rate: int) -> None:
    assert bits_per_second(text) == rate


@given(st.integers(10, 100_000))
def test_a_rate_with_decimals_is_exact(thousandths: int) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03}gbit"
    assert bits_per_second(text) == Fraction(thousandths, 1000) * 10**9


@pytest.mark.parametrize(
    "text", ["", "100", "mbit", "100Mbit", "100 mbit", "-1mbit", "1e3mbit", "100mbits", "1.gbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate such as"):
        bits_per_second(text)


@pytest.mark.parametrize("text", ["0mbit", "999kbit", "100.1gbit", "999999999gbit"])
def test_rates_that_no_link_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate from 1mbit to 100gbit"):
        bits_per_second(text)


@pytest.mark.parametrize(
    ("text", "time"),
    [("5ms", 0.005), ("250us", 0.00025), ("1.5s", 1.5), ("0ms", 0.0), ("10s", 10.0)],
)
def test_times(text: str, time: float) -> None:
    assert seconds(text) == time


@pytest.mark.parametrize("text", ["", "5", "ms", "5 ms", "5m", "-5ms", "11s", "10001ms"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time"):
        seconds(text)
