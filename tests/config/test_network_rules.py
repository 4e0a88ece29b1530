import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import build

EMULATED = ("parallel=hybrid", "network=emulated")
SERVED = (*EMULATED, "parallel.cuts=[]", "embedding=served", "parallel.table_servers=3")


def test_the_plan_of_a_network() -> None:
    config = validate(values_of((*EMULATED, "network.rate=2.5gbit", "network.latency=5ms")))
    plan = build.emulation(config)
    assert plan is not None
    assert (plan.hosts, plan.rate_bits_per_second, plan.latency_seconds) == (7, 2.5e9, 0.005)
    assert [build.host(config, rank) for rank in range(7)] == list(range(7))
    assert build.emulation(validate(values_of(("parallel=hybrid",)))) is None


@pytest.mark.parametrize(
    ("overrides", "hosts"),
    [
        ((*SERVED, "parallel.machines=2"), [0, 1, 0, 1, 0, 1, 0]),
        ((*SERVED, "parallel.machines=3", "parallel.servers=1"), [0, 1, 2, 0, 0, 1, 2]),
        ((*EMULATED, "parallel.machines=2"), [0, 0, 0, 1, 1, 1, 0, 1]),
        (
            (*EMULATED, "parallel.machines=2", "parallel.trainers=3"),
            [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1],
        ),
    ],
)
def test_machines_hold_whole_trainers_and_servers_beside_them(
    overrides: tuple[str, ...], hosts: list[int]
) -> None:
    config = validate(values_of(overrides))
    plan, world = build.emulation(config), build.topology(config)
    assert plan is not None
    assert plan.hosts == max(hosts) + 1
    assert [build.host(config, rank) for rank in range(world.size)] == hosts


def test_no_latency_is_the_network_without() -> None:
    def emulation(latency: str) -> object:
        return build.emulation(validate(values_of((*EMULATED, f"network.latency={latency}"))))

    assert emulation("0ms") == emulation("null") != emulation("1ms")
