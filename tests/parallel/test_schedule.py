import itertools
from collections.abc import Callable

import pytest
from schedule_simulation import StageOp, global_order, simulate

from dlrm_hybrid.parallel.schedule import Gpipe, OneForwardOneBackward, Op, Schedule, Sequential

SHAPES = list(itertools.product(range(1, 9), range(1, 17)))
sequential, gpipe, one_f_one_b = Sequential(), Gpipe(), OneForwardOneBackward()
every = pytest.mark.parametrize("schedule", [sequential, gpipe, one_f_one_b])


@every
def test_one_order_of_everything_keeps_all_dependencies(schedule: Schedule):
    for stages, microbatches in SHAPES:
        order = global_order(schedule, stages, microbatches)
        at = {stage_op: position for position, stage_op in enumerate(order)}
        assert len(order) == len(at) == 2 * stages * microbatches
        for stage in range(stages):
            mine = tuple(op for one, op in order if one == stage)
            assert mine == schedule(stage, stages, microbatches)
        for (stage, op), position in at.items():
            if op.kind == "F":
                assert stage == 0 or at[StageOp(stage - 1, op)] < position
            else:
                assert at[StageOp(stage, Op("F", op.microbatch))] < position
                assert stage == stages - 1 or at[StageOp(stage + 1, op)] < position


@pytest.mark.parametrize("ticks", [(1, 1), (1, 2), (3, 5)])
def test_idle_shares_are_those_of_the_formulas(ticks: tuple[int, int]):
    forward, backward = ticks
    for stages, microbatches in SHAPES:
        pipe = (stages - 1) / (microbatches + stages - 1)
        for schedule, idle_share in (
            (sequential, 1 - 1 / stages),
            (gpipe, pipe),
            (one_f_one_b, pipe),
        ):
            simulation = simulate(
                schedule, stages, microbatches, forward_ticks=forward, backward_ticks=backward
            )
            assert simulation.idle_share == pytest.approx(idle_share, abs=1e-12)


def test_live_microbatches():
    for stages, microbatches in SHAPES:
        gpipe_live = simulate(gpipe, stages, microbatches).peak_live
        assert gpipe_live == (microbatches,) * stages
        one_f_one_b_live = simulate(one_f_one_b, stages, microbatches).peak_live
        assert one_f_one_b_live == tuple(
            min(stages - stage, microbatches) for stage in range(stages)
        )
        assert simulate(sequential, stages, microbatches).peak_live == (1,) * stages


def test_one_f_one_b_of_the_first_of_three_stages():
    ops = [f"{kind}{microbatch}" for kind, microbatch, _ in one_f_one_b(0, 3, 4)]
    assert ops == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]


def missing(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    return gpipe(stage, stages, microbatches)[:-1]


def twice(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    return (*gpipe(stage, stages, microbatches), Op("F", 0))


def descending(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    ops = gpipe(stage, stages, microbatches)
    return ops[:microbatches] + ops[microbatches:][::-1]


def backward_first(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    return gpipe(stage, stages, microbatches)[::-1] if microbatches == 1 else ()


def crossed(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    return (sequential if stage == 0 else gpipe)(stage, stages, microbatches)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (missing, "not in order"),
        (twice, "not in order"),
        (descending, "not in order"),
        (backward_first, "not in order"),
        (crossed, "deadlock: stages wait before {0: .*'B'.*, 1: .*'F'"),
    ],
)
def test_broken_schedules_are_found(schedule: Callable[..., tuple[Op, ...]], message: str):
    with pytest.raises(ValueError, match=message):
        simulate(schedule, 2, 2)


def test_backward_before_forward_is_a_deadlock():
    with pytest.raises(ValueError, match="deadlock"):
        simulate(backward_first, 1, 1)
