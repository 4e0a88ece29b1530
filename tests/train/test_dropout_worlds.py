"""Dropout through the command line: the same activations in every world."""

import pytest
from world_runs import PlainRuns, Train, assert_same, assert_same_state, largest_difference, tensors

WORLD = ("parallel=hybrid", "parallel.world=in_process")
DROPOUT = ("model.dropout=0.3", "optimizer.lr=0.05")


@pytest.fixture(scope="module")
def plain(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(small_rows, tmp_path_factory.mktemp("plain"))


def test_one_trainer_cut_anywhere_is_plain_training(plain: PlainRuns, train: Train) -> None:
    options = (*DROPOUT, "train.steps=40")
    layout = ("parallel.trainers=1", "parallel.servers=2", "parallel.cuts=[bottom.2,top.1]")
    code, folder = train("world", *options, *WORLD, *layout)
    assert code == 0
    assert_same(plain(*options), folder, 40)
    whole = plain("optimizer.lr=0.05", "train.steps=40")
    assert largest_difference(tensors(whole, 40), tensors(folder, 40), "top") > 1e-3


@pytest.mark.parametrize(("trainers", "microbatches"), [(1, 4), (2, 1), (2, 4)])
def test_trainers_and_parts_of_batches_drop_as_the_global_batch(
    trainers: int, microbatches: int, plain: PlainRuns, train: Train
) -> None:
    layout = (f"parallel.trainers={trainers}", "parallel.servers=1", "parallel.cuts=[bottom.2]")
    parts = ("schedule=gpipe", f"schedule.microbatches={microbatches}", "train.steps=20")
    code, folder = train("world", *DROPOUT, *WORLD, *layout, *parts)
    assert code == 0
    expected = plain(*DROPOUT, "train.steps=20", f"train.batch_size={64 * trainers}")
    for prefix in ("bottom", "top", "embedding"):
        assert largest_difference(tensors(expected, 20), tensors(folder, 20), prefix) <= 1e-6


def test_processes_are_one_process_and_a_broken_run_is_an_unbroken_one(train: Train) -> None:
    world = ("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[bottom.2,top.2]", *DROPOUT)
    alone = (*world, "parallel.world=in_process")
    code, folder = train("processes", *world, "train.steps=12")
    assert code == 0
    assert train("unbroken", *alone, "train.steps=12")[0] == 0
    assert_same_state(folder, folder.with_name("unbroken"), 12)
    _, first = train("first", *alone, "train.steps=5")
    code, second = train("second", *alone, "train.steps=12", f"checkpoint.resume={first}")
    assert code == 0
    assert_same_state(folder, second, 12)
