from typing import Any

import pytest

from dlrm_hybrid.telemetry.summary import INTERFACES_UNMEASURED, interface_figures

RATE = 800  # bits, so 100 bytes, a second


def told(rank: int, seconds: float, received: int, sent: int, busier: int, **more: Any) -> Any:
    values = {
        "address": f"198.18.0.{rank + 1}",
        "rate_bits_per_second": RATE,
        "seconds": seconds,
        "received_bytes": received,
        "sent_bytes": sent,
        "busier_bytes": busier,
    }
    return {"rank": rank, "interface": values | more}


def test_the_busiest_link_is_the_networks() -> None:
    summary = interface_figures([told(0, 2.0, 40, 60, 80), told(1, 4.0, 200, 100, 280)])
    assert summary == {
        "utilization": pytest.approx(0.7),
        "utilization_by_rank": {"0": pytest.approx(0.4), "1": pytest.approx(0.7)},
        "utilization_mean_direction": pytest.approx(300 / 2 / 400),
        "rate_bits_per_second": RATE,
        "interface_bytes": 160,
    }


def test_attempts_add_up_each_at_its_rate() -> None:
    again = told(0, 1.0, 0, 100, 100, rate_bits_per_second=2 * RATE)
    summary = interface_figures([told(0, 3.0, 0, 75, 75), again])
    assert summary["utilization"] == pytest.approx((0.75 + 0.5) / 4)
    assert summary["interface_bytes"] == 175
    assert summary["rate_bits_per_second"] == 2 * RATE


def test_an_interface_that_ranks_share_counts_once() -> None:
    one, other = told(0, 1.0, 5, 50, 50), told(1, 1.0, 5, 49, 49, address="198.18.0.1")
    summary = interface_figures([other, one])
    assert summary["interface_bytes"] == 50
    assert summary["utilization_by_rank"] == {"1": pytest.approx(0.49), "0": pytest.approx(0.5)}


def test_what_is_unknown_is_none() -> None:
    assert interface_figures([]) == INTERFACES_UNMEASURED
    assert interface_figures([{"rank": 0}, {"rank": 1, "interface": None}]) == INTERFACES_UNMEASURED
    unknown = interface_figures([told(0, 1.0, 1, 2, 2, rate_bits_per_second=None)])
    assert unknown == {**INTERFACES_UNMEASURED, "interface_bytes": 2}
    still = interface_figures([told(0, 0.0, 0, 0, 0)])
    assert (still["utilization"], still["utilization_by_rank"]) == (None, None)
