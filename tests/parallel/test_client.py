from dataclasses import replace

import pytest
import torch
from server_world import pushed
from tiny_world import uncompressed
from torch import Tensor

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.model.optimizer import Constant, Momentum, Sgd, init_state
from dlrm_hybrid.parallel.dense.bucket import ServerOptions
from dlrm_hybrid.parallel.dense.client import Client, LocalClient, ServerClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing, Port
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.parallel.topology import Topology, lay_out
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode

SHAPES = {"bottom.1.weight": (6, 4), "bottom.1.bias": (6,), "top.1.weight": (1, 6)}
STAGE_OF = {"bottom.1.weight": 0, "bottom.1.bias": 0, "top.1.weight": 1}
TOPOLOGY = Topology(trainers=1, stages=2, servers=2, interaction_stage=0)
TENSORS = lay_out(SHAPES, STAGE_OF, 2)
OPTIMIZER = OptimizerConfig(optimizer=Sgd(), schedule=Constant(base_lr=0.5))
WEIGHT_SERVER, BIAS_SERVER = 2, 3
SENT: list[Outgoing] = []


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def client(replica: dict[str, Tensor], policy: SyncPolicy) -> ServerClient:
    return ServerClient(
        Port(topology=TOPOLOGY, rank=0, attempt=1, transmit=transmit),
        *(TENSORS, replica, policy, uncompressed(TENSORS, 0), SpanClock()),
    )


def transmit(to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
    SENT.append(Outgoing(to, frame, dense_equivalent_bytes))


def push(one: Client, gradients: dict[str, Tensor]) -> list[Outgoing]:
    return pushed(one, SENT, gradients)


def versions(steps: int) -> list[Frame]:
    """Frames of server 0 for the first stage: versions 1 to `steps`."""
    options = ServerOptions(
        policy=Lockstep(), optimizers=[OPTIMIZER] * TOPOLOGY.stages, check_every=2, attempt=1
    )
    server = ParameterServer(TOPOLOGY, 0, TENSORS, drawn(0), options, SpanClock())
    pusher = client(drawn(0), Lockstep())
    frames: list[Frame] = []
    for step in range(steps):
        first, _ = push(pusher, drawn(step + 1))
        (answer,) = server.handle(decode(encode(first.frame)))
        frames.append(decode(encode(answer.frame)))
        pusher.apply(frames[-1])
        pusher.apply(
            replace(
                answer.frame,
                sender=BIAS_SERVER,
                sections=(dense(1, drawn(0)["bottom.1.bias"].numpy()),),
            )
        )
    return frames


def test_a_worker_owns_replicas_of_its_stage_only():
    assert [(one.name, one.server) for one in TENSORS] == [
        ("bottom.1.weight", 0),
        ("bottom.1.bias", 1),
        ("top.1.weight", 1),
    ]
    pushes = push(client(drawn(0), Lockstep()), drawn(1))
    assert [(one.to, one.dense_equivalent_bytes) for one in pushes] == [(2, 96), (3, 24)]
    sections = [[section.tensor for section in one.frame.sections] for one in pushes]
    assert sections == [[0], [1]]
    assert all(one.frame.kind is Kind.PUSH for one in pushes)
    assert {(one.frame.sender, one.frame.attempt, one.frame.number) for one in pushes} == {
        (0, 1, 0)
    }


def receive(sender: int, version: int) -> Receive:
    return Receive(Kind.PARAMETERS, sender=sender, number=version)


def test_wanted_are_the_versions_still_to_come():
    sync = client(drawn(0), Lockstep())
    assert sync.wanted() == []
    push(sync, drawn(1))
    assert sync.wanted() == [receive(WEIGHT_SERVER, 1), receive(BIAS_SERVER, 1)]
    sync.apply(versions(1)[0])
    assert sync.wanted() == [receive(BIAS_SERVER, 1)]
    bounded = client(drawn(0), Lockstep(2))
    for _ in range(2):
        push(bounded, drawn(1))
        assert bounded.wanted() == []
    push(bounded, drawn(1))
    assert bounded.wanted() == [receive(WEIGHT_SERVER, 1), receive(BIAS_SERVER, 1)]


def test_versions_are_written_into_the_parameters_in_place():
    replica = drawn(0)
    parameter = torch.nn.Parameter(replica["bottom.1.weight"])
    one = client({**replica, "bottom.1.weight": parameter}, Lockstep())
    address = parameter.data_ptr()
    one.apply(versions(1)[0])
    expected = drawn(0)["bottom.1.weight"] - 0.5 * drawn(1)["bottom.1.weight"]
    assert parameter.data_ptr() == address
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(replica["bottom.1.bias"], drawn(0)["bottom.1.bias"])


def test_a_replica_unlike_the_published_copy_stops_the_run():
    first, second = versions(2)
    assert len(first.sections) == 1
    assert len(second.sections) == 2
    one = client(drawn(0), Lockstep())
    one.apply(first)
    one.apply(second)
    changed = drawn(9)["bottom.1.weight"].numpy()
    other = client(drawn(0), Lockstep())
    other.apply(first)
    with pytest.raises(
        DlrmError, match=r"worker-0.0 \(rank 0\): stage 0 differs from what server-0 .* version 2"
    ):
        other.apply(replace(second, sections=(dense(0, changed), second.sections[1])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 2}, "version 1 of attempt 1 is due"),
        ({"number": 0}, "version 1 of attempt 1 is due"),
        ({"attempt": 0}, "attempt 0: version 1 of attempt 1 is due"),
        ({"sender": 1}, "PARAMETERS 1 of rank 1: not a version of anything of stage 0"),
        ({"kind": Kind.PUSH}, "PUSH 1 of rank 2: not a version"),
        ({"sections": ()}, r"holds tensors and sizes \[\], expected \[\(0, 24\)\]"),
    ],
)
def test_other_frames_are_refused(changes: dict[str, object], message: str):
    frame = replace(versions(1)[0], **changes)
    with pytest.raises(DlrmError, match=message):
        client(drawn(0), Lockstep()).apply(frame)


def test_a_push_with_an_old_version_is_refused():
    one = client(drawn(0), Lockstep())
    push(one, drawn(1))
    with pytest.raises(
        DlrmError, match="push 1 with versions {2: 0, 3: 0} by server rank; it needs version 1"
    ):
        push(one, drawn(1))


def test_a_local_client_is_the_plain_optimizer():
    optimizer = Momentum(momentum=0.9)
    config = OptimizerConfig(optimizer=optimizer, schedule=Constant(base_lr=0.5))
    weights, mine = drawn(0), {k: torch.nn.Parameter(v) for k, v in drawn(0).items()}
    state = init_state(optimizer, weights)
    one: Client = LocalClient(mine, config, SpanClock())
    for step in range(5):
        gradients = drawn(step + 1)
        assert push(one, gradients) == []
        assert list(one.pull()) == []
        for name, weight in weights.items():
            optimizer.apply(weight, gradients[name], state[name], 0.5)
    for name, weight in weights.items():
        assert torch.equal(weight, mine[name])
        assert (weight - drawn(0)[name]).abs().max() > 0.1


def test_a_local_client_resumes():
    config = OptimizerConfig(optimizer=Momentum(momentum=0.9), schedule=Constant(base_lr=0.5))
    one, other = (LocalClient(weights, config, SpanClock()) for weights in (drawn(0), drawn(7)))
    push(one, drawn(1))
    other.restart(1, one.tensors())
    for resumed in (one, other):
        push(resumed, drawn(2))
    assert set(one.tensors()) == {*SHAPES, *(f"{name}.momentum" for name in SHAPES)}
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name])
