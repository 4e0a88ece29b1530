"""Simulates a planned world: a few of its trainers with all servers, in simulated time.

Workers run the real training step (`parallel.step`), servers the real sync policies and orders of
table updates, with costs in place of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.step import train_step
from dlrm_hybrid.parallel.sync import AtLeast, Average, BucketState, Pull, Push
from dlrm_hybrid.parallel.tables.order import (
    Apply,
    ArrivalOrder,
    BatchOf,
    BatchOrder,
    SendRows,
    TableOrder,
)
from dlrm_hybrid.parallel.topology import ServerRole, WorkerRole
from dlrm_hybrid.plan.costs import UnitCosts, compute_seconds
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.machine import ANY, NOW, Hosts, Machine, Rank, Simulated
from dlrm_hybrid.rng import fold
from dlrm_hybrid.run.assembly.build import pipeline, policy
from dlrm_hybrid.types import BatchNumber, Tick, Version
from dlrm_hybrid.wire.frame import Kind

MOST_TRAINERS = 4  # most trainers that are simulated; in larger worlds each stands for several
MOST_PLACED = 16  # the same with servers beside trainers, where no trainer is like another
STEPS, WARMUP_SHARE = 9, 1 / 3
JITTER, JITTER_STEPS = 0.25, 1 << 20  # of a step's time, unless trainers wait; assumed
FORWARD_SHARE = 0.36
"""Forward's share of the time of forward and backward: one of three products, and more. Assumed."""
TENSOR: Any = "a tensor"  # in place of every tensor
RESULT: Any = SimpleNamespace(
    loss_sum=0.0, correct=0, rows=0, gradients=TENSOR, pooled_gradient_BFD=TENSOR
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a simulation.

    Attributes:
        samples_per_second: speed of all trainers together, after warm-up.
        uses: shares of the time in which each resource is busy: `cores` of the busiest machine,
            `link of`, `thread of` and `network thread of` ranks. A link is busy if one direction
            is; it has the name of the first rank on it.
        cold_seconds: CPU seconds in a step of each rank's main thread that are due to cold caches.
    """

    samples_per_second: float
    uses: Mapping[str, float]
    cold_seconds: Sequence[float]


def simulated(config: Config) -> Config:
    """Configure a world with only as many of its trainers as are simulated."""
    most = MOST_TRAINERS if config.parallel.machines is None else MOST_PLACED
    few = min(config.parallel.trainers, most)
    return replace(config, parallel=config.parallel.having(trainers=few))


def simulate(world: Layout, units: UnitCosts, hosts: Hosts) -> Outcome:
    """Simulate some steps of a world; if it has many trainers, each one stands for several."""
    few = simulated(world.config)
    crowd = world.topology.trainers / few.parallel.trainers
    simulation = _Simulation(replace(world, config=few), units, hosts, crowd)
    machine, topology = simulation.machine, simulation.world.topology
    machine.run([simulation.program(rank) for rank in machine.ranks], topology.num_workers)
    steps, now = simulation.steps - simulation.skipped, machine.clock.now
    times = [simulation.seconds[rank] / steps for rank in topology.interaction_group]
    first = {host: rank for rank, host in reversed(list(enumerate(hosts.host)))}
    uses = {f"link of {topology.name(first[host])}": machine.links.use(host) for host in first}
    for rank in machine.ranks:
        name = topology.name(rank.rank)
        uses[f"thread of {name}"] = rank.busy_seconds / now
        uses[f"network thread of {name}"] = rank.carried_seconds / now
    # On a shared machine, trainers that are not simulated take as much as those that are.
    shared = crowd if len(set(hosts.machine)) == 1 else 1.0
    cores = dict.fromkeys(hosts.machine, 0.0)
    for rank, of in zip(machine.ranks, hosts.machine, strict=True):
        copies = shared if rank.rank < topology.num_workers else 1.0
        cores[of] += copies * (rank.busy_seconds + rank.carried_seconds) / now / hosts.cores
    uses["cores"] = min(1.0, max(cores.values()))
    return Outcome(
        samples_per_second=crowd * sum(few.train.batch_size / seconds for seconds in times),
        uses=uses,
        cold_seconds=[rank.cold_seconds / simulation.steps for rank in machine.ranks],
    )


class _Simulation:
    """Makes the programs of all ranks."""

    def __init__(self, world: Layout, units: UnitCosts, hosts: Hosts, crowd: float) -> None:
        config = world.config
        self.world, self.units, self.crowd = world, units, crowd
        self.machine = Machine(hosts, units, world.topology.all_servers, crowd)
        self.policy = policy(config)
        self.pipeline = pipeline(config)
        ahead = config.sync.staleness + config.embedding.staleness + self.pipeline.most_in_flight
        self.steps, self.skipped = STEPS + 2 * ahead, int(STEPS * WARMUP_SHARE) + ahead
        self.seconds: dict[int, float] = {}  # by worker, of the steps that are not skipped

    def program(self, rank: Rank) -> Simulated:
        role, config = self.world.topology.role(rank.rank), self.world.config
        if isinstance(role, WorkerRole):
            return self._train(rank, role)
        if isinstance(role, ServerRole):
            return self._serve(rank, role.index)
        if server_leads(config):
            return self._serve_tables(rank, ArrivalOrder(config.parallel.threads))
        return self._serve_tables(rank, BatchOrder(config.embedding.staleness))

    def _train(self, rank: Rank, role: WorkerRole) -> Simulated:
        first, worker = 0.0, _Worker(self, rank, role.stage)
        stand_in: Any = worker  # has all that a step reads of a worker and of a batch
        for step in range(self.steps):
            if step == self.skipped:
                first = yield NOW
            worker.pace = self._jitter(role, step)
            rank.work(self.units.loop * worker.pace)
            yield from train_step(stand_in, Tick(step), stand_in)
        self.seconds[rank.rank] = (yield NOW) - first

    def _jitter(self, role: WorkerRole, step: int) -> float:
        """Random factor on the time of a step if trainers do not wait for each other.

        Equal trainers would stay in lockstep: all would push at once, and then all pull.
        """
        if self.policy.shares_versions:
            return 1.0
        drawn = fold(0, "plan", role.trainer, step) % JITTER_STEPS / JITTER_STEPS
        return 1 + JITTER * (2 * drawn - 1)

    def _serve(self, rank: Rank, server: int) -> Simulated:
        """Take pushes and contributions as they arrive, and publish versions by the policy."""
        world, topology = self.world, self.world.topology
        states: dict[int, BucketState] = {}
        for stage in range(topology.stages):
            group = topology.stage_group(stage)
            states[stage] = self.policy.bucket(group, 0)
            for worker in () if self.policy.shares_versions else group:
                states[stage] = states[stage].on_pull(Pull(worker, 0))
        contributed: dict[tuple[int, int, int], int] = defaultdict(int)
        while True:
            kind, sender, number, _, round_, _ = yield ANY
            stage = sender % topology.stages
            if kind is Kind.PUSH:
                rank.work(self.units.server_decode * world.elements(stage, server))
                states[stage], actions = states[stage].on_push(Push(sender, number))
                self._publish(rank, stage, server, actions)
                continue
            contributed[stage, number, round_] += 1
            if contributed[stage, number, round_] == topology.trainers:
                size = world.size(Kind.RESULT, stage, server, round_)
                for worker in topology.stage_group(stage):
                    rank.send(worker, Receive(Kind.RESULT, rank.rank, number, round=round_), size)

    def _publish(self, rank: Rank, stage: int, server: int, actions: Sequence[Any]) -> None:
        elements = self.world.elements(stage, server)
        for action in actions:
            if isinstance(action, Average):
                rank.work(self.units.server_apply * elements * len(action.pushes))
                continue
            # A version that all trainers share is encoded only once.
            times = 1 / rank.copies if self.policy.shares_versions else 1.0
            rank.work(times * self.units.server_encode * elements)
            for worker in action.to:
                size = self.world.size(Kind.PARAMETERS, stage, server)
                rank.send(worker, Receive(Kind.PARAMETERS, rank.rank, action.version), size)

    def _serve_tables(self, rank: Rank, order: TableOrder) -> Simulated:
        """Answer lookups and apply updates in the order of the tables."""
        config, topology = self.world.config, self.world.topology
        seconds = self.units.serve * config.train.batch_size / topology.table_servers
        size = self.world.size(Kind.ROWS, topology.interaction_stage)
        group, state = topology.interaction_group, order.begin(topology.trainers, Version(0))
        while True:
            kind, sender, number, *_ = yield ANY
            of = BatchOf(group.index(sender), BatchNumber(number))
            state, actions = state.on_update(of) if kind is Kind.UPDATE else state.on_question(of)
            for action in actions:
                if isinstance(action, Apply):
                    rank.work(seconds * len(action.updates))
                elif isinstance(action, SendRows):
                    for question in action.questions:
                        assert isinstance(question, BatchOf)
                        rank.work(seconds)
                        rows = Receive(Kind.ROWS, rank.rank, question.batch)
                        rank.send(group[question.trainer], rows, size)


class _Worker:
    """Stands for the worker, and the batches it reads, in `train_step`; it has costs only."""

    def __init__(self, simulation: _Simulation, rank: Rank, stage: int) -> None:
        world, units, self._rank = simulation.world, simulation.units, rank
        config, topology = world.config, world.topology
        self.pipeline, self._policy = simulation.pipeline, simulation.policy
        self.part, self.microbatches = world.partition.stages[stage], self.pipeline.microbatches
        self.coming = [TENSOR] * config.embedding.staleness
        self.stage: Any = self
        self.boundaries = self.client = self.columns = self.embedding_schedule = self
        self.tables = self if self.part.has_interaction else None
        self.pace = 1.0
        self._world, self._units = world, units
        self._compute = compute_seconds(units, world, stage) / self.microbatches
        self._exchanged = world.exchange if topology.trainers > 1 else ()
        self._others = [other for other in topology.interaction_group if other != rank.rank]
        self._all_others = topology.trainers * simulation.crowd - 1
        self._table_servers = topology.table_server_group
        unit = units.own_lookup if topology.trainers == 1 else units.lookup
        self._lookups = config.train.batch_size * (units.ask if self._table_servers else unit)
        owners = enumerate(topology.server_group)
        sizes = {owner: world.size(Kind.PUSH, stage, index) for index, owner in owners}
        self._pushes = {owner: size for owner, size in sizes.items() if size}
        self._rounds = sorted(way for way in world.sent if way[:2] == (Kind.CONTRIBUTION, stage))
        self._applied = dict.fromkeys(self._pushes, 0)
        has_peers = topology.trainers > 1 and not topology.servers
        group = topology.stage_group(stage) if has_peers else ()
        self._peers = [other for other in group if other != rank.rank]
        self._pushed, self._asked = 0, -1
        self._flying: set[int] = set()
        self._graphs: set[tuple[int, int]] = set()

    def __contains__(self, batch: int) -> bool:
        return batch in self._flying

    def begin(self, batch: int, inputs: Any) -> None:
        self._flying.add(batch)

    def bags(self, batch: int) -> Any:
        return TENSOR

    def by_table(self, tensor: Any) -> Any:
        return tensor

    by_column = gradients = by_table

    def take_rows(self, batch: int, pooled: Any) -> None:
        pass

    def rows(self, batch: int) -> int:
        return 1

    def forward(self, batch: int, microbatch: int, received: Any) -> Any:
        self._rank.work(self.pace * self._compute * FORWARD_SHARE)
        self._graphs.add((batch, microbatch))
        return TENSOR

    def backward(self, batch: int, microbatch: int, received: Any) -> Any:
        if (batch, microbatch) not in self._graphs:
            self.forward(batch, microbatch, received)  # recomputed from the stage's inputs
        self._graphs.discard((batch, microbatch))
        self._rank.work(self.pace * self._compute * (1 - FORWARD_SHARE))
        return TENSOR

    def drop_graphs(self) -> None:
        self._graphs.clear()

    def finish(self, batch: int) -> Any:
        self._flying.remove(batch)
        return RESULT

    def receive_activations(self, batch: int, microbatch: int, rows: int) -> Program[Any]:
        return self._receive(Kind.ACTIVATION, -1, batch, microbatch)

    def receive_gradient(self, batch: int, microbatch: int, rows: int) -> Program[Any]:
        return self._receive(Kind.ACTIVATION_GRADIENT, +1, batch, microbatch)

    def send_activations(self, left_bM: Any, batch: int, microbatch: int) -> None:  # noqa: N803
        self._send(Kind.ACTIVATION, +1, batch, microbatch)

    def send_gradient(self, gradient_bN: Any, batch: int, microbatch: int) -> None:  # noqa: N803
        self._send(Kind.ACTIVATION_GRADIENT, -1, batch, microbatch)

    def _cut(self, side: int) -> tuple[int, float]:
        """Boundary to a neighbour, and the elements that pass it; 0 without a neighbour."""
        cut, stages = self.part.index + min(side, 0), self._world.partition.stages
        if not 0 <= cut < len(stages) - 1:
            return cut, 0.0
        rows = self._world.config.train.batch_size / self.microbatches
        return cut, rows * stages[cut].output_width

    def _receive(self, kind: Kind, side: int, batch: int, microbatch: int) -> Program[Any]:
        cut, elements = self._cut(side)
        if elements:
            sender = self._rank.rank + side
            yield Receive(kind, sender, batch, boundary=cut, microbatch=microbatch)
            self._rank.work(self._units.decode_activation * elements)
        return TENSOR

    def _send(self, kind: Kind, side: int, batch: int, microbatch: int) -> None:
        cut, elements = self._cut(side)
        if elements:
            self._rank.work(self._units.encode_activation * elements)
            what = Receive(kind, self._rank.rank, batch, boundary=cut, microbatch=microbatch)
            size = self._world.size(kind, self.part.index, number=cut)
            self._rank.send(self._rank.rank + side, what, size)

    def lr(self, step: int) -> float:
        return 0.0

    def prefetch(self, batch: int, bags: Any) -> None:
        if self._table_servers and batch > self._asked:
            self._asked = batch
            self._ask(Kind.LOOKUP, batch)

    def lookup(self, batch: int, bags: Any, lr: float) -> Program[Any]:
        phases = self._exchanged[:-1]
        for server in self._table_servers:
            yield Receive(Kind.ROWS, server, batch)
        if not phases:
            self._rank.work(self._lookups / (3 if self._table_servers else 2))
        for phase, size in enumerate(phases):
            self._rank.work(self._lookups / 2 / len(phases))
            yield from self._exchange(batch, phase, size)
        return TENSOR

    def update(self, batch: int, gradient_BFD: Any) -> Program[None]:  # noqa: N803
        for size in self._exchanged[-1:]:
            yield from self._exchange(batch, len(self._exchanged), size)
        if self._table_servers:
            self._ask(Kind.UPDATE, batch)
        else:
            self._rank.work(self._lookups / 2)

    def _ask(self, kind: Kind, batch: int) -> None:
        self._rank.work(self._lookups / 3)
        for index, server in enumerate(self._table_servers):
            size = self._world.size(kind, self.part.index, index)
            self._rank.send(server, Receive(kind, self._rank.rank, batch), size)

    def _exchange(self, batch: int, phase: int, size: float) -> Simulated:
        """An all-to-all: each sends at once, and waits for the rows of all others.

        Main threads do it, in the time of their lookups.
        """
        rows = Receive(Kind.LOOKUP, self._rank.rank, batch, round=phase)
        for other in self._others:
            self._rank.send(other, rows, size * self._all_others / len(self._others), 0.0)
        for other in self._others:
            yield rows._replace(sender=other)

    def pull(self) -> Program[None]:
        if self._peers and self._pushed:
            yield from self._apply_pushes()
        needs, each = self._policy.needs(self._pushed), 1 / max(len(self._pushes), 1)
        seconds = each * self._units.take_version * self._world.elements(self.part.index)
        for owner in self._pushes:
            while True:
                waits, version = self._applied[owner] < needs.version, self._applied[owner] + 1
                if not waits and not isinstance(needs, AtLeast):
                    break
                if (yield Receive(Kind.PARAMETERS, owner, version, waits=waits)) is None:
                    break
                self._rank.work(seconds)
                self._applied[owner] = version

    def _apply_pushes(self) -> Program[None]:
        """Decode the last pushes of all other trainers, and update masters of its own."""
        units, elements = self._units, self._world.elements(self.part.index)
        for peer in self._peers:
            yield Receive(Kind.PUSH, peer, self._pushed - 1)
            self._rank.work(self._all_others / len(self._peers) * units.server_decode * elements)
        self._rank.work((self._all_others + 1) * units.server_apply * elements)

    def push(self, gradients: Any) -> Program[None]:
        units, elements = self._units, self._world.elements(self.part.index)
        encode = units.encode_gradient * elements / (len(self._rounds) + 1)
        for way in self._rounds:
            self._rank.work(encode)
            server, size = self._world.topology.server(way.server), self._world.sent[way].num_bytes
            result = Receive(Kind.RESULT, server, self._pushed, round=way.number)
            mine = result._replace(kind=Kind.CONTRIBUTION, sender=self._rank.rank)
            self._rank.send(server, mine, size)
            yield result
        self._rank.work(encode if self._pushes or self._peers else units.update * elements)
        for peer in self._peers:
            times = self._all_others / len(self._peers)
            size = times * self._world.size(Kind.PUSH, self.part.index)
            self._rank.send(peer, Receive(Kind.PUSH, self._rank.rank, self._pushed), size, times)
        for owner, size in self._pushes.items():
            self._rank.send(owner, Receive(Kind.PUSH, self._rank.rank, self._pushed), size)
        self._pushed += 1
