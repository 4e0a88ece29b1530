"""Adam and weight decay through the command line: in one process, on servers, resumed."""

from itertools import product

import numpy as np
import pytest
from world_runs import PlainRuns, Train, assert_same, assert_same_state, tensors

WORLD = ("parallel=hybrid", "parallel.world=in_process")
ADAM = ("optimizer=adam", "optimizer.lr=0.01", "embedding.lr=0.1")
DECAY = "optimizer.weight_decay=0.01"
ADAMW = (*ADAM, DECAY, "optimizer.decoupled_weight_decay=true")
SPARSE = ("gradient=dct", "gradient.sparsity=0.9", "gradient.lifespan=3")
CUTS = "parallel.cuts=[bottom.2,top.2]"
SERVED = ("embedding=served", "parallel.table_servers=1")


@pytest.fixture(scope="module")
def plain(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(small_rows, tmp_path_factory.mktemp("plain"))


OPTIMIZERS = (ADAM, ADAMW, (*ADAM, DECAY), ("optimizer.lr=0.3", DECAY))
QUICK = {(0, ADAM), (1, ADAMW), (3, OPTIMIZERS[2]), (3, OPTIMIZERS[3])}


@pytest.mark.parametrize(
    ("servers", "optimizer"),
    [
        pytest.param(*world, marks=() if world in QUICK else pytest.mark.slow)
        for world in product((0, 1, 3), OPTIMIZERS)
    ],
)
def test_one_trainer_with_any_servers_is_plain_training(
    optimizer: tuple[str, ...], servers: int, plain: PlainRuns, train: Train
) -> None:
    options = (*optimizer, "train.steps=20")
    layout = ("parallel.trainers=1", f"parallel.servers={servers}", CUTS)
    code, folder = train("world", *options, *WORLD, *layout)
    assert code == 0
    assert_same(plain(*options), folder, 20)
    found = tensors(folder, 20)
    if optimizer[0] == "optimizer=adam":
        assert found["top.1.weight.step"].tolist() == [20]
        assert found["top.1.weight.exp_avg_sq"].max() > 0
    decayed = plain(*(one for one in options if "decay" not in one))
    if decayed != plain(*options):
        assert np.abs(tensors(decayed, 20)["top.1.weight"] - found["top.1.weight"]).max() > 1e-5


@pytest.mark.parametrize("gradient", [(), SPARSE])
def test_processes_are_one_process_and_a_broken_run_is_an_unbroken_one(
    gradient: tuple[str, ...], train: Train
) -> None:
    world = ("parallel=hybrid", "parallel.trainers=2", CUTS, *ADAM, DECAY, *gradient)
    alone = (*world, "parallel.world=in_process", "parallel.servers=2")
    code, folder = train("processes", *world, "parallel.servers=2", "train.steps=12")
    assert code == 0
    assert train("unbroken", *alone, "train.steps=12")[0] == 0
    assert_same_state(folder, folder.with_name("unbroken"), 12)
    _, first = train("first", *alone, "train.steps=5")
    code, second = train("second", *alone, "train.steps=12", f"checkpoint.resume={first}")
    assert code == 0
    assert_same_state(folder, second, 12)
    one = (*world, "parallel.world=in_process", "parallel.servers=1")
    code, other = train("one-server", *one, "train.steps=12")
    assert code == 0
    assert_same(folder, other, 12)


def test_moments_move_with_the_weights_to_other_servers(train: Train) -> None:
    world = (*WORLD, "parallel.trainers=2", *ADAM)
    assert train("unbroken", *world, CUTS, "parallel.servers=3", "train.steps=14")[0] == 0
    _, first = train("first", *world, CUTS, "parallel.servers=3", "train.steps=6")
    other = ("parallel.servers=1", "parallel.cuts=[bottom.1]", f"checkpoint.resume={first}")
    code, second = train("second", *world, *other, "train.steps=14")
    assert code == 0
    assert_same(second.with_name("unbroken"), second, 14)


@pytest.mark.parametrize("gradient", [(), SPARSE])
def test_a_lone_trainer_that_waits_for_nobody_learns_as_in_lock_step(
    gradient: tuple[str, ...], train: Train
) -> None:
    world = (*WORLD, "parallel.trainers=1", CUTS, *ADAM, *gradient, *SERVED, "train.steps=20")
    assert train("sync", *world)[0] == 0
    code, folder = train("async", *world, "sync=async")
    assert code == 0
    assert_same(folder.with_name("sync"), folder, 20)


@pytest.mark.parametrize("policy", [("sync=bounded", "sync.staleness=2"), ("sync=async", *SERVED)])
def test_stale_gradients_learn_and_count_every_update(
    policy: tuple[str, ...], train: Train
) -> None:
    world = (*WORLD, "parallel.trainers=2", CUTS, *ADAM, *SPARSE, *policy, "train.steps=30")
    code, folder = train("world", *world, "telemetry.every=10")
    assert code == 0
    updates = 60 if "sync=async" in policy else 30
    assert tensors(folder, 30)["top.1.weight.step"].tolist() == [updates]
    again = train("again", *world, "telemetry.every=10")[1]
    assert_same_state(folder, again, 30)


def test_decay_is_that_of_torch(plain: PlainRuns) -> None:
    """One step of SGD from the same weights: w - lr (g + decay w)."""
    options = ("train.steps=1", "optimizer.lr=0.5")
    bare, decayed = plain(*options), plain(*options, "optimizer.weight_decay=0.1")
    first = plain("train.steps=1", "optimizer.lr=1e-30")
    for name, weight in tensors(first, 1).items():
        if name.startswith("embedding"):
            continue
        expected = tensors(bare, 1)[name] - np.float32(0.5 * 0.1) * weight
        np.testing.assert_allclose(tensors(decayed, 1)[name], expected, rtol=0, atol=1e-6)
        assert np.abs(weight).max() > 1e-2
