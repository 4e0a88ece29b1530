"""A checkpoint goes on in a world of another shape: weights and optimizers are exact."""

import pytest
from world_runs import Trained, summary, tensors

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
