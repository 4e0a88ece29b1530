"""Proves schedules and times them, op by op, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dlrm_hybrid.parallel.schedule import (
    Op,
    StageOps,
)


class StageOp(NamedTuple):
    """An op with the stage that does it."""

    stage: int
    op: Op


@dataclass(frozen=True, slots=True)
class Simulation:
    """How a schedule goes when every forward and every backward takes its given time.

    Attributes:
        ticks: from the first op to the end of the last.
        idle_share: of the stages' time in which they wait.
        peak_live: by stage, most micro-batches gone forward and not yet back.
    """

    ticks: int
    idle_share: float
    peak_live: tuple[int, ...]


def simulate(
    schedule: StageOps,
    stages: int,
    microbatches: int,
    *,
    forward_ticks: int = 1,
    backward_ticks: int = 2,
) -> Simulation:
    """Prove a schedule and time it; sending takes no time and never waits.

    Raises:
        ValueError: an op is missing, twice, out of order, or waits for ever.
    """
    timed = _run(schedule, stages, microbatches, forward_ticks, backward_ticks)
    ticks = max(end for _, end, _ in timed)
    busy = stages * microbatches * (forward_ticks + backward_ticks)
    return Simulation(
        ticks=ticks,
        idle_share=1 - busy / (stages * ticks),
        peak_live=tuple(
            _peak_live(schedule(stage, stages, microbatches)) for stage in range(stages)
        ),
    )


def global_order(schedule: StageOps, stages: int, microbatches: int) -> tuple[StageOp, ...]:
    """All ops of all stages one after the other, none before what it needs; raises as `simulate`.

    The order in which they would start, the lower stage first.
    """
    timed = _run(schedule, stages, microbatches, 1, 2)
    return tuple(stage_op for _, _, stage_op in sorted(timed, key=lambda one: (one[0], one[2])))


def _run(
    schedule: StageOps, stages: int, microbatches: int, forward_ticks: int, backward_ticks: int
) -> list[tuple[int, int, StageOp]]:
    """Start, end and op of everything; each op starts as soon as its stage and its input allow."""
    ops = [schedule(stage, stages, microbatches) for stage in range(stages)]
    for stage, one in enumerate(ops):
        _check_complete(stage, one, microbatches)
    ends: dict[StageOp, int] = {}
    timed: list[tuple[int, int, StageOp]] = []
    done = [0] * stages
    free_at = [0] * stages
    while any(done[stage] < len(ops[stage]) for stage in range(stages)):
        before = len(timed)
        for stage in range(stages):
            while done[stage] < len(ops[stage]):
                stage_op = StageOp(stage, ops[stage][done[stage]])
                needed = _needs(stage_op, stages)
                if any(one not in ends for one in needed):
                    break
                start = max([free_at[stage], *(ends[one] for one in needed)])
                length = forward_ticks if stage_op.op.kind == "F" else backward_ticks
                ends[stage_op] = free_at[stage] = start + length
                timed.append((start, start + length, stage_op))
                done[stage] += 1
        if len(timed) == before:
            waiting = {s: ops[s][done[s]] for s in range(stages) if done[s] < len(ops[s])}
            raise ValueError(f"deadlock: stages wait before {waiting}")
    return timed


def _needs(stage_op: StageOp, stages: int) -> list[StageOp]:
    """Ops whose results an op uses."""
    stage, op = stage_op
    if op.kind == "F":
        return [StageOp(stage - 1, op)] if stage > 0 else []
    needed = [StageOp(stage, Op("F", op.microbatch))]
    if stage < stages - 1:
        needed.append(StageOp(stage + 1, op))
    return needed


def _check_complete(stage: int, ops: tuple[Op, ...], microbatches: int) -> None:
    for kind in ("F", "B"):
        order = [op.microbatch for op in ops if op.kind == kind]
        if order != list(range(microbatches)):
            raise ValueError(f"stage {stage}: {kind} of micro-batches {order}, not in order")


def _peak_live(ops: tuple[Op, ...]) -> int:
    live = peak = 0
    for op in ops:
        live += 1 if op.kind == "F" else -1
        peak = max(peak, live)
    return peak
