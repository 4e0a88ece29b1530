"""From what the ranks of a run took to the costs of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from dlrm_hybrid.parallel.topology import ServerRole, TableServerRole
from dlrm_hybrid.plan.calibration import Calibration, RankCosts
from dlrm_hybrid.plan.costs import UnitCosts, compute_features, cut_elements, fitted, shape_of
from dlrm_hybrid.plan.simulation.machine import LEAST_WAKE_SECONDS, MessageCosts
from dlrm_hybrid.plan.simulation.world import simulate
from dlrm_hybrid.plan.worlds import as_configured
from dlrm_hybrid.telemetry.spans import Span

MOST_WAKE_SECONDS = 0.02
WAKE_TURNS = 14
LEAST_SHARE = 0.1
COLD_TURNS = 2
CLOSE = 0.003  # of the time of a step
OWN_LOOKUP_SHARE = 0.6
"""Time of looking up own tables over that of shared ones, whose ids and rows are packed. Assumed;
runs of both kinds say it themselves."""


def units_of(calibration: Calibration) -> UnitCosts:
    """CPU seconds of units, and the time to wake up with which the run's own speed is met."""
    messages = _message_costs(calibration.ranks)
    units = _Fit(calibration, messages, _shares(calibration.ranks, messages, {})).units()
    if len(calibration.ranks) == 1:
        return units
    hosts = as_configured(calibration.world.config).hosts(calibration.cores)
    for _ in range(COLD_TURNS):
        cold = simulate(calibration.world, _with_wake(calibration, units), hosts).cold_seconds
        shares = _shares(calibration.ranks, messages, dict(enumerate(cold)))
        units = _Fit(calibration, messages, shares).units()
    return _with_wake(calibration, units)


@final
@dataclass(frozen=True, slots=True)
class _Fit:
    """Fits the costs of units to a run, span by span.

    Attributes:
        run: what was measured.
        messages: of the network's threads.
        shares: by rank, CPU seconds of its main thread over its wall seconds without waiting.
    """

    run: Calibration
    messages: MessageCosts
    shares: Mapping[int, float]

    def units(self) -> UnitCosts:
        """The costs of all units."""
        world, topology = self.run.world, self.run.world.topology
        trainers, total = topology.trainers, sum(self._elements)
        pushes = trainers * total
        compute, compute_ratios = self._fitted(
            [compute_features(world, stage) for stage in self._stages], Span.COMPUTE
        )
        encode, encode_ratios = self._fitted(self._pushed_and_cut, Span.ENCODE)
        decode, decode_ratios = self._fitted(self._pushed_and_cut, Span.DECODE)
        applied = sum(self._of_stage(stage, Span.APPLY) for stage in self._stages) / total
        loops = [self._of_stage(stage, Span.READ, Span.REST) for stage in self._stages]
        ranks = self.run.ranks
        send, send_byte = fitted(
            [(one.messages, one.num_bytes) for one in ranks.values()],
            [self._seconds(rank, Span.SEND) for rank in ranks],
        )
        return UnitCosts(
            multiply=compute[0],
            layer=compute[1],
            interact=compute[2],
            **self._lookups(),
            encode_gradient=encode[0],
            encode_activation=encode[1],
            decode_activation=decode[1],
            take_version=applied + decode[0],
            loop=sum(loops) / len(loops),
            server_decode=self._of_servers(Span.DECODE, ServerRole) / pushes,
            server_apply=self._of_servers(Span.APPLY, ServerRole) / pushes or applied,
            server_encode=self._of_servers(Span.ENCODE, ServerRole) / total,
            messages=replace(self.messages, send=send, send_byte=send_byte),
            factors={
                Span.COMPUTE: compute_ratios,
                Span.ENCODE: encode_ratios,
                Span.DECODE: decode_ratios,
            },
            fits=shape_of(world),
        )

    @property
    def _stages(self) -> range:
        return range(self.run.world.topology.stages)

    @property
    def _elements(self) -> list[int]:
        return [self.run.world.elements(stage) for stage in self._stages]

    @property
    def _pushed_and_cut(self) -> list[tuple[int, int]]:
        cuts = (cut_elements(self.run.world, stage) for stage in self._stages)
        return list(zip(self._elements, cuts, strict=True))

    def _lookups(self) -> dict[str, float]:
        """Of a row: what was measured, and a guess of the ways that were not."""
        topology = self.run.world.topology
        rows = self.run.world.config.train.batch_size
        asking = self._of_stage(topology.interaction_stage, Span.EMBEDDING) / rows
        if topology.table_servers:
            spans = (Span.EMBEDDING, Span.APPLY)
            serving = sum(self._of_servers(one, TableServerRole) for one in spans)
            serving /= topology.trainers
            serve = serving / (2 * rows)
            shared = asking + 2 * serve
            return {
                "own_lookup": OWN_LOOKUP_SHARE * shared,
                "lookup": shared,
                "ask": asking,
                "serve": serve,
            }
        shared = asking if topology.trainers > 1 else asking / OWN_LOOKUP_SHARE
        return {
            "own_lookup": OWN_LOOKUP_SHARE * shared,
            "lookup": shared,
            "ask": shared / 2,
            "serve": shared / 4,
        }

    def _of_stage(self, stage: int, *spans: Span) -> float:
        topology = self.run.world.topology
        group = topology.stage_group(stage)
        return sum(self._seconds(rank, *spans) for rank in group) / topology.trainers

    def _seconds(self, rank: int, *spans: Span) -> float:
        """CPU seconds of one rank in some spans."""
        taken = self.run.ranks[rank].spans
        return self.shares[rank] * sum(taken.get(span, 0.0) for span in spans)

    def _of_servers(self, span: Span, kind: type) -> float:
        role = self.run.world.topology.role
        ranks = [rank for rank in self.run.ranks if isinstance(role(rank), kind)]
        return sum(self._seconds(rank, span) for rank in ranks)

    def _fitted(
        self, features: Sequence[Sequence[float]], span: Span
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Coefficients, and of each stage what was measured over what they give."""
        measured = [self._of_stage(stage, span) for stage in self._stages]
        found = fitted(features, measured)
        model = [sum(map(float.__mul__, found, map(float, one))) for one in features]
        ratios = tuple(a / b if b else 1.0 for a, b in zip(measured, model, strict=True))
        return found, ratios


def _shares(
    ranks: Mapping[int, RankCosts], costs: MessageCosts, cold: Mapping[int, float]
) -> dict[int, float]:
    """CPU seconds of each main thread over its wall seconds without waiting, less cold caches'.

    Spans are wall time: where ranks share cores they also hold the time in which others ran.
    Older runs know the CPU time of processes alone: one share for all, less what messages cost.
    """
    known = {rank: one.thread_seconds for rank, one in ranks.items()}
    if None not in known.values():
        return {
            rank: _share((known[rank] or 0.0) - cold.get(rank, 0.0), one.working)
            for rank, one in ranks.items()
        }
    carried = 2 * sum(_carried(one, costs) for one in ranks.values())
    working = sum(one.working for one in ranks.values())
    cpu = sum(one.cpu_seconds for one in ranks.values()) - carried
    share = _share(cpu - sum(cold.values()), working)
    return dict.fromkeys(ranks, share)


def _share(cpu_seconds: float, working: float) -> float:
    return min(1.0, max(cpu_seconds / working, LEAST_SHARE)) if working else 1.0


def _carried(rank: RankCosts, costs: MessageCosts) -> float:
    return costs.carry * rank.messages + costs.carry_byte * rank.num_bytes


def _message_costs(ranks: Mapping[int, RankCosts]) -> MessageCosts:
    """Of the threads of the network: what processes took beside their main threads."""
    usual = MessageCosts()
    carried = 2 * sum(_carried(one, usual) for one in ranks.values())
    known = [one for one in ranks.values() if one.thread_seconds is not None]
    if len(known) < len(ranks) or not carried:
        return usual
    beside = sum(one.cpu_seconds - (one.thread_seconds or 0.0) for one in known)
    times = max(beside, 0.0) / carried
    return replace(usual, carry=times * usual.carry, carry_byte=times * usual.carry_byte)


def _with_wake(calibration: Calibration, units: UnitCosts) -> UnitCosts:
    """Bisect for the time to wake up: without it simulated ranks would wait too little."""

    hosts = as_configured(calibration.world.config).hosts(calibration.cores)

    def at(wake: float) -> UnitCosts:
        return replace(units, messages=replace(units.messages, wake=wake))

    def speed(wake: float) -> float:
        found = simulate(calibration.world, at(wake), hosts)
        return found.samples_per_second / calibration.samples_per_second

    low, high = LEAST_WAKE_SECONDS, MOST_WAKE_SECONDS
    if speed(low) <= 1:
        return at(low)
    for _ in range(WAKE_TURNS):
        middle = (low + high) / 2
        found = speed(middle)
        if abs(found - 1) < CLOSE:
            return at(middle)
        low, high = (middle, high) if found > 1 else (low, middle)
    return at((low + high) / 2)
