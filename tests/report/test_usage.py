from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import BEGIN, plain_events

from dlrm_hybrid.report.figures import MAX_POINTS, cpu_use, cpu_use_of_all, network_use
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Event, Kind

RATE = 8000  # bits per second: 1,000 bytes


def run_of(*ranks: dict[str, Any], cores: int = 2) -> Run:
    told = [Event(Kind.RANK, 20, BEGIN + 50, values) for values in ranks]
    return Run(
        folder=Path(),
        config={},
        overrides=(),
        environment={"cores": cores},
        summary={},
        events=(*plain_events(), *told),
    )


def linked(role: str, series: list[list[float]], rate: int | None = RATE) -> dict[str, Any]:
    return {"role": role, "interface": {"rate_bits_per_second": rate, "series": series}}


def test_the_busier_direction_of_each_window_counts_and_the_busiest_link_is_first() -> None:
    idle = [[BEGIN + 5 + n, 1.0, 100, 50] for n in range(4)]
    busy = [[BEGIN + 5 + n, 1.0, *((900, 10, 900) if n % 2 else (300, 400, 700))] for n in range(4)]
    use = network_use(run_of(linked("worker-0.0", idle), linked("server-0", busy)))
    assert list(use) == ["server-0", "worker-0.0"]
    assert list(use["server-0"].index) == [0.5, 1.5, 2.5, 3.5]
    assert list(use["server-0"]) == pytest.approx([70, 90, 70, 90])
    assert list(use["worker-0.0"]) == pytest.approx([10, 10, 10, 10])


def test_links_without_a_rate_or_a_link_are_left_out() -> None:
    assert network_use(run_of()) == {}
    window = [[BEGIN, 1.0, 100, 50]]
    loopback = {"role": "worker-0.0", "interface": None}
    assert network_use(run_of(loopback, linked("server-0", window, rate=None))) == {}
    assert cpu_use_of_all(run_of(loopback)) is None


def test_times_without_training_have_no_point() -> None:
    series = [[BEGIN + start, 1.0, 500, 0] for start in (0, 1, 8, 9)]
    (curve,) = network_use(run_of(linked("server-0", series))).values()
    assert list(curve.index) == [1.25, 8.75]
    assert list(curve) == pytest.approx([50, 50])


def test_all_ranks_together_share_the_cores_they_can_use() -> None:
    ranks = [
        {"role": f"worker-0.{n}", "cpu_series": [[BEGIN, 2.0, 0.5], [BEGIN + 2, 2.0, 1.0]]}
        for n in range(3)
    ]
    for cores, share in ((2, 3 / 2), (8, 1.0)):
        run = run_of(*ranks, cores=cores)
        assert list(cpu_use(run)["worker-0.1"]) == pytest.approx([25, 50])
        together = cpu_use_of_all(run)
        assert together is not None
        assert list(together) == pytest.approx([share * 25, share * 50])


@given(st.lists(st.tuples(st.floats(0.05, 2), st.floats(0, 1)), min_size=1, max_size=300))
def test_few_points_keep_the_mean(windows: list[tuple[float, float]]) -> None:
    series, start = [], BEGIN
    for seconds, share in windows:
        series.append([start, seconds, 1000 * share * seconds, 0])
        start += seconds
    (curve,) = network_use(run_of(linked("server-0", series))).values()
    assert len(curve) <= MAX_POINTS
    whole = sum(seconds * share for seconds, share in windows) / (start - BEGIN)
    assert curve.mean() == pytest.approx(100 * whole, abs=1e-3)
