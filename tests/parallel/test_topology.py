import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.topology import (
    ServerRole,
    TableServerRole,
    Topology,
    WorkerRole,
    lay_out,
    place,
)
from dlrm_hybrid.types import ConfigError


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    trainers = draw(st.integers(1, 6))
    stages = draw(st.integers(1, 8))
    return Topology(
        trainers=trainers,
        stages=stages,
        servers=draw(st.integers(0 if trainers == 1 else 1, 5)),
        interaction_stage=draw(st.integers(0, stages - 1)),
        table_servers=draw(st.integers(0, 3)),
    )


@given(topologies())
def test_every_rank_has_one_role_and_one_name(topology: Topology):
    ranks = range(topology.size)
    roles = [topology.role(rank) for rank in ranks]
    assert len(set(roles)) == len({topology.name(rank) for rank in ranks}) == topology.size
    for rank, role in zip(ranks, roles, strict=True):
        match role:
            case WorkerRole(trainer, stage):
                assert topology.worker(trainer, stage) == rank < topology.num_workers
            case ServerRole(index):
                assert topology.server(index) == rank >= topology.num_workers
            case TableServerRole(index):
                assert topology.table_server(index) == rank
                assert rank >= topology.num_workers + topology.servers


@given(topologies())
def test_groups_hold_every_rank_once_in_trainer_order(topology: Topology):
    groups = [topology.stage_group(stage) for stage in range(topology.stages)]
    ranks = [*(rank for group in groups for rank in group), *topology.server_group]
    ranks += topology.table_server_group
    assert sorted(ranks) == list(range(topology.size))
    for stage, group in enumerate(groups):
        roles = [WorkerRole(trainer, stage) for trainer in range(topology.trainers)]
        assert [topology.role(rank) for rank in group] == roles
    assert topology.interaction_group == groups[topology.interaction_stage]


def test_the_default_layout():
    topology = Topology(trainers=2, stages=3, servers=1, interaction_stage=1)
    names = [topology.name(rank) for rank in range(topology.size)]
    assert names == [
        *("worker-0.0", "worker-0.1", "worker-0.2"),
        *("worker-1.0", "worker-1.1", "worker-1.2"),
        "server-0",
    ]
    assert topology.interaction_group == (1, 4)
    with pytest.raises(ValueError, match="no rank 7"):
        topology.role(7)
    with pytest.raises(ValueError, match="no table server 0"):
        topology.table_server(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainers": 0, "servers": 1}, "parallel.trainers: 0"),
        ({"stages": 0}, "parallel.cuts: 0"),
        ({"stages": 2, "interaction_stage": 2}, "parallel.cuts: the interaction"),
        ({"servers": -1}, "parallel.servers: -1"),
        ({"table_servers": -1}, "parallel.table_servers: -1 must be at least 0"),
    ],
)
def test_impossible_counts_are_refused(changes: dict[str, int], message: str):
    one = {"trainers": 1, "stages": 1, "servers": 0, "interaction_stage": 0}
    with pytest.raises(ConfigError, match=message):
        Topology(**one | changes)


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 1000), min_size=1), st.data()
)
def test_tensors_are_placed_once_and_in_balance(sizes_bytes: dict[str, int], data: st.DataObject):
    servers = data.draw(st.integers(1, len(sizes_bytes)))
    owner = place(sizes_bytes, servers)
    assert list(owner) == list(sizes_bytes)
    loads = [0] * servers
    for name, server in owner.items():
        loads[server] += sizes_bytes[name]
    assert min(loads) > 0
    assert max(loads) - min(loads) <= max(sizes_bytes.values())
    backwards = dict(reversed(sizes_bytes.items()))
    assert place(backwards, servers) == owner
    assert place({"c": 4, "a": 4, "b": 4, "d": 9}, 2) == {"d": 0, "a": 1, "b": 1, "c": 1}
    for wrong in (0, len(sizes_bytes) + 1):
        with pytest.raises(ConfigError, match=rf"parallel\.servers: {wrong} servers for"):
            place(sizes_bytes, wrong)


def test_a_layout_numbers_tensors_in_the_order_of_the_model():
    shapes = {"bottom.1.weight": (4, 3), "bottom.1.bias": (4,), "top.1.weight": (5, 4)}
    stage_of = {"bottom.1.weight": 0, "bottom.1.bias": 0, "top.1.weight": 1}
    tensors = lay_out(shapes, stage_of, 2)
    assert [(one.id, one.name, one.stage, one.server) for one in tensors] == [
        (0, "bottom.1.weight", 0, 1),
        (1, "bottom.1.bias", 0, 1),
        (2, "top.1.weight", 1, 0),
    ]
    assert [one.num_bytes for one in tensors] == [48, 16, 80]
    assert {one.server for one in lay_out(shapes, stage_of, 0)} == {0}
