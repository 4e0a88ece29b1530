"""Clients of servers, and those that have none: what they push, wait for, take and refuse."""

from dataclasses import replace

import pytest
import torch
from server_world import SHAPES, World, drawn, gradients_of, pushed

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.model.optimizer import Constant, Momentum, init_state
from dlrm_hybrid.parallel.dense.client import Client, LocalClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind

WEIGHT, BIAS = "bottom.1.weight", "bottom.1.bias"
SENT: list[Outgoing] = []


def world_of(policy: SyncPolicy) -> World:
    """A trainer of two stages; ranks 2 and 3 are servers of the weight and of all else."""
    return World(1, policy, servers=2, stages=2, check_every=2)


def received(sender: int, version: int) -> Receive:
    return Receive(Kind.PARAMETERS, sender=sender, number=version)


def first_version(world: World) -> Frame:
    """Of the weight."""
    world.arrive(world.push(0, 0))
    return next(one.frame for one in world.mail if one.frame.sender == 2)


def test_a_worker_pushes_to_each_server_what_it_owns_of_its_stage():
    pushes = world_of(Lockstep()).push(0, 0)
    assert [(one.to, one.dense_equivalent_bytes) for one in pushes] == [(2, 1716), (3, 132)]
    assert [[one.tensor for one in push.frame.sections] for push in pushes] == [[0], [1]]
    heads = {(one.frame.kind, one.frame.sender, one.frame.number) for one in pushes}
    assert heads == {(Kind.PUSH, 0, 0)}


def test_wanted_are_the_versions_still_to_come():
    world = world_of(Lockstep())
    client = world.clients[0]
    assert client.wanted() == []
    version = first_version(world)
    assert client.wanted() == [received(2, 1), received(3, 1)]
    with pytest.raises(
        DlrmError, match="push 1 with versions {2: 0, 3: 0} by server rank; it needs version 1"
    ):
        world.push(0, 1)
    client.apply(version)
    assert client.wanted() == [received(3, 1)]
    bounded = world_of(Lockstep(2))
    for step in range(2):
        bounded.push(0, step)
        assert bounded.clients[0].wanted() == []
    bounded.push(0, 2)
    assert bounded.clients[0].wanted() == [received(2, 1), received(3, 1)]


def test_versions_are_written_into_the_parameters_in_place():
    world = world_of(Lockstep())
    replica = world.replicas[0]
    address = replica[WEIGHT].data_ptr()
    world.clients[0].apply(first_version(world))
    assert replica[WEIGHT].data_ptr() == address
    torch.testing.assert_close(
        replica[WEIGHT], drawn(0)[WEIGHT] - 0.1 * gradients_of(0, 0)[WEIGHT], rtol=0, atol=1e-6
    )
    assert torch.equal(replica[BIAS], drawn(0)[BIAS])


def test_a_replica_unlike_the_published_copy_stops_the_run():
    world = world_of(Lockstep())
    world.run(0, 2)
    second = next(one.frame for one in world.mail if one.frame.sender == 2)
    assert (second.number, len(second.sections)) == (2, 2)
    changed = dense(0, drawn(9)[WEIGHT].numpy())
    with pytest.raises(
        DlrmError, match=r"worker-0.0 \(rank 0\): stage 0 differs from what server-0 .* version 2"
    ):
        world.clients[0].apply(replace(second, sections=(changed, second.sections[1])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 2}, "version 1 of attempt 0 is due"),
        ({"number": 0}, "version 1 of attempt 0 is due"),
        ({"attempt": 1}, "attempt 1: version 1 of attempt 0 is due"),
        ({"sender": 1}, "PARAMETERS 1 of rank 1: not a version of anything of stage 0"),
        ({"kind": Kind.PUSH}, "PUSH 1 of rank 2: not a version"),
        ({"sections": ()}, r"holds tensors and sizes \[\], expected \[\(0, 429\)\]"),
    ],
)
def test_other_frames_are_refused(changes: dict[str, object], message: str):
    world = world_of(Lockstep())
    frame = replace(first_version(world), **changes)
    with pytest.raises(DlrmError, match=message):
        world.clients[0].apply(frame)


def test_a_local_client_is_the_plain_optimizer_and_resumes():
    optimizer = Momentum(momentum=0.9)
    config = OptimizerConfig(optimizer=optimizer, schedule=Constant(base_lr=0.5))
    weights, mine = drawn(0), {k: torch.nn.Parameter(v) for k, v in drawn(0).items()}
    state = init_state(optimizer, weights)
    client: Client = LocalClient(mine, config, SpanClock())
    for step in range(5):
        gradients = gradients_of(0, step)
        assert pushed(client, SENT, gradients) == []
        assert list(client.pull()) == []
        for name, weight in weights.items():
            optimizer.apply(weight, gradients[name], state[name], 0.5)
    for name, weight in weights.items():
        assert torch.equal(weight, mine[name])
        assert (weight - drawn(0)[name]).abs().max() > 0.1
    other = LocalClient(drawn(7), config, SpanClock())
    other.restart(5, client.tensors())
    for resumed in (client, other):
        pushed(resumed, SENT, gradients_of(0, 5))
    assert set(client.tensors()) == {*SHAPES, *(f"{name}.momentum" for name in SHAPES)}
    for name, tensor in client.tensors().items():
        assert torch.equal(tensor, other.tensors()[name])
