import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.types import ConfigError

EMULATED = ("parallel=hybrid", "network=emulated")
SERVED = (*EMULATED, "parallel.cuts=[]", "embedding=served", "parallel.table_servers=3")


def faults(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(values_of(overrides))
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["network=emulated"],
            "parallel = single: sends nothing over the links of network=emulated; use "
            "parallel=hybrid or network=host",
        ),
        (
            [*EMULATED, "parallel.world=in_process"],
            "parallel.world = in_process: sends nothing over the links of network=emulated; use "
            "parallel.world=processes or network=host",
        ),
        (
            [*EMULATED, "network.bind=10.0.0.1"],
            "network.bind=10.0.0.1: only applies to network=host",
        ),
        ([*EMULATED, "network.rate=null"], "network.rate = null: network=emulated needs a rate"),
        (
            [*EMULATED, "network.rate=100Mbps"],
            "network.rate = '100Mbps': must be a rate such as 100mbit or 2.5gbit",
        ),
        (
            [*EMULATED, "network.latency=5min"],
            "network.latency = '5min': must be a time such as 5ms or 250us",
        ),
        (
            [*EMULATED, "network.latency=-5ms"],
            "network.latency = '-5ms': must be letters, digits and . _ - only, and begin with a "
            "letter or digit or null",
        ),
        (
            [*EMULATED, "network.latency=11s"],
            "network.latency = '11s': must be a time from 0ms to 10s",
        ),
        (
            [*EMULATED, "network.machines=3"],
            "network.machines = 3: parallel.trainers = 2 leave machines without a rank",
        ),
        (
            [*EMULATED, "parallel.trainers=1", "parallel.cuts=[]", "parallel.servers=0"],
            "parallel.trainers = 1: alone it sends nothing over the links of network=emulated",
        ),
        (
            [*EMULATED, "network.machines=1"],
            "network.machines = 1: must be a whole number at least 2 and at most 4,096 or null",
        ),
        (
            ["parallel=hybrid", "network.machines=2"],
            "network.machines=2: only applies to network=emulated",
        ),
        (
            ["parallel=hybrid", "network.latency=5ms"],
            "network.latency=5ms: only applies to network=emulated",
        ),
        (
            ["parallel=hybrid", "network.rate=1"],
            "network.rate = 1: must be letters, digits and . _ - only, and begin with a letter or "
            "digit or null",
        ),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_the_reason(
    overrides: list[str], message: str
) -> None:
    assert faults(*overrides) == [message]


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
        ((*SERVED, "network.machines=2"), [0, 1, 0, 0, 1, 0]),
        ((*SERVED, "network.machines=3", "parallel.trainers=3"), [0, 1, 2, 0, 0, 1, 2]),
        ((*EMULATED, "network.machines=2", "parallel.servers=2"), [0, 0, 0, 1, 1, 1, 0, 1]),
        ((*EMULATED, "network.machines=2", "parallel.trainers=3"), [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]),
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
