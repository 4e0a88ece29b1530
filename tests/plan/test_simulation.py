"""Simulated worlds run the steps of real ones: nothing is lost, times are sums of their parts."""

from dataclasses import replace

import pytest
from planned import UNITS, WORLDS, config

from dlrm_hybrid.config.keys import all_keys
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.plan.costs import one_process_seconds
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import layout
from dlrm_hybrid.plan.memory import memory_bytes
from dlrm_hybrid.plan.simulation.classes import by_classes
from dlrm_hybrid.plan.simulation.machine import (
    COLD_AFTER_SECONDS,
    COLD_SECONDS,
    COLD_WORK_SECONDS,
    Caches,
)
from dlrm_hybrid.plan.simulation.world import Outcome, simulate
from dlrm_hybrid.plan.worlds import Planned

STEPS = 24
ROWS = 100_000


def run(
    *overrides: str, rate: str | None = "1gbit", latency: str | None = None, cores: float = 2
) -> Outcome:
    planned = Planned(config(*overrides), rate, latency)
    return simulate(layout(planned.config, ROWS), UNITS, planned.hosts(cores), STEPS)


@pytest.mark.parametrize("key", ["optimizer", "embedding.optimizer"])
def test_memory_is_known_of_every_optimizer(key: str) -> None:
    keys = all_keys()
    choices = (keys.get(key) or keys[f"{key}.name"]).choices
    worlds = [layout(config(f"{key}={choice}"), ROWS) for choice in choices]
    needed = [[memory_bytes(one, rank, {}) for rank in range(7)] for one in worlds]
    assert len(needed) == len(choices) > 3
    assert min(needed) == needed[choices.index("sgd")]


@pytest.mark.parametrize("name", WORLDS)
def test_every_frame_is_sent_as_often_as_is_calculated(name: str) -> None:
    world = layout(config(*WORLDS[name]), ROWS)
    found = run(*WORLDS[name])
    for traffic, size in bytes_by_class(world, frames(world)).items():
        # What answers the last steps may not have left when workers end; some is asked for ahead.
        sent = found.bytes_per_step.get(traffic, 0.0)
        assert sent == pytest.approx(size, rel=4 / STEPS), traffic
    assert max((*found.core_use, *found.link_use, *found.rank_use)) <= 1 + 1e-9
    assert found.samples_per_second > 0


def test_one_rank_alone_takes_the_sum_of_its_costs() -> None:
    overrides = ("parallel.trainers=1", "parallel.servers=0", "parallel.cuts=[]")
    world = layout(config(*overrides), ROWS)
    found = run(*overrides)
    assert found.seconds_per_step == pytest.approx(one_process_seconds(UNITS, world))
    assert found.rank_use[0] == pytest.approx(1.0)
    assert found.core_use[0] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["sync", "async", "served ahead", "gpipe"])
def test_more_cores_and_faster_links_are_not_slower(name: str) -> None:
    base = run(*WORLDS[name], rate="100mbit").samples_per_second
    assert run(*WORLDS[name], rate="100mbit", cores=8).samples_per_second >= base * 0.999
    assert run(*WORLDS[name], rate="1gbit").samples_per_second > base
    assert run(*WORLDS[name], rate="100mbit", latency="20ms").samples_per_second < base


def test_a_full_link_decides() -> None:
    # 2 x 2 MB of gradients into the server and as much out of it, for 2 x 128 rows.
    found = run(rate="10mbit", cores=64)
    pushed = found.bytes_per_step
    least = 2 * 4 * 508_753 / (10e6 / 8)
    assert least < found.seconds_per_step < 2.6 * least
    assert max(found.link_use) == found.link_use[-1] > 0.8
    assert sum(pushed.values()) > 0


def test_stale_weights_hide_the_way_to_the_server() -> None:
    # Not beside shared tables, whose exchanges all have to be waited for: docs/results/served.md.
    ahead = (*WORLDS["served"], "embedding.staleness=4", "parallel.cuts=[]")
    late = {"rate": "1gbit", "latency": "20ms", "cores": 64}
    sync, bounded = run(*ahead, **late), run(*ahead, "sync=bounded", "sync.staleness=2", **late)
    assert bounded.samples_per_second > 1.3 * sync.samples_per_second
    shared = run(**late), run("sync=bounded", "sync.staleness=2", **late)
    assert shared[1].samples_per_second < 1.1 * shared[0].samples_per_second


def test_rows_asked_for_ahead_hide_the_way_to_the_tables() -> None:
    # Versions are as long under way, so they must not be waited for either.
    served = (*WORLDS["served"], "parallel.cuts=[]", "sync=bounded", "sync.staleness=3")
    now = run(*served, latency="20ms", cores=64)
    ahead = run(*served, "embedding.staleness=2", latency="20ms", cores=64)
    # The update and the rows that must have seen it: two ways.
    assert now.seconds_per_step - ahead.seconds_per_step > 0.02


def test_asynchronous_trainers_do_not_wait_for_a_slow_one() -> None:
    def kept(*overrides: str) -> float:
        """Speed with trainer 0 four times as slow, over that without."""
        alone = ("parallel.cuts=[]", "gradient=topk")
        planned = Planned(config(*WORLDS["async"], *alone, *overrides), "1gbit")
        world, hosts = layout(planned.config, ROWS), planned.hosts(16)
        even = simulate(world, UNITS, hosts, STEPS)
        slow = simulate(world, UNITS, replace(hosts, slowness={0: 4.0}), STEPS)
        return slow.samples_per_second / even.samples_per_second

    # Of two trainers one goes on, the other at a quarter; in lock-step both wait for it.
    assert kept() == pytest.approx(0.625, abs=0.06)
    assert kept("sync=sync") < 0.4


FEW_STAGES = (*WORLDS["served"], "parallel.cuts=[]", "gradient=topk")


@pytest.mark.parametrize(
    "overrides",
    [
        (*FEW_STAGES, "sync=sync"),
        (*FEW_STAGES, "sync=async"),
        (*FEW_STAGES, "sync=bounded"),
        ("sync=sync",),  # stages are answered while others push; at 10gbit the network's thread
    ],
    ids=["served sync", "served async", "served bounded", "stages sync"],
)
@pytest.mark.parametrize("rate", ["100mbit", "1gbit", "10gbit"])
def test_what_is_calculated_from_one_trainer_is_near_the_simulation(
    overrides: tuple[str, ...], rate: str
) -> None:
    # Servers far below or far above what trainers ask of them; half full is the hardest case.
    overrides = (*overrides, "parallel.trainers=12")
    planned = Planned(replace_hosts(config(*overrides)), rate)
    world, hosts = layout(planned.config, ROWS), planned.hosts(1)
    simulated = simulate(world, UNITS, hosts, STEPS)
    calculated = by_classes(world, UNITS, hosts)
    ratio = calculated.samples_per_second / simulated.samples_per_second
    assert ratio == pytest.approx(1.0, abs=0.3)
    assert len(calculated.link_use) == len(simulated.link_use)
    assert len(calculated.rank_use) == len(simulated.rank_use)


def replace_hosts(one: Config) -> Config:
    return replace(one, plan=replace(one.plan, hosts="each"))


def test_half_is_cold_after_a_wait_and_half_of_that_once_enough_was_done() -> None:
    caches = Caches()
    assert caches.work(1.0) == 0.0
    caches.wait(COLD_AFTER_SECONDS)
    assert caches.cold == pytest.approx(1 / 2)
    # Half of what is cold at most, for as much work again as warms half of all.
    assert caches.work(2 * COLD_WORK_SECONDS) == pytest.approx(COLD_SECONDS / 4)


@pytest.mark.parametrize("parts", [2, 7])
def test_caches_do_not_care_into_how_many_parts_work_is_cut(parts: int) -> None:
    whole, cut = Caches(0.9), Caches(0.9)
    costs = sum(cut.work(3e-3 / parts) for _ in range(parts))
    assert costs == pytest.approx(whole.work(3e-3))
    assert cut.cold == pytest.approx(whole.cold)


def test_a_short_wait_warms_nothing() -> None:
    caches = Caches(0.8)
    caches.wait(1e-6)
    assert 0.8 <= caches.cold < 0.81


def test_what_waits_take_more_is_bounded() -> None:
    caches = Caches()
    caches.wait(1e6)
    assert COLD_SECONDS * 0.99 < caches.work(1.0) < COLD_SECONDS


def test_the_same_work_takes_more_cpu_time_on_slower_links() -> None:
    fast, slow = (sum(run(rate=rate, cores=64).cold_seconds) for rate in ("1gbit", "10mbit"))
    assert slow > 1.2 * fast
