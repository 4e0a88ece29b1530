"""The programs of planned servers: the machines of the policies decide, costs replace tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrm_hybrid.comm.mailbox import Key
from dlrm_hybrid.parallel.sync.policy import Action, Average, Pull, Push, SyncPolicy
from dlrm_hybrid.parallel.tables.order import Answer, Apply, BatchOf, TableOrder
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.plan.frames import Round
from dlrm_hybrid.plan.simulation.machine import ANY, Program, Rank
from dlrm_hybrid.plan.simulation.parts import frame_key
from dlrm_hybrid.types import BatchNumber, Version
from dlrm_hybrid.wire.frame import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts:
    """What a server does for one stage.

    Attributes:
        version_bytes: of the frame to each trainer.
        decode: CPU seconds of a push.
        apply: CPU seconds for each push that a version is made of.
        encode: CPU seconds of a version.
        rounds: that are reduced here, in their order.
    """

    version_bytes: float
    decode: float
    apply: float
    encode: float
    rounds: Sequence[Round] = ()


def parameter_server(
    rank: Rank, topology: Topology, policy: SyncPolicy, costs: Mapping[int, ServerCosts]
) -> Program:
    """Take pushes and contributions as they come, and publish what the policy says.

    Args:
        rank: of the server.
        topology: of the world.
        policy: when versions are made.
        costs: by stage, of those of which it owns something or reduces rounds.
    """
    states = {stage: policy.bucket(topology.stage_group(stage), 0) for stage in costs}
    if not policy.shares_versions:
        for stage in costs:
            for worker in topology.stage_group(stage):
                states[stage] = states[stage].on_pull(Pull(worker, 0))
    contributed: dict[tuple[int, int, int], int] = defaultdict(int)
    while True:
        key: Key = yield ANY
        kind, sender, number, _, round_, _ = key
        stage = sender % topology.stages
        own = costs[stage]
        if kind is Kind.CONTRIBUTION:
            contributed[stage, number, round_] += 1
            if contributed[stage, number, round_] == topology.trainers:
                del contributed[stage, number, round_]
                result = frame_key(Kind.RESULT, rank.rank, number, round=round_)
                for worker in topology.stage_group(stage):
                    rank.send(worker, result, own.rounds[round_].result_bytes)
            continue
        rank.work(own.decode)
        states[stage], actions = states[stage].on_push(Push(sender, number))
        _act(rank, actions, own)


def _act(rank: Rank, actions: Sequence[Action], costs: ServerCosts) -> None:
    for action in actions:
        if isinstance(action, Average):
            rank.work(costs.apply * len(action.pushes))
            continue
        rank.work(costs.encode)
        version = frame_key(Kind.PARAMETERS, rank.rank, action.version)
        for worker in action.to:
            rank.send(worker, version, costs.version_bytes)


def table_server(
    rank: Rank, topology: Topology, order: TableOrder, rows_bytes: float, seconds: float
) -> Program:
    """Answer lookups and apply updates in the order that the tables have.

    Args:
        rank: of the server.
        topology: of the world.
        order: of lookups and updates.
        rows_bytes: of the answer to a lookup.
        seconds: of a lookup, and of an update.
    """
    group = topology.interaction_group
    state = order.begin(topology.trainers, Version(0))
    while True:
        key: Key = yield ANY
        kind, sender, number = key[:3]
        of = BatchOf(group.index(sender), BatchNumber(number))
        state, actions = state.on_update(of) if kind is Kind.UPDATE else state.on_question(of)
        for action in actions:
            if isinstance(action, Apply):
                rank.work(seconds * len(action.updates))
            elif isinstance(action, Answer):
                for question in action.questions:
                    assert isinstance(question, BatchOf)
                    rank.work(seconds)
                    answer = frame_key(Kind.ROWS, rank.rank, question.batch)
                    rank.send(group[question.trainer], answer, rows_bytes)
