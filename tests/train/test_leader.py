"""A server that leads: workers that do its orders at any speed, leave, and are killed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_SECONDS

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.data.loader import START, LoaderState
from dlrm_hybrid.model.optimizer import Constant, Sgd
from dlrm_hybrid.parallel.dense.bucket import ServerOptions
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.server import HandlerTable, ParameterServer
from dlrm_hybrid.parallel.messages import Messenger, message, values_of
from dlrm_hybrid.parallel.policies import Rounds
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.train.asynchronous.leader import LeaderRank
from dlrm_hybrid.train.asynchronous.leases import InTurns, OwnPace
from dlrm_hybrid.train.progress import Plan, Progress
from dlrm_hybrid.train.signals import PREEMPTION, StopRequest
from dlrm_hybrid.wire.frame import Frame, Kind

STAGES, ROWS = 2, 10
Rule = OwnPace | InTurns


@dataclass
class Worker:
    """One that does orders, and what is on its way from it to the leader."""

    incarnation: int = 0
    orders: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    mail: deque[Frame] = field(default_factory=deque)
    done: int = 0
    learned: int = 0
    severity: int = 0
    has_gone: bool = False


class Simulation(Channel):
    """The leader's end of a world in which anything may happen next."""

    def __init__(self, trainers: int, strikes: list[tuple[int, int, str]], random: Random) -> None:
        self.topology = Topology(trainers=trainers, stages=STAGES, servers=1, interaction_stage=0)
        self.random = random
        self.strikes = deque(strikes)
        self.workers = [Worker() for _ in range(self.topology.num_workers)]
        self.met: dict[int, int] = {}  # incarnations that the leader has heard of
        self.given: Counter[tuple[int, ...]] = Counter()
        self.ended = 0
        for rank in range(len(self.workers)):
            self.report(rank)

    @property
    def rank(self) -> int:
        return self.topology.server(0)

    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        order = values_of(frame)
        if order["do"] == "learn" and not to % STAGES:
            self.given.update(tuple(batch) for batch in order["batches"])
        worker = self.workers[to]
        if not worker.has_gone and worker.incarnation == self.met[to]:
            worker.orders.append((frame.number, order))

    def receive(self, deadline_seconds: float) -> Frame:
        while True:
            moves = [self.random.choice(found) for found in self.moves() if found]
            assert moves, "all wait for each other"
            come = self.random.choice(moves)()
            if come is not None:
                if come.kind is Kind.REPORT:
                    self.met[come.sender] = values_of(come)["incarnation"]
                return come

    def moves(self) -> list[list[Callable[[], Frame | None]]]:
        every = list(enumerate(self.workers))
        trainers = range(self.topology.trainers)
        gone = [one for one in trainers if all(mate.has_gone for mate in self.mates(one))]
        return [
            [worker.mail.popleft for _, worker in every if worker.mail],
            [lambda rank=rank: self.obey(rank) for rank, worker in every if worker.orders],
            [lambda one=one: self.start(one) for one in gone if self.ended < len(self.workers)],
            [self.strike] * bool(self.strikes and self.random.random() < 0.1),
        ]

    def obey(self, rank: int) -> None:
        worker = self.workers[rank]
        number, order = worker.orders.popleft()
        assert number == worker.done
        if order["do"] == "leave":
            worker.has_gone = True
            self.left(rank, round_=1)
            return
        if order["do"] == "end":
            self.ended += 1
            return
        if order["do"] == "join":
            worker.learned = order["at"]
        if order["do"] == "learn":
            worker.learned += len(order["batches"])
        worker.done += 1
        self.report(rank, len(order.get("batches", ())))

    def report(self, rank: int, batches: int = 0) -> None:
        worker = self.workers[rank]
        told = {
            "learned": worker.learned,
            "interval": asdict(Interval(rows=ROWS * batches * (rank % STAGES))),
            "severity": worker.severity,
            "incarnation": worker.incarnation,
            "writing": False,
        }
        worker.mail.append(message(Kind.REPORT, rank, 0, worker.done, told))

    def left(self, rank: int, round_: int) -> None:
        number = self.workers[rank].incarnation
        gone = Frame(kind=Kind.LEFT, sender=rank, attempt=0, number=number, round=round_)
        self.workers[rank].mail.append(gone)

    def strike(self) -> None:
        trainer, stage, how = self.strikes.popleft()
        if how == "term":
            self.workers[self.topology.worker(trainer, stage)].severity = PREEMPTION
            return
        for mate in range(STAGES):
            rank = self.topology.worker(trainer, mate)
            worker = self.workers[rank]
            if not worker.has_gone:
                for _ in range(self.random.randint(0, len(worker.mail))):
                    worker.mail.pop()
                worker.has_gone = True
                worker.orders.clear()
                self.left(rank, round_=0)

    def mates(self, trainer: int) -> list[Worker]:
        return self.workers[trainer * STAGES : (trainer + 1) * STAGES]

    def start(self, trainer: int) -> None:
        for stage in range(STAGES):
            rank = self.topology.worker(trainer, stage)
            before = self.workers[rank]
            self.workers[rank] = Worker(before.incarnation + 1, mail=before.mail)
            self.report(rank)

    def close(self) -> None:
        raise AssertionError

    def abandon(self) -> None:
        raise AssertionError


def after(at: LoaderState) -> LoaderState:
    return replace(at, block=at.block + 1)


def led(world: Simulation, steps: int, rest_every: int, rule: Rule) -> LeaderRank:
    """Lead to the end of a run."""
    optimizer = OptimizerConfig(optimizer=Sgd(), schedule=Constant(base_lr=0.1))
    policy = Rounds(world.topology.trainers)
    optimizers = [optimizer] * world.topology.stages
    options = ServerOptions(policy=policy, optimizers=optimizers, check_every=1, attempt=0)
    plan = Plan(
        steps=steps,
        samples_per_step=ROWS * world.topology.trainers,
        report_every=0,
        evaluate_every=rest_every,
        checkpoint_every=0,
        checkpoint_minutes=0.0,
    )
    handlers: dict[Kind, Any] = {}
    mailbox = Mailbox(world, 0, 99, HandlerTable(world, handlers))
    leader = LeaderRank(
        topology=world.topology,
        server=ParameterServer(world.topology, 0, (), {}, options, SpanClock()),
        plan=plan,
        after=after,
        schedule=optimizer.schedule,
        rows={},  # nothing is evaluated
        messenger=Messenger(
            attempt=0,
            channel=world,
            mailbox=mailbox,
            patience_seconds=HANG_SECONDS,
            clock=SpanClock(),
        ),
        log=None,
        rule=rule,
        stop=StopRequest(),
        elastic=True,
        missed=lambda rank, incarnation: None,
    )
    handlers |= {Kind.REPORT: leader.report, Kind.LEFT: leader.left}
    progress = Progress()
    rows = 0
    while True:
        progress, _ = leader.meet(progress, plan, leader.stop, is_late=False)
        if progress.step == steps:
            break
        metrics, at = leader.make_step(progress.step, progress.loader)
        rows += metrics.rows
        progress = replace(progress, step=progress.step + 1, loader=at)
    leader.end()
    assert sum(progress.batches) == steps * world.topology.trainers
    assert rows == ROWS * steps * world.topology.trainers
    return leader


def batches(steps: int, trainers: int) -> set[tuple[int, ...]]:
    at, found = START, set[tuple[int, ...]]()
    for _ in range(steps):
        found |= {(at.epoch, at.block, at.row, part) for part in range(trainers)}
        at = after(at)
    return found


RULES: dict[str, Rule] = {"alone": OwnPace(), "ahead": OwnPace(5), "turns": InTurns()}
PLACE = st.integers(0, 2), st.integers(0, STAGES - 1)
# A run takes a fiftieth of a second: a quarter of the examples that the profile asks for.
EXAMPLES = settings.default.max_examples // 4 if settings.default else 12
RANDOM = st.builds(Random, st.integers(0, 2**32 - 1))  # draws of a step cost nothing


@pytest.mark.parametrize("rule", RULES)
@given(strikes=st.lists(st.tuples(*PLACE), max_size=3), random=RANDOM)
@settings(max_examples=EXAMPLES)
def test_each_batch_is_given_out_once_where_trainers_leave(
    rule: str, strikes: list[tuple[int, int]], random: Random
) -> None:
    world = Simulation(3, [(*one, "term") for one in strikes], random)
    leader = led(world, 40, 17, RULES[rule])
    assert world.given == Counter(batches(40, 3))
    assert (leader.trainers.lost, leader.trainers.redone) == (0, 0)
    assert leader.trainers.left <= len(strikes)


@pytest.mark.parametrize("rule", RULES)
@given(
    strikes=st.lists(st.tuples(*PLACE, st.sampled_from(["term", "kill"])), max_size=4),
    random=RANDOM,
)
@settings(max_examples=EXAMPLES)
def test_every_batch_is_given_out_where_trainers_are_killed(
    rule: str, strikes: list[tuple[int, int, str]], random: Random
) -> None:
    world = Simulation(3, strikes, random)
    leader = led(world, 40, 17, RULES[rule])
    assert world.given.keys() == batches(40, 3)
    assert sum(world.given.values()) == 40 * 3 + leader.trainers.redone
    assert leader.trainers.lost <= sum(how == "kill" for *_, how in strikes)
