"""Worlds whose rows and row gradients travel as integer levels: embedding.levels."""

import pytest
from patience import PATIENT
from world_runs import (
    Train,
    assert_compiled_ahead,
    assert_moved,
    assert_same,
    assert_same_state,
    checkpoint,
    curve,
    summary,
    tensors,
)

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[]", PATIENT),
    *("train.batch_size=16", "train.epochs=3", "checkpoint.every=50", "checkpoint.keep=9"),
)
LEVELS = ("embedding.deduplicate=true", "embedding.levels=true")
FEW = "embedding.copies_rows=16"  # rows are pushed out
IN_PROCESS = "parallel.world=in_process"


@pytest.mark.parametrize(
    ("trainers", "options"),
    [
        (2, ("embedding.optimizer=rowwise_adagrad", FEW)),
        pytest.param(2, ("parallel.cuts=[bottom.2,top.2]",), marks=pytest.mark.slow),
        pytest.param(
            3,
            ("sync=bounded", "sync.staleness=2", "schedule.microbatches=4"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_equal_the_in_process_world_bit_for_bit(
    trainers: int, options: tuple[str, ...], train: Train
) -> None:
    layout = (*WORLD, *LEVELS, f"parallel.trainers={trainers}", *options)
    layout = (*layout, "train.steps=100", "train.evaluate_every=60")
    code, processes = train("processes", *layout)
    assert code == 0
    assert_compiled_ahead(processes)
    code, in_process = train("in-process", *layout, IN_PROCESS)
    assert code == 0
    for step in (50, 100):
        assert_same_state(processes, in_process, step)
    assert_moved(processes, 50, 100)
    assert curve(processes) == curve(in_process)  # with the number of residuals that were lost
    told = [values["of"] for _, values in curve(processes) if "of" in values]
    lost = sum(one["rows.lost_residuals"]["sent"] for one in told)
    assert lost > 0 if FEW in options else lost == 0
    assert all(0 < one["rows.levels"]["density"] < 1 for one in told)
    assert summary(processes)["test"] == summary(in_process)["test"]


@pytest.mark.parametrize("world", ["in_process", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_that_resumes_ends_with_the_same_bits(world: str, train: Train) -> None:
    options = (*WORLD, *LEVELS, FEW, f"parallel.world={world}", "train.steps=100")
    code, unbroken = train("unbroken", *options)
    assert code == 0
    source = f"checkpoint.resume={checkpoint(unbroken, 50)}"
    code, resumed = train("resumed", *options, source)
    assert code == 0
    assert_same_state(resumed, unbroken, 100)
    assert_moved(unbroken, 50, 100)


def test_with_other_trainers_all_is_sent_anew(train: Train) -> None:
    """Nothing of what others remembered is taken over: as from a checkpoint without it."""
    options = (*WORLD, *LEVELS, IN_PROCESS)
    code, two = train("two", *options, "parallel.trainers=2", "train.steps=50")
    assert code == 0
    three = ("parallel.trainers=3", "train.steps=60", f"checkpoint.resume={checkpoint(two, 50)}")
    code, once = train("once", *options, *three)
    assert code == 0
    code, plain = train("plain", *options, *three, "embedding.levels=false")
    assert code == 0
    one, other = tensors(once, 60), tensors(plain, 60)
    assert one.keys() == other.keys()
    assert 0 < max(float(abs(one[name] - other[name]).max()) for name in one) < 0.05


def test_one_trainer_sends_nothing_whatever_the_options(train: Train) -> None:
    layout = (*WORLD, "parallel.trainers=1", "train.steps=20", IN_PROCESS)
    assert train("plain", *layout)[0] == 0
    code, folder = train("levels", *layout, *LEVELS)
    assert code == 0
    assert_same(folder, folder.with_name("plain"), 20)


def test_levels_take_few_bytes_and_count_as_much(train: Train) -> None:
    layout = (*WORLD, "embedding.deduplicate=true", "train.steps=60")
    sent = {}
    for levels in ("false", "true"):
        code, folder = train(levels, *layout, f"embedding.levels={levels}")
        assert code == 0
        sent[levels] = summary(folder)["network"]["by_class"]["embedding"]
    assert sent["true"]["bytes"] < 0.3 * sent["false"]["bytes"]
    assert sent["true"]["dense_equivalent_bytes"] == sent["false"]["dense_equivalent_bytes"]
