"""Servers: what they answer and when, what they save, refuse, and how long they stay."""

from dataclasses import replace

import pytest
import torch
from server_world import SHAPES, World, assert_same, drawn, gradients_of, travel

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.model.optimizer import Momentum
from dlrm_hybrid.parallel.dense.server import ParameterServer, serve
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import DataError, DeadlineError, DivergedError, DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind


def test_every_so_many_versions_carry_a_digest():
    world = World(1, Lockstep(), check_every=3)
    checked: list[int] = []
    for step in range(7):
        world.pull(0)
        world.arrive(world.push(0, step))
        (told,) = world.mail
        if len(told.frame.sections) > len(SHAPES):
            checked.append(told.frame.number)
    assert checked == [3, 6]


@pytest.mark.parametrize("policy", [Lockstep(), Lockstep(1), Lockstep(3)], ids=str)
@pytest.mark.parametrize("pause", [0, 2, 5])
def test_a_restarted_world_goes_on_bit_for_bit(policy: SyncPolicy, pause: int):
    optimizer = Momentum(momentum=0.9)
    unbroken = World(2, policy, optimizer=optimizer, servers=2, stages=2)
    unbroken.run(0, pause)
    saved = unbroken.held()
    resumed = World(2, policy, optimizer=optimizer, servers=2, stages=2)
    resumed.restart(pause, saved)
    expected = unbroken.run(pause, pause + 5)
    for found, used in zip(resumed.run(pause, pause + 5), expected, strict=True):
        assert_same(found, used)
    assert not torch.equal(expected[0]["top.1.weight"], expected[4]["top.1.weight"])
    for rank, server in unbroken.servers.items():
        assert_same(resumed.servers[rank].tensors(), server.tensors())
        assert not set(server.tensors()) - set(saved)


def test_a_checkpoint_that_does_not_fit_is_refused():
    world = World(1, Lockstep())
    values = world.servers[1].tensors()
    with pytest.raises(DataError, match="top.1.weight: missing"):
        world.servers[1].restart(3, {k: v for k, v in values.items() if k != "top.1.weight"})
    values["bottom.1.bias"] = torch.zeros(3)
    with pytest.raises(DataError, match=r"bottom.1.bias: \[3\], it must be \[33\]"):
        world.servers[1].restart(3, values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_names_its_trainer(value: float):
    world = World(2, Lockstep())
    world.run(0, 2)
    for rank in (0, 1):
        world.pull(rank)
    world.arrive(world.push(0, 2))
    gradients = gradients_of(1, 2)
    gradients["bottom.1.bias"][7] = value
    with pytest.raises(DivergedError, match=r"step 3: .* bottom.1.bias from worker-1.0 \(rank 1\)"):
        world.arrive(world.push(1, 2, gradients))


def test_answers_go_to_the_trainers_of_the_stage_with_their_dense_size():
    world = World(2, Lockstep(), stages=2)
    pushes = [world.push(rank, 0) for rank in range(4)]
    server = world.servers[4]
    assert server.handle(travel(pushes[0][0])) == []
    assert server.handle(travel(pushes[3][0])) == []
    answers = server.handle(travel(pushes[2][0]))
    assert [(one.to, one.dense_equivalent_bytes) for one in answers] == [(0, 1848), (2, 1848)]
    assert answers[0].frame is answers[1].frame
    assert pushes[0][0].dense_equivalent_bytes == 1848
    assert [section.tensor for section in answers[0].frame.sections[:-1]] == [0, 1]
    answers = server.handle(travel(pushes[1][0]))
    assert [(one.to, one.dense_equivalent_bytes) for one in answers] == [(1, 20), (3, 20)]


def break_sections(frame: Frame) -> Frame:
    return replace(frame, sections=frame.sections[:-1])


def break_type(frame: Frame) -> Frame:
    first = frame.sections[0]._replace(dtype=type(frame.sections[0].dtype).INT32)
    return replace(frame, sections=(first, *frame.sections[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: replace(frame, number=1), "push 1 of rank 0: too early"),
        (lambda frame: replace(frame, sender=5), "push 0 of nobody .rank 5.: .* owns nothing"),
        (lambda frame: replace(frame, attempt=2), r"push 0 of worker-0.0 \(rank 0\): .* attempt 2"),
        (lambda frame: replace(frame, kind=Kind.HELLO), "HELLO of attempt 0, expected PUSH"),
        (break_sections, r"push 0 of worker-0.0 \(rank 0\): holds tensors"),
        (break_type, r"push 0 of worker-0.0 \(rank 0\): tensor 0: .* DENSE int32"),
    ],
)
def test_frames_that_do_not_fit_are_refused(change, message: str):
    world = World(1, Lockstep())
    (push,) = world.push(0, 0)
    with pytest.raises(DlrmError, match=message):
        world.servers[1].handle(change(push.frame))


def test_a_server_owns_its_memory():
    values = drawn(0)
    world = World(1, Lockstep())
    server = ParameterServer(world.topology, 0, world.tensors, values, world.options(), SpanClock())
    before = server.digest(0)
    values["bottom.1.bias"].zero_()
    assert server.digest(0) == before == world.clients[0].digest(1)


def test_a_server_has_made_a_version_once_all_of_its_stages_have():
    world = World(1, Lockstep(), stages=2)
    server = world.servers[2]

    def made() -> list[bool]:
        asked = ({}, {"stage": 0}, {"stage": 1}, {"pushed": [1, 0]})
        return [server.has_made(1, request) for request in asked]

    assert server.has_made(0, {})
    assert made() == [False, False, False, False]
    world.arrive(world.push(0, 0))
    assert made() == [False, True, False, True]
    world.arrive(world.push(1, 0))
    assert made() == [True, True, True, True]


def goodbye(rank: int, ticks: int) -> Frame:
    return Frame(kind=Kind.GOODBYE, sender=rank, attempt=0, number=ticks)


def test_the_service_answers_until_the_last_goodbye():
    world = World(2, Lockstep())
    first, second, channel = in_process_channels(3)
    for worker in (first, second):
        for push in world.push(worker.rank, 0):
            worker.send(*push)
    second.send(2, goodbye(1, 1), 0)
    first.send(2, goodbye(0, 1), 0)
    serve(channel, {Kind.PUSH: world.servers[2].handle}, {0, 1}, 7.0)
    for worker in (first, second):
        world.clients[worker.rank].apply(worker.receive(0.0))
    assert_same(world.replicas[0], world.servers[2].tensors())
    assert_same(world.replicas[1], world.servers[2].tensors())
    with pytest.raises(DeadlineError):
        channel.receive(0.0)


def test_the_service_does_not_wait_for_ranks_that_are_away():
    first, second, channel = in_process_channels(3)
    asked: list[int] = []

    def answer(frame: Frame) -> list[Outgoing]:
        asked.append(frame.sender)
        return []

    first.send(2, goodbye(0, 1), 0)
    assert serve(channel, {Kind.PULL: answer}, {0, 1}, 7.0, away=[1]) == 1
    # One that has come again by then says goodbye as any other.
    second.send(2, Frame(kind=Kind.PULL, sender=1, attempt=0, number=0), 0)
    first.send(2, goodbye(0, 1), 0)
    second.send(2, goodbye(1, 3), 0)
    assert serve(channel, {Kind.PULL: answer}, {0, 1}, 7.0, away=[1]) == 3
    assert asked == [1]


def test_frames_after_a_goodbye_are_refused():
    world = World(2, Lockstep())
    _, second, channel = in_process_channels(3)
    second.send(2, goodbye(1, 0), 0)
    second.send(*world.push(1, 0)[0])
    with pytest.raises(DlrmError, match="PUSH 0 of rank 1, which has said goodbye"):
        serve(channel, {Kind.PUSH: world.servers[2].handle}, {0, 1}, 7.0)
