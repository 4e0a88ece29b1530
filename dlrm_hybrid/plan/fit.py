"""Fits unit costs to the measured costs of a run's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, final

import numpy as np

from dlrm_hybrid.parallel.topology import ServerRole, TableServerRole
from dlrm_hybrid.plan.calibration import Calibration, RankCosts
from dlrm_hybrid.plan.costs import UnitCosts, compute_features, cut_elements
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.machine import Hosts
from dlrm_hybrid.plan.simulation import simulate, simulated
from dlrm_hybrid.telemetry.spans import Span

CARRY_SECONDS, CARRY_BYTE_SECONDS = 30e-6, 0.5e-9  # only their ratio is used
LEAST_WAKE_SECONDS = 50e-6
MOST_WAKE_SECONDS, WAKE_TURNS = 0.02, 6
LEAST_SHARE = 0.1  # of a span's wall time that is CPU time, where cold caches seem to take all
CLOSE = 0.003  # relative error of a step's time
OWN_LOOKUP_SHARE = 0.6
"""Time of a lookup in own tables over one in shared tables, whose ids and rows are packed. Assumed
unless the run had own tables."""


def units_of(run: Calibration, world: Layout, hosts: Hosts) -> UnitCosts:
    """Fit unit costs to a run of several ranks, with a `wake` that makes its simulation as fast."""
    cold = dict.fromkeys(run.ranks, 0.0)
    units = _with_wake(run, world, _Fit(run.ranks, world, cold).units(), hosts)
    few = simulated(world.config).parallel.trainers * world.topology.stages
    # What caches cost shows in a simulation alone, which needs units: those of a first fit.
    simulated_seconds = simulate(world, units, hosts).cold_seconds
    beyond = world.topology.num_workers - few  # workers that a simulated one stands for
    cold = {
        rank: simulated_seconds[rank % few if rank < few + beyond else rank - beyond]
        for rank in run.ranks
    }
    return _with_wake(run, world, _Fit(run.ranks, world, cold).units(), hosts)


@final
@dataclass(frozen=True, slots=True)
class _Fit:
    """Divides the seconds of ranks in each span by the units of work in it.

    Attributes:
        ranks: measured costs by rank.
        world: layout of the run.
        cold: CPU seconds by rank that are due to cold caches.
    """

    ranks: Mapping[int, RankCosts]
    world: Layout
    cold: Mapping[int, float]

    def units(self) -> UnitCosts:
        """All unit costs, with a provisional `wake`."""
        world, topology = self.world, self.world.topology
        stages = range(topology.stages)
        elements = [world.elements(stage) for stage in stages]
        total, rows = sum(elements), world.config.train.batch_size
        pushes = topology.trainers * total
        peers = 0 if topology.servers else topology.trainers - 1  # that send pushes here
        compute = self._fitted([compute_features(world, stage) for stage in stages], Span.COMPUTE)
        moved = [(elements[stage], cut_elements(world, stage)) for stage in stages]
        encode, decode = self._fitted(moved, Span.ENCODE), self._fitted(moved, Span.DECODE)
        applied = sum(self._of_stage(stage, Span.APPLY) for stage in stages) / total
        send, send_byte = fitted(
            [(rank.messages, rank.num_bytes) for rank in self.ranks.values()],
            [self._seconds(rank, Span.SEND) for rank in self.ranks],
        )
        return UnitCosts(
            multiply=compute[0],
            layer=compute[1],
            interact=compute[2],
            **self._lookups(rows),
            encode_gradient=encode[0],
            encode_activation=encode[1],
            decode_activation=decode[1],
            take_version=applied + decode[0],
            loop=sum(self._of_stage(stage, Span.READ, Span.REST) for stage in stages) / len(stages),
            server_decode=self._of_servers(ServerRole, Span.DECODE) / pushes
            or decode[0] / max(peers, 1),
            server_apply=self._of_servers(ServerRole, Span.APPLY) / pushes or applied / (peers + 1),
            server_encode=self._of_servers(ServerRole, Span.ENCODE) / total or encode[0],
            send=send,
            send_byte=send_byte,
            **_carrying(self.ranks),
            wake=LEAST_WAKE_SECONDS,
        )

    def _lookups(self, rows: int) -> dict[str, float]:
        """Costs of lookups per row: the way that was measured, and a guess for the others."""
        topology = self.world.topology
        asking = self._of_stage(topology.interaction_stage, Span.EMBEDDING) / rows
        if topology.table_servers:
            serving = self._of_servers(TableServerRole, Span.EMBEDDING, Span.APPLY)
            ask, serve = asking, serving / topology.trainers / (2 * rows)
            shared = ask + 2 * serve
        else:
            shared = asking if topology.trainers > 1 else asking / OWN_LOOKUP_SHARE
            ask, serve = shared / 2, shared / 4
        own_tables = OWN_LOOKUP_SHARE * shared
        return {"own_lookup": own_tables, "lookup": shared, "ask": ask, "serve": serve}

    def _of_stage(self, stage: int, *spans: Span) -> float:
        group = self.world.topology.stage_group(stage)
        return sum(self._seconds(rank, *spans) for rank in group) / len(group)

    def _of_servers(self, kind: type, *spans: Span) -> float:
        role = self.world.topology.role
        ranks = [rank for rank in self.ranks if isinstance(role(rank), kind)]
        return sum(self._seconds(rank, *spans) for rank in ranks)

    def _seconds(self, rank: int, *spans: Span) -> float:
        """CPU seconds of one rank in some spans, without those due to cold caches.

        Spans are wall time: if ranks share cores they include the time in which others ran.
        """
        costs = self.ranks[rank]
        if not costs.working:
            return 0.0
        share = (costs.thread_seconds - self.cold[rank]) / costs.working
        return min(1.0, max(share, LEAST_SHARE)) * sum(costs.spans.get(span, 0.0) for span in spans)

    def _fitted(self, features: Sequence[Sequence[float]], span: Span) -> list[float]:
        stages = range(self.world.topology.stages)
        return fitted(features, [self._of_stage(stage, span) for stage in stages])


def fitted(features: Sequence[Sequence[float]], measured: Sequence[float]) -> list[float]:
    """Non-negative least squares of relative errors: the coefficients of features.

    Features that are 0 in all rows get 0. There are few, so every subset of them is tried.

    Args:
        features: values of all features, row by row.
        measured: target of each row, 0 or more.
    """
    y: Any = np.array(measured)
    weights = 1 / np.maximum(y, 0.01 * max(y.max(), 1e-12))
    x: Any = np.array(features, float) * weights[:, None]
    y, norms = y * weights, np.linalg.norm(x, axis=0)
    usable = np.flatnonzero(norms).tolist()
    lstsq: Any = np.linalg.lstsq
    best, coefficients = np.inf, np.zeros(x.shape[1])
    for size in range(1, len(usable) + 1):
        for chosen in map(list, combinations(usable, size)):
            part: Any = lstsq(x[:, chosen] / norms[chosen], y, rcond=None)[0] / norms[chosen]
            error = float(((x[:, chosen] @ part - y) ** 2).sum())
            if (part >= 0).all() and error < best * (1 - 1e-9):
                best, coefficients = error, np.zeros(x.shape[1])
                coefficients[chosen] = part
    return coefficients.tolist()


def _carrying(ranks: Mapping[int, RankCosts]) -> dict[str, float]:
    """Costs of network threads: the CPU time of processes beside their main threads."""
    message, byte = CARRY_SECONDS, CARRY_BYTE_SECONDS
    carried = 2 * sum(message * rank.messages + byte * rank.num_bytes for rank in ranks.values())
    beside = sum(max(rank.cpu_seconds - rank.thread_seconds, 0.0) for rank in ranks.values())
    times = beside / carried if carried else 1.0
    return {"carry": times * message, "carry_byte": times * byte}


def _with_wake(run: Calibration, world: Layout, units: UnitCosts, hosts: Hosts) -> UnitCosts:
    """Find the `wake` for which the simulated speed is the run's; without it ranks wait too little.

    A step's time is nearly linear in `wake`, so chords are followed.
    """
    rows = world.config.train.batch_size * world.topology.trainers
    target = rows / run.samples_per_second

    def seconds(wake: float) -> float:
        return rows / simulate(world, replace(units, wake=wake), hosts).samples_per_second

    low, wake = LEAST_WAKE_SECONDS, 10 * LEAST_WAKE_SECONDS
    at_low = seconds(low)
    for _ in range(WAKE_TURNS if at_low < target else 0):
        at_wake = seconds(wake)
        if abs(at_wake / target - 1) < CLOSE:
            return replace(units, wake=wake)
        slope = max((at_wake - at_low) / (wake - low), 1.0)
        wake += (target - at_wake) / slope
        wake = min(max(wake, low * 1.01), MOST_WAKE_SECONDS)
    return replace(units, wake=low if at_low >= target else wake)
