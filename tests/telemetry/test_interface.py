"""What a link carried in training: its windows, and what a summary says of all links."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.telemetry import interface
from dlrm_hybrid.telemetry.interface import (
    MOST_POINTS,
    InterfaceMeter,
    Series,
    read_counters,
    sampled,
)
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.summary import INTERFACES_UNMEASURED, interface_figures
from dlrm_hybrid.telemetry.traffic import Phase

WINDOWS = st.lists(
    st.tuples(st.integers(1, 64), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=1500
)


@dataclass
class Link:
    """An interface and a clock that move when told to."""

    now: float = 0.0
    received_bytes: int = 1_000
    sent_bytes: int = 5_000

    def pass_by(self, seconds: float, received_bytes: int, sent_bytes: int) -> None:
        self.now += seconds
        self.received_bytes += received_bytes
        self.sent_bytes += sent_bytes

    def meter(self) -> InterfaceMeter:
        return InterfaceMeter(
            address="198.18.0.1",
            rate_bits_per_second=1_000,
            counters=lambda: (self.received_bytes, self.sent_bytes),
            clock=lambda: self.now,
        )


def test_only_training_counts_and_each_window_its_busier_direction() -> None:
    link = Link()
    meter = link.meter()
    link.pass_by(1.0, 70, 70)
    meter.sample()
    meter.switch(True)
    link.pass_by(0.25, 10, 30)
    meter.sample()
    link.pass_by(0.25, 20, 5)
    meter.switch(False)
    link.pass_by(5.0, 900, 900)
    meter.switch(True)
    meter.switch(True)
    link.pass_by(0.5, 0, 8)
    values = meter.values()
    assert values.pop("address") == "198.18.0.1"
    series = values.pop("series")
    assert [point[1:] for point in series] == [
        [0.25, 10, 30, 30],
        [0.25, 20, 5, 20],
        [0.5, 0, 8, 8],
    ]
    assert [point[0] - series[0][0] for point in series] == pytest.approx([0.0, 0.25, 5.5])
    assert values == {
        "rate_bits_per_second": 1_000,
        "seconds": 1.0,
        "received_bytes": 30,
        "sent_bytes": 43,
        "busier_bytes": 30 + 20 + 8,
    }


def test_the_phases_of_a_rank_decide_what_is_training() -> None:
    link = Link()
    meter = RankMeter(None, SpanClock(), link.meter())
    for phase, sent_bytes in [(Phase.WARMUP, 1), (Phase.TRAIN, 10), (Phase.EVALUATE, 100)]:
        meter.switch(phase)
        link.pass_by(1.0, 0, sent_bytes)
    assert meter.values()["interface"]["sent_bytes"] == 10


@given(WINDOWS)
def test_a_series_keeps_the_sums_in_few_points(windows: list[tuple[int, int, int]]) -> None:
    series, start = Series(), 0.0
    for ticks, received_bytes, sent_bytes in windows:
        series.add(start, ticks / 64, received_bytes, sent_bytes)
        start += ticks / 64
    assert len(series.points) <= MOST_POINTS
    for column, total in enumerate(map(sum, zip(*windows, strict=True)), 1):
        assert sum(point[column] for point in series.points) * (64 if column == 1 else 1) == total
    starts = [point[0] for point in series.points]
    assert starts == sorted(set(starts))


def test_the_counters_are_the_kernels() -> None:
    with pytest.raises(OSError, match="has no interface none0"):
        read_counters("none0")
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    assert lines
    for line in lines:
        name = line.partition(":")[0].strip()
        assert min(read_counters(name)) >= 0


def test_a_link_is_sampled_and_loopback_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with sampled("127.0.0.1", 10**6) as meter:
        assert meter is None
    link = Link()
    monkeypatch.setattr(interface, "_interface", lambda address: "eth7")
    monkeypatch.setattr(
        interface, "read_counters", lambda name: (link.received_bytes, link.sent_bytes)
    )
    with sampled("198.18.0.1", None) as meter:
        assert meter is not None
        meter.switch(True)
        while not meter.values()["seconds"] > 2 * interface.WINDOW_SECONDS:
            link.pass_by(0.0, 1, 2)
        told = meter.values()
    assert told["rate_bits_per_second"] is None
    assert told["sent_bytes"] == 2 * told["received_bytes"] > 0


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
