"""Schedules of micro-batches: every op once, in an order that all stages can keep, few at once."""

import itertools

import pytest

from dlrm_hybrid.parallel.schedule import Gpipe, OneForwardOneBackward, Op, Schedule, Sequential

SHAPES = list(itertools.product(range(1, 9), range(1, 17)))
sequential, gpipe, one_f_one_b = Sequential(), Gpipe(), OneForwardOneBackward()


def ticks(schedule: Schedule, stages: int, microbatches: int, forward: int, backward: int) -> int:
    """When the last op ends where each begins as soon as its stage and its input allow."""
    left = [list(schedule(stage, stages, microbatches)) for stage in range(stages)]
    ends: dict[tuple[int, Op], int] = {}
    free_at = [0] * stages
    while any(left):
        able = [
            stage
            for stage in range(stages)
            if left[stage] and needs(stage, left, stages) <= {*ends}
        ]
        assert able, f"deadlock: {left}"
        for stage in able:
            start = max([free_at[stage], *(ends[one] for one in needs(stage, left, stages))])
            op = left[stage].pop(0)
            assert (stage, op) not in ends
            free_at[stage] = start + (forward if op.kind == "F" else backward)
            ends[stage, op] = free_at[stage]
    assert len(ends) == 2 * stages * microbatches
    return max(free_at)


def needs(stage: int, left: list[list[Op]], stages: int) -> set[tuple[int, Op]]:
    """Ops whose results the next one of a stage uses."""
    op = left[stage][0]
    if op.kind == "F":
        return {(stage - 1, op)} if stage else set()
    return {(stage, Op("F", op.microbatch)), *([(stage + 1, op)] if stage < stages - 1 else [])}


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 5)])
def test_idle_shares_are_those_of_the_formulas(forward: int, backward: int) -> None:
    for stages, microbatches in SHAPES:
        pipe = (stages - 1) / (microbatches + stages - 1)
        for schedule, idle_share in (
            *((sequential, 1 - 1 / stages), (gpipe, pipe), (one_f_one_b, pipe)),
        ):
            busy = microbatches * (forward + backward)
            found = 1 - busy / ticks(schedule, stages, microbatches, forward, backward)
            assert found == pytest.approx(idle_share, abs=1e-12)


def most_live(schedule: Schedule, stage: int, stages: int, microbatches: int) -> int:
    """Micro-batches gone forward and not yet back."""
    ops = schedule(stage, stages, microbatches)
    return max(itertools.accumulate(1 if op.kind == "F" else -1 for op in ops))


def test_live_microbatches() -> None:
    for stages, microbatches in SHAPES:
        for stage in range(stages):
            shape = stage, stages, microbatches
            assert most_live(gpipe, *shape) == microbatches
            assert most_live(one_f_one_b, *shape) == min(stages - stage, microbatches)
            assert most_live(sequential, *shape) == 1


def test_one_f_one_b_of_the_first_of_three_stages() -> None:
    ops = [f"{kind}{microbatch}" for kind, microbatch, _ in one_f_one_b(0, 3, 4)]
    assert ops == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
