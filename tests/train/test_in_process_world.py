"""Worlds of one process against plain training."""

from itertools import combinations

import numpy as np
import pytest
from world_runs import PlainRuns, Train, assert_moved, largest_difference, tensors

STEPS = 200
CUTS = ("bottom.1", "bottom.2", "bottom.3", "bottom.4", "top.1", "top.2", "top.3")
WORLD = ("parallel=hybrid", "parallel.world=in_process")
EPOCHS = "train.epochs=3"


def cuts_option(cuts: tuple[str, ...]) -> str:
    return f"parallel.cuts=[{','.join(cuts)}]"


def layouts() -> list[object]:
    """Every list of up to one cut with and without a server; of longer ones a few, all if slow."""
    every = [
        (cuts, servers)
        for count in range(4)
        for cuts in combinations(CUTS, count)
        for servers in (0, 1)
    ]
    quick = {((), 0), ((), 1), (("bottom.2", "top.2"), 1), (("bottom.1", "bottom.4", "top.1"), 0)}
    quick |= {((cut,), index % 2) for index, cut in enumerate(CUTS)}
    return [
        pytest.param(*layout, marks=() if layout in quick else pytest.mark.slow) for layout in every
    ]


@pytest.fixture(scope="module")
def plain(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(small_rows, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("cuts", "servers"), layouts())
def test_one_trainer_cut_anywhere_is_plain_training(
    cuts: tuple[str, ...], servers: int, plain: PlainRuns, train: Train
) -> None:
    options = (EPOCHS, f"train.steps={STEPS}", "checkpoint.every=100")
    layout = ("parallel.trainers=1", f"parallel.servers={servers}", cuts_option(cuts))
    code, folder = train("world", *options, *WORLD, *layout)
    assert code == 0
    expected = plain(*options)
    for name, tensor in tensors(expected, STEPS).items():
        assert tensor.tobytes() == tensors(folder, STEPS)[name].tobytes(), name
    before = tensors(expected, 100)
    for prefix in ("bottom.1.weight", "top.1.weight", "embedding.3.weight"):
        assert np.abs(tensors(expected, STEPS)[prefix] - before[prefix]).max() > 1e-3


def test_a_checkpoint_of_any_step_holds_all_pushes(plain: PlainRuns, train: Train) -> None:
    # Nothing waits in the first steps of a lone stage: its pushes must be served all the same.
    options = (EPOCHS, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=9")
    layout = ("parallel.trainers=1", "parallel.servers=1", "parallel.cuts=[]")
    code, folder = train("world", *options, *WORLD, *layout)
    assert code == 0
    expected = plain(*options)
    for step in (1, 2, 3):
        for name, tensor in tensors(expected, step).items():
            assert tensor.tobytes() == tensors(folder, step)[name].tobytes(), (step, name)


@pytest.mark.parametrize(
    ("trainers", "cuts", "servers", "schedule", "microbatches"),
    [
        (2, (), 1, "sequential", 1),
        (2, ("bottom.2", "top.2"), 1, "gpipe", 4),
        (2, ("bottom.4",), 3, "one_f_one_b", 4),
        (3, ("bottom.1", "top.1"), 2, "one_f_one_b", 1),
        (3, ("top.3",), 2, "sequential", 4),
    ],
)
def test_trainers_together_are_plain_training_of_the_global_batch(
    trainers: int,
    cuts: tuple[str, ...],
    servers: int,
    schedule: str,
    microbatches: int,
    plain: PlainRuns,
    train: Train,
) -> None:
    options = ("train.steps=20", "checkpoint.every=10")
    layout = (f"parallel.trainers={trainers}", f"parallel.servers={servers}", cuts_option(cuts))
    order = (f"schedule={schedule}", f"schedule.microbatches={microbatches}")
    code, folder = train("world", *options, *WORLD, *layout, *order)
    assert code == 0
    expected = plain(*options, f"train.batch_size={64 * trainers}")
    assert_moved(folder, 10, 20)
    # Dense weights: within the last place of one between 1 and 2.
    for prefix, limit in (("bottom", 2**-23), ("top", 2**-23), ("embedding", 1e-6)):
        found = largest_difference(tensors(expected, 20), tensors(folder, 20), prefix)
        assert found <= limit, prefix


def test_a_world_goes_on_where_it_was_stopped(train: Train) -> None:
    layout = (*WORLD, "parallel.servers=2", "optimizer=adagrad", "optimizer.lr=0.02")
    for policy in (("sync=sync",), ("sync=bounded", "sync.staleness=2")):
        name = policy[0].partition("=")[2]
        assert train(f"{name}-unbroken", "train.steps=40", *layout, *policy)[0] == 0
        assert train(f"{name}-first", "train.steps=25", *layout, *policy)[0] == 0
        _, first = train(f"{name}-first", "checkpoint.resume=auto", *layout, *policy)
        resume = f"checkpoint.resume={first}"
        code, second = train(f"{name}-second", "train.steps=40", *layout, *policy, resume)
        assert code == 0
        unbroken = tensors(first.with_name(f"{name}-unbroken"), 40)
        for tensor_name, tensor in tensors(second, 40).items():
            assert tensor.tobytes() == unbroken[tensor_name].tobytes(), (name, tensor_name)
        assert any(
            np.abs(tensor - tensors(first, 25)[key]).max() > 1e-3
            for key, tensor in unbroken.items()
        )
