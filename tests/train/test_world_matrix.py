"""Worlds of processes in every pair of their dimensions, and all worlds of one process."""

from dataclasses import dataclass, fields
from itertools import combinations, product

import pytest
from patience import PATIENT
from world_runs import (
    PlainRuns,
    Train,
    assert_moved,
    assert_same,
    largest_difference,
    summary,
    tensors,
)

ROWS_PER_TRAINER = 64
# Column-wise shards are 8 wide at least, so the rows of the tables are twice that.
MODEL = ("model.embedding_dim=16", "model.bottom=[13,32,16,8,16]")
CUTS = {
    1: ("",),
    2: ("bottom.2", "top.2", "bottom.4", "top.3"),
    3: ("bottom.2,top.2", "bottom.1,bottom.4", "top.1,top.3", "bottom.4,top.1"),
}


@dataclass(frozen=True)
class World:
    trainers: int
    stages: int
    servers: int
    sharding: str
    microbatches: int
    schedule: str


EVERY = [
    World(*values)
    for values in product(
        (2, 3),
        (1, 2, 3),
        (1, 2, 3),
        ("table_wise", "row_wise", "column_wise", "auto"),
        (1, 4),
        ("sequential", "gpipe", "one_f_one_b"),
    )
]


def pairs(world: World) -> set[tuple[object, ...]]:
    values = [(field.name, getattr(world, field.name)) for field in fields(world)]
    return set(combinations(values, 2))


def covering() -> list[World]:
    """Worlds in which every pair of values occurs: each next one brings the most new pairs."""
    left = {pair for world in EVERY for pair in pairs(world)}
    chosen: list[World] = []
    while left:
        chosen.append(max(EVERY, key=lambda world: len(pairs(world) & left)))
        left -= pairs(chosen[-1])
    return chosen


COVERING = covering()


def options(world: World) -> tuple[str, ...]:
    cuts = CUTS[world.stages]
    return (
        *("parallel=hybrid", f"parallel.trainers={world.trainers}"),
        f"parallel.cuts=[{cuts[EVERY.index(world) % len(cuts)]}]",
        *(f"parallel.servers={world.servers}", f"embedding.sharding={world.sharding}"),
        *(f"schedule={world.schedule}", f"schedule.microbatches={world.microbatches}"),
        *(*MODEL, PATIENT),
    )


def parameters(worlds: list[World], quick: tuple[World, ...] = ()) -> list[object]:
    return [
        pytest.param(
            world,
            id="-".join(str(getattr(world, field.name)) for field in fields(world)),
            marks=() if world in quick else pytest.mark.slow,
        )
        for world in worlds
    ]


@pytest.fixture(scope="module")
def plain(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns([*small_rows, *MODEL], tmp_path_factory.mktemp("plain"))


def global_batch(world: World) -> str:
    return f"train.batch_size={ROWS_PER_TRAINER * world.trainers}"


def test_few_worlds_cover_every_pair() -> None:
    wanted = {pair for world in EVERY for pair in pairs(world)}
    assert set().union(*(pairs(world) for world in COVERING)) == wanted
    assert len(COVERING) <= 24
    assert len(set(COVERING)) == len(COVERING)


QUICK = tuple(
    next(world for world in COVERING if world.sharding == sharding)
    for sharding in ("row_wise", "column_wise")
)


def assert_near(world: World, train: Train, plain: PlainRuns, *where: str) -> None:
    """20 steps of a world are those of one process within rounding."""
    length = ("train.steps=20", "checkpoint.every=10")
    code, folder = train("world", *length, *options(world), *where)
    assert code == 0
    expected = plain(*length, global_batch(world))
    assert_moved(folder, 10, 20)
    # Dense weights: within the last place of one between 1 and 2.
    for prefix, limit in (("bottom", 2**-23), ("top", 2**-23), ("embedding", 1e-6)):
        found = largest_difference(tensors(expected, 20), tensors(folder, 20), prefix)
        assert found <= limit, prefix


@pytest.mark.parametrize("world", parameters(COVERING, QUICK))
def test_a_world_of_processes_is_plain_training_of_the_global_batch(
    world: World, train: Train, plain: PlainRuns
) -> None:
    assert_near(world, train, plain)


IN_PROCESS = [world for world in EVERY if world.sharding == "table_wise"]


@pytest.mark.parametrize("world", parameters(IN_PROCESS))
def test_a_world_of_one_process_is_plain_training_of_the_global_batch(
    world: World, train: Train, plain: PlainRuns
) -> None:
    assert_near(world, train, plain, "parallel.world=in_process")


LONG = ("train.steps=200", "train.epochs=7", "checkpoint.every=100")


@pytest.mark.parametrize(
    "world", parameters([world for world in COVERING if world.sharding == "table_wise"])
)
def test_table_wise_worlds_are_the_same_bit_for_bit(world: World, train: Train) -> None:
    code, processes = train("processes", *LONG, *options(world))
    assert code == 0
    code, in_process = train("one", *LONG, *options(world), "parallel.world=in_process")
    assert code == 0
    assert_same(processes, in_process, 200)
    assert_moved(processes, 100, 200)
    assert summary(processes)["test"] == summary(in_process)["test"]


@pytest.mark.parametrize(
    "world", parameters([world for world in COVERING if world.sharding != "table_wise"])
)
def test_other_shardings_learn_as_much(world: World, train: Train, plain: PlainRuns) -> None:
    length = (*LONG, "optimizer.lr=0.01")
    code, folder = train("world", *length, *options(world))
    assert code == 0
    expected = plain(*length, global_batch(world))
    assert_moved(folder, 100, 200)
    loss = summary(expected)["test"]["loss"]
    assert summary(folder)["test"]["loss"] == pytest.approx(loss, abs=1e-5)
