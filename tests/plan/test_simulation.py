"""Simulated worlds behave as worlds do."""

from dataclasses import replace
from itertools import product

import pytest
from planned import SERVED, UNITS, WORLDS, dense, outcome

from dlrm_hybrid.plan import simulation
from dlrm_hybrid.plan.costs import one_process_seconds
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.simulation import simulate
from dlrm_hybrid.plan.worlds import Planned

ALONE = "parallel.cuts=[]"


@pytest.mark.parametrize("name", WORLDS)
def test_every_kind_of_world_comes_to_its_end_the_same_way_twice(name: str) -> None:
    world = dense(*WORLDS[name])
    first, second = (outcome(world, latency="1ms") for _ in range(2))
    assert first == second
    assert first.samples_per_second > 0
    assert all(0 <= use <= 1.001 for use in first.uses.values())


def test_one_process_takes_the_sum_of_its_parts() -> None:
    world = dense("parallel.trainers=1", "parallel.servers=0", ALONE)
    found = outcome(world)
    expected = 128 / one_process_seconds(UNITS, world)
    assert found.samples_per_second == pytest.approx(expected)
    assert found.uses["thread of worker-0.0"] == pytest.approx(1.0)
    assert found.uses["cores"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["sync", "async", "served ahead", "gpipe"])
def test_more_cores_and_faster_links_are_not_slower(name: str) -> None:
    world = dense(*WORLDS[name])
    base = outcome(world, "100mbit").samples_per_second
    assert outcome(world, "100mbit", cores=8).samples_per_second >= base * 0.99
    assert outcome(world, "1gbit").samples_per_second > base
    assert outcome(world, "100mbit", "20ms").samples_per_second < base


def test_a_full_link_decides() -> None:
    # 2 x 2 MB of gradients into the server and as much out of it, for 2 x 128 rows.
    found = outcome(dense(), "10mbit", cores=64)
    least = 2 * 4 * 508_753 / (10e6 / 8)
    assert least < 256 / found.samples_per_second < 2.6 * least
    assert max(found.uses, key=lambda name: found.uses[name]) == "link of server-0"
    assert found.uses["link of server-0"] > 0.8


def test_stale_weights_hide_the_way_to_the_server() -> None:
    # Not beside shared tables, whose exchanges all have to be waited for: docs/results/served.md.
    ahead = (*SERVED, "embedding.staleness=4", ALONE)
    stale = ("sync=bounded", "sync.staleness=2")
    sync, bounded = (outcome(dense(*ahead, *more), "10gbit", "20ms", 64) for more in ((), stale))
    assert bounded.samples_per_second > 1.3 * sync.samples_per_second


def test_rows_asked_for_ahead_hide_the_way_to_the_tables() -> None:
    # Versions are as long under way, so they must not be waited for either.
    served = (*SERVED, ALONE, "sync=bounded", "sync.staleness=3")
    now = outcome(dense(*served), None, "20ms", 64)
    ahead = outcome(dense(*served, "embedding.staleness=2"), None, "20ms", 64)
    # The update and the rows that must have seen it: two ways.
    assert 256 / now.samples_per_second - 256 / ahead.samples_per_second > 0.02


def kept(*overrides: str) -> float:
    """Speed with trainer 0 four times as slow, over that without."""
    world = thinner(dense(*WORLDS["async"], ALONE, *overrides))
    hosts = Planned(world.config, "10gbit").hosts(16)
    even = simulate(world, UNITS, hosts)
    slow = simulate(world, UNITS, replace(hosts, slowness={0: 4.0}))
    return slow.samples_per_second / even.samples_per_second


def test_asynchronous_trainers_do_not_wait_for_a_slow_one() -> None:
    # Of two trainers one goes on, the other at a quarter; in lock-step both wait for it.
    assert kept() > 0.55
    assert kept("sync=sync") < 0.45


def test_the_same_work_takes_more_cpu_time_on_slower_links() -> None:
    fast, slow = (
        sum(outcome(dense(), rate, cores=64).cold_seconds) for rate in ("1gbit", "10mbit")
    )
    assert slow > 1.05 * fast


KINDS = {
    "sync": SERVED,
    "async": (*SERVED, "sync=async"),
    "bounded": (*SERVED, "sync=bounded"),
    "shared": (),
}
QUICK = {
    *(("sync", "emulated", "100mbit"), ("async", "host", "1gbit")),
    ("bounded", "emulated", "10gbit"),
    ("shared", "host", "100mbit"),
}


@pytest.mark.parametrize(
    ("kind", "hosts", "rate"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(KINDS, ("emulated", "host"), ("100mbit", "1gbit", "10gbit"))
    ],
)
def test_few_trainers_stand_for_many(
    kind: str, hosts: str, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = thinner(dense(*KINDS[kind], ALONE, "parallel.trainers=10", f"network={hosts}"))
    few = outcome(world, rate)
    monkeypatch.setattr(simulation, "MOST_TRAINERS", 10)
    assert few.samples_per_second == pytest.approx(outcome(world, rate).samples_per_second, rel=0.3)


def thinner(world: Layout) -> Layout:
    """It sends a hundredth of its weights and gradients."""
    sent = {way: one._replace(num_bytes=one.num_bytes / 100) for way, one in world.sent.items()}
    return replace(world, sent=sent)


def test_thousands_of_trainers_are_simulated_in_no_more_time() -> None:
    world = thinner(dense(*SERVED, ALONE, "parallel.trainers=4096"))
    few = thinner(dense(*SERVED, ALONE, "parallel.trainers=1024"))
    rates = [outcome(one, "100gbit").samples_per_second for one in (few, world)]
    assert rates[1] == pytest.approx(rates[0], rel=0.05)  # one server is at its end with either
