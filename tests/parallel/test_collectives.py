"""Workers that agree through servers: frames as bytes, in any order."""

from collections import deque
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.compress.gradient.selector import FromLeader, LargestOfAll
from dlrm_hybrid.parallel.collectives import CollectiveServer
from dlrm_hybrid.parallel.dense.client import run_rounds
from dlrm_hybrid.parallel.effects import Port, Program, Send
from dlrm_hybrid.parallel.topology import Topology, lay_out
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse_of

SHAPES = {"a.weight": (20, 9), "a.bias": (20,), "b.weight": (7, 11), "b.bias": (7,)}
STAGE_OF = {name: int(name.startswith("b")) for name in SHAPES}
TRAINERS = 3


def drawn(trainer: int, step: int) -> dict[str, Tensor]:
    rng = np.random.default_rng((trainer, step))
    return {
        name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        for name, shape in SHAPES.items()
    }


@dataclass
class Seat:
    port: Port
    compressor: ErrorFeedback

    def program(self, trainer: int, step: int) -> Program[dict[str, Section]]:
        return rounds(self.port, self.compressor, trainer, step)


def rounds(
    port: Port, compressor: ErrorFeedback, trainer: int, step: int
) -> Program[dict[str, Section]]:
    encoding = compressor.encode(drawn(trainer, step), step)
    sent = yield from run_rounds(port, step, encoding, SpanClock().within(Span.ENCODE))
    return sent.sections()


class World:
    """Two stages of three trainers, and queues between ranks."""

    def __init__(self, servers: int) -> None:
        self.topology = Topology(trainers=TRAINERS, stages=2, servers=servers, interaction_stage=0)
        tensors = lay_out(SHAPES, STAGE_OF, servers)
        self.seats: dict[int, Seat] = {}
        for rank in range(self.topology.num_workers):
            trainer, stage = divmod(rank, 2)
            specs = [Spec(one.id, one.name, one.shape) for one in tensors if one.stage == stage]
            layout = Layout(specs)
            selector = FromLeader(
                inner=LargestOfAll(target_k(layout.size, 0.9)), trainer=trainer, trainers=TRAINERS
            )
            compressor = ErrorFeedback(layout, selector, FeedbackOptions(dtype=Dtype.FLOAT32))
            self.seats[rank] = Seat(self.port(rank, self.post), compressor)
        self.servers = {
            self.topology.server(index): CollectiveServer(
                *(self.topology, index, tensors, (Op.LEADER,), 2)
            )
            for index in range(servers)
        }
        self.links: dict[tuple[int, int], deque[Frame]] = {}

    def port(self, rank: int, send: Send) -> Port:
        return Port(topology=self.topology, rank=rank, attempt=2, transmit=send)

    def post(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        assert dense_equivalent_bytes == 0
        received = decode(encode(frame))
        self.links.setdefault((frame.sender, to), deque()).append(received)

    def step(self, step: int, draw: Random) -> dict[int, dict[str, Section]]:
        """What all workers push, after rounds in any order of arrival."""
        programs = {rank: seat.program(rank // 2, step) for rank, seat in self.seats.items()}
        pushed: dict[int, dict[str, Section]] = {}
        asked: dict[int, Receive] = {}
        ready = dict.fromkeys(programs)
        while programs:
            moves = [("go", rank) for rank in ready] + [
                ("arrive", link) for link, queue in self.links.items() if queue
            ]
            assert moves, f"deadlock: {asked}"
            move, where = draw.choice(moves)
            if move == "go":
                try:
                    asked[where] = programs[where].send(ready.pop(where))
                except StopIteration as end:
                    pushed[where] = end.value
                    del programs[where]
                continue
            frame = self.links[where].popleft()
            if where[1] in self.servers:
                for outgoing in self.servers[where[1]].handle(frame):
                    self.post(*outgoing)
            else:
                effect = asked.pop(where[1])
                assert (frame.kind, frame.sender) == (effect.kind, effect.sender)
                assert (frame.number, frame.round) == (effect.number, effect.round)
                ready[where[1]] = frame
        return dict(sorted(pushed.items()))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_workers_of_a_stage_send_the_same_elements_whatever_the_order(servers: int) -> None:
    draw, seen = Random(servers), []
    for world in (World(servers), World(servers)):
        pushed = [world.step(step, draw) for step in range(5, 9)]
        for sections in pushed:
            chosen = {
                rank: [sparse_of(one).indices_K.tolist() for one in held.values()]
                for rank, held in sections.items()
            }
            assert chosen[0] == chosen[2] == chosen[4] != chosen[1] == chosen[3] == chosen[5]
            assert sum(map(len, chosen[0])) == 20
            assert sum(map(len, chosen[1])) == 9
        seen.append(
            [
                {rank: [bytes(one.payload) for one in held.values()] for rank, held in one.items()}
                for one in pushed
            ]
        )
    assert seen[0] == seen[1]


def contribution(world: World, rank: int) -> Frame:
    """Of step 0, as it is sent."""
    sent: list[Frame] = []
    port = world.port(rank, lambda _to, frame, _bytes: sent.append(frame))
    next(rounds(port, world.seats[rank].compressor, rank // 2, 0))
    return sent[0]


def test_contributions_of_another_attempt_or_stage_are_refused() -> None:
    world = World(2)
    frame = contribution(world, 0)
    with pytest.raises(DlrmError, match="rank 0 to push 0: of attempt 1, expected 2"):
        world.servers[6].handle(replace(frame, attempt=1))
    with pytest.raises(DlrmError, match="rank 0 to push 0, round 0: the stage of that rank"):
        world.servers[7].handle(frame)


def test_broken_contributions_and_results_name_stage_push_and_round() -> None:
    world = World(1)
    nothing = (dense(0, np.zeros(3, np.uint8)),) * 2
    for rank in (2, 4):
        assert world.servers[6].handle(contribution(world, rank)) == []
    with pytest.raises(DlrmError, match="contributions of stage 0 to push 0, round 0: tensor 0"):
        world.servers[6].handle(replace(contribution(world, 0), sections=nothing))
    program = world.seats[3].program(1, 0)
    effect = next(program)
    assert effect == Receive(Kind.RESULT, 6, 0)
    with pytest.raises(
        DlrmError, match=r"worker-1.1 \(rank 3\): result of rank 6 for push 0, round 0: tensor"
    ):
        program.send(replace(contribution(world, 1), sections=nothing))
