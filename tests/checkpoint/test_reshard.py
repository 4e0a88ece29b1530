"""A checkpoint goes on in a world of another shape: weights and optimizers are exact."""

import numpy as np
import pytest
from saved_tensors import saved_groups
from world_runs import Trained, assert_moved, assert_same_state, checkpoint, summary, tensors

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

STEPS = 15
THREE = (
    *("parallel=hybrid", "parallel.trainers=2", "parallel.servers=1"),
    *("gradient=dct", "gradient.density=0.1"),
)
WORLDS = {
    "one_process": ("parallel=single", "gradient=none"),
    "one_trainer": (
        *("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]", "parallel.servers=0"),
        "gradient=none",
    ),
    "more": (
        *("parallel=hybrid", "parallel.trainers=3", "parallel.cuts=[top.1]"),
        *("parallel.servers=2", "gradient=dct", "gradient.density=0.1"),
    ),
}


CASES = [(shape, processes) for shape in WORLDS for processes in (False, True)]
QUICK = ("more", False)


@pytest.mark.parametrize(
    ("shape", "processes"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_world_goes_on_in_another_shape(shape: str, processes: bool, trained: Trained) -> None:
    world = "parallel.world=" + ("processes" if processes else "in_process")
    saving = (
        world,
        "embedding.sharding=row_wise" if processes else "embedding.sharding=table_wise",
    )
    batch = "train.batch_size=16"
    before = trained("before", *THREE, *saving, batch, f"train.steps={STEPS}")
    layout = (*WORLDS[shape], *([] if shape == "one_process" else [world]))
    resume = (f"checkpoint.resume={before}", batch)
    # With a rate that moves no weight a step shows what was loaded.
    still = ("optimizer.lr=1e-30", "embedding.lr=1e-30", f"train.steps={STEPS + 1}")
    one = trained("one", *layout, *resume, *still)
    loaded, saved = tensors(one, STEPS + 1), tensors(before, STEPS)
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert tensor.tobytes() == loaded[name].tobytes(), name
    # Where the old run was evaluated at its end, all ranks of the new one do it again.
    longer = (f"train.steps={3 * STEPS}", f"train.evaluate_every={STEPS}")
    after = trained("after", *layout, *resume, *longer)
    record = events.read(after / "events.jsonl")
    evaluated = [event.step for event in record if event.kind is Kind.EVALUATED]
    assert evaluated == [STEPS, 2 * STEPS, 3 * STEPS]
    assert summary(after)["test"]["loss"] < summary(before)["test"]["loss"]


PLAIN = ("parallel=hybrid", "parallel.cuts=[]", "sync.check_every=1", "train.batch_size=16")
LATE = ("sync=bounded", "sync.staleness=2", "pull.precision=bfloat16")
SPARSE = ("pull.sparsity=0.9",)
SWITCHES = [
    *(((), LATE, False), (LATE, (), False), ((), LATE, True), (LATE, (), True)),
    *(((), SPARSE, False), (SPARSE, LATE, True)),
]


@pytest.mark.parametrize(
    ("saved", "now", "processes"),
    [
        pytest.param(*one, marks=() if one == ((), LATE, False) else pytest.mark.slow)
        for one in SWITCHES
    ],
    ids=lambda one: str(one) if isinstance(one, bool) else "+".join(one) or "exact",
)
def test_versions_that_are_told_otherwise_begin_as_the_weights(
    saved: tuple[str, ...], now: tuple[str, ...], processes: bool, trained: Trained
) -> None:
    world = (*PLAIN, "parallel.world=" + ("processes" if processes else "in_process"))
    before = trained("before", *world, *saved, f"train.steps={STEPS}")
    still = ("optimizer.lr=1e-30", "embedding.lr=1e-30", f"train.steps={STEPS + 4}")
    after = trained("after", *world, *now, f"checkpoint.resume={before}", *still)
    loaded = tensors(after, STEPS + 4)
    for name, tensor in tensors(before, STEPS).items():
        assert tensor.tobytes() == loaded[name].tobytes(), name


def test_sparse_pulls_go_on_with_more_servers(trained: Trained) -> None:
    world = (*PLAIN, "parallel.world=in_process", *SPARSE, "gradient=dct", "gradient.density=0.1")
    length = (f"train.steps={2 * STEPS}", f"checkpoint.every={STEPS}", "checkpoint.keep=9")
    unbroken = trained("unbroken", *world, *length, "parallel.servers=1")
    resume = f"checkpoint.resume={checkpoint(unbroken, STEPS)}"
    after = trained("after", *world, *length, "parallel.servers=3", resume)
    assert_same_state(after, unbroken, 2 * STEPS)
    assert_moved(unbroken, STEPS, 2 * STEPS)
    versions = saved_groups(checkpoint(after, 2 * STEPS))["versions"]
    weights = tensors(after, 2 * STEPS)
    name = "bottom.1.weight"
    assert not np.array_equal(versions[f"{name}.published"], weights[name])
    assert f"{name}.threshold" in versions
