"""A planned world from its layout, its frames and the costs of units: how fast it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.parallel.step import StepTables, train_step
from dlrm_hybrid.parallel.tables.arrival import ArrivalOrder
from dlrm_hybrid.parallel.tables.versions import BatchOrder
from dlrm_hybrid.parallel.topology import ServerRole, WorkerRole
from dlrm_hybrid.plan.costs import (
    UnitCosts,
    compute_seconds,
    encode_push_seconds,
    take_version_seconds,
)
from dlrm_hybrid.plan.frames import Frames, frames
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.simulation.machine import NOW, Hosts, Machine, Program, Rank
from dlrm_hybrid.plan.simulation.parts import (
    TENSOR,
    ClientCosts,
    CutCosts,
    PlannedBoundaries,
    PlannedClient,
    PlannedInputs,
    PlannedStage,
    PlannedWorker,
    frame_key,
)
from dlrm_hybrid.plan.simulation.servers import ServerCosts, parameter_server, table_server
from dlrm_hybrid.plan.simulation.tables import LocalTables, ServedTables, SharedTables
from dlrm_hybrid.rng import fold
from dlrm_hybrid.run.assembly.build import leader, pipeline, policy
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.train.progress import SYNC_EVERY
from dlrm_hybrid.types import Tick
from dlrm_hybrid.wire.frame import Kind

FEWEST_STEPS = 30
WARMUP_SHARE = 1 / 3
JITTER, JITTER_STEPS = 0.25, 1 << 20  # of steps that nobody waits for; assumed
REPORT_BYTES, DECISION_BYTES = 800.0, 88.0  # as in runs; in reports most is what compression let by


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation has measured after its first third.

    Attributes:
        samples_per_second: of all trainers.
        seconds_per_step: of a trainer.
        core_use: share of the cores of each machine.
        link_use: share of the time in which each host's link would be full in one direction or the
            other, if never in both at once; 0 without a rate.
        rank_use: share of one core of each rank's main thread.
        network_use: likewise of its network's thread.
        bytes_per_step: by class, of all ranks, for a step of every trainer.
        cold_seconds: CPU of each rank's main thread in a step, since its caches were cold.
    """

    samples_per_second: float
    seconds_per_step: float
    core_use: tuple[float, ...]
    link_use: tuple[float, ...]
    rank_use: tuple[float, ...]
    network_use: tuple[float, ...]
    bytes_per_step: Mapping[Traffic, float]
    cold_seconds: tuple[float, ...] = ()


def simulate(world: Layout, units: UnitCosts, hosts: Hosts, steps: int = FEWEST_STEPS) -> Outcome:
    """Run so many steps of every trainer."""
    return _World(world, frames(world), units, hosts, steps).run()


class _World:
    """The ranks, queues and clocks of one simulated world."""

    def __init__(
        self, world: Layout, sizes: Frames, units: UnitCosts, hosts: Hosts, steps: int
    ) -> None:
        self._world, self._sizes, self._units = world, sizes, units
        self._hosts, self._steps = hosts, steps
        self._machine = Machine(hosts, units.messages)
        self._policy = policy(world.config)
        self._leads = None if server_leads(world.config) else leader(world.config)
        self._warm: dict[int, float] = {}  # when a worker had done its first steps
        self._ends: dict[int, float] = {}

    def run(self) -> Outcome:
        machine, topology = self._machine, self._world.topology
        programs = {rank.rank: self._program(rank) for rank in machine.ranks}
        machine.run(programs, range(topology.num_workers))
        return self._outcome()

    def _outcome(self) -> Outcome:
        machine, topology, hosts = self._machine, self._world.topology, self._hosts
        leads = topology.interaction_group
        counted = self._steps - self._skipped
        per_step = [(self._ends[rank] - self._warm[rank]) / counted for rank in leads]
        rows = self._world.config.train.batch_size
        now, rate = machine.clock.now, hosts.bytes_per_second
        carried = zip(machine.links.sent_bytes, machine.links.received_bytes, strict=True)
        return Outcome(
            samples_per_second=sum(rows / one for one in per_step),
            seconds_per_step=sum(per_step) / len(per_step),
            core_use=tuple(one.busy_seconds / now / hosts.cores for one in machine.cores),
            link_use=tuple(min(1.0, sum(both) / now / rate) if rate else 0.0 for both in carried),
            rank_use=tuple(one.busy_seconds / now for one in machine.ranks),
            network_use=tuple(one.carrier.busy_seconds / now for one in machine.ranks),
            bytes_per_step={
                traffic: size / self._steps for traffic, size in machine.sent_bytes.items()
            },
            cold_seconds=tuple(one.cold_seconds / self._steps for one in machine.ranks),
        )

    @property
    def _skipped(self) -> int:
        return int(self._steps * WARMUP_SHARE)

    def _program(self, rank: Rank) -> Program:
        role = self._world.topology.role(rank.rank)
        if isinstance(role, WorkerRole):
            return self._train(rank, role)
        if isinstance(role, ServerRole):
            return self._serve(rank, role.index)
        return self._serve_tables(rank)

    def _train(self, rank: Rank, role: WorkerRole) -> Program:
        worker = self._worker(rank, role)
        ahead = self._world.config.embedding.staleness
        inputs = PlannedInputs(coming=[TENSOR] * ahead)
        for step in range(self._steps):
            if step % SYNC_EVERY == 0 and self._leads is not None:
                yield from self._meet(rank, step, self._leads)
            if step == self._skipped:
                self._warm[rank.rank] = yield NOW
            rank.work(self._units.loop * self._jitter(role, step))
            worker.stage.pace = self._jitter(role, step)
            yield from train_step(worker, Tick(step), inputs)
        self._ends[rank.rank] = yield NOW

    def _jitter(self, role: WorkerRole, step: int) -> float:
        """How many times as long a step takes, where trainers do not wait for each other.

        Trainers that are all alike would stay in step: all would push at once, and then all pull.
        """
        if self._policy.shares_versions:
            return 1.0
        drawn = fold(0, "plan", role.trainer, step) % JITTER_STEPS / JITTER_STEPS
        return 1 + JITTER * (2 * drawn - 1)

    def _meet(self, rank: Rank, step: int, leads: int) -> Program:
        """Reports to the leader, and its decision."""
        others = [one for one in range(self._world.topology.num_workers) if one != leads]
        if rank.rank == leads:
            for other in others:
                yield Receive(Kind.REPORT, other, step)
            for other in others:
                rank.send(other, frame_key(Kind.DECISION, leads, step), DECISION_BYTES)
            return
        rank.send(leads, frame_key(Kind.REPORT, rank.rank, step), REPORT_BYTES)
        yield Receive(Kind.DECISION, leads, step)

    def _worker(self, rank: Rank, role: WorkerRole) -> PlannedWorker:
        world, units = self._world, self._units
        config, part = world.config, world.partition.stages[role.stage]
        microbatches = config.schedule.microbatches
        return PlannedWorker(
            part=part,
            pipeline=pipeline(config),
            stage=PlannedStage(
                rank=rank,
                microbatches=microbatches,
                batch_rows=config.train.batch_size,
                seconds=compute_seconds(units, world, role.stage) / microbatches,
            ),
            boundaries=PlannedBoundaries(
                rank=rank,
                stage=role.stage,
                before=None if part.is_first else self._cut(role.stage - 1, role.stage),
                after=None if part.is_last else self._cut(role.stage, role.stage),
            ),
            tables=self._tables(rank) if part.has_interaction else None,
            client=PlannedClient(
                rank=rank, trainer=role.trainer, policy=self._policy, costs=self._client(role.stage)
            ),
        )

    def _cut(self, cut: int, stage: int) -> CutCosts:
        world, units, config = self._world, self._units, self._world.config
        rows = config.train.batch_size // config.schedule.microbatches
        elements = rows * world.partition.stages[cut].output_width
        encode = units.encode_activation * units.factor(world, Span.ENCODE, stage)
        decode = units.decode_activation * units.factor(world, Span.DECODE, stage)
        return CutCosts(
            forward_bytes=self._sizes.activation[cut],
            backward_bytes=self._sizes.gradient[cut],
            encode=encode * elements,
            decode=decode * elements,
        )

    def _client(self, stage: int) -> ClientCosts:
        world, topology = self._world, self._world.topology
        take = take_version_seconds(self._units, world, stage)
        own = self._units.server_apply * world.elements(stage)
        return ClientCosts(
            push_bytes={
                topology.server(server): size
                for (of, server), size in self._sizes.push.items()
                if of == stage
            },
            encode=encode_push_seconds(self._units, world, stage) if topology.servers else 0.0,
            apply=take if topology.servers else own or take,
            rounds=self._sizes.rounds[stage],
            trainers=topology.trainers,
            collective_server=topology.collective_server(stage) if topology.servers else 0,
        )

    def _tables(self, rank: Rank) -> StepTables:
        world, topology, sizes = self._world, self._world.topology, self._sizes
        rows = world.config.train.batch_size
        if topology.table_servers:
            return ServedTables(
                rank=rank,
                servers=topology.table_server_group,
                ask_bytes=sizes.lookup,
                update_bytes=sizes.update,
                seconds=self._units.ask * rows,
            )
        if topology.trainers == 1:
            return LocalTables(rank, self._units.own_lookup * rows)
        seconds = self._units.lookup * rows
        others = [one for one in topology.interaction_group if one != rank.rank]
        return SharedTables(rank=rank, others=others, phases=sizes.exchange, seconds=seconds)

    def _serve(self, rank: Rank, server: int) -> Program:
        world, units, topology = self._world, self._units, self._world.topology
        costs: dict[int, ServerCosts] = {}
        for stage in range(topology.stages):
            elements = sum(one.count for one in world.bucket(stage, server))
            if elements or topology.collective_server(stage) == rank.rank:
                costs[stage] = ServerCosts(
                    version_bytes=self._sizes.version.get((stage, server), 0.0),
                    decode=units.server_decode * elements,
                    apply=units.server_apply * elements,
                    encode=units.server_encode * elements,
                    rounds=self._sizes.rounds[stage],
                )
        return parameter_server(rank, topology, self._policy, costs)

    def _serve_tables(self, rank: Rank) -> Program:
        config, topology = self._world.config, self._world.topology
        in_order = BatchOrder(config.embedding.staleness)
        order = ArrivalOrder(config.parallel.threads) if server_leads(config) else in_order
        rows = config.train.batch_size / topology.table_servers
        return table_server(rank, topology, order, self._sizes.rows, self._units.serve * rows)
