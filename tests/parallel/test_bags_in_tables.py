"""Every kind of tables takes bags of any size; of one id each they learn the bits of plain ids."""

from collections.abc import Callable

import pytest
import torch
from bag_draws import counted, drawn_bags, pooled_by_torch
from table_world import (
    LR,
    ROWS,
    SPEC,
    BagsOf,
    Gradient,
    World,
    assert_moved,
    drawn,
    gradient_of,
    ids_of,
    learning,
    plain_bags,
)
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.sharding import casts
from dlrm_hybrid.model.tables import Served
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.parallel.tables.order import ArrivalOrder
from dlrm_hybrid.parallel.tables.shared import AllIds, EachIdOnce, JointTables, SharedTables
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import BatchNumber

BATCHES = 12
Learned = Callable[[BagsOf, Gradient], dict[str, Tensor]]


def counted_bags(trainer: int, batch: int) -> Bags[Tensor]:
    return counted(ids_of(trainer, batch))


def jagged_bags(trainer: int, batch: int) -> Bags[Tensor]:
    """Batches of trainers differ in their rows."""
    rows = ROWS + 3 * trainer
    return tensor_bags(drawn_bags([trainer, batch], SPEC.table_rows, rows))


def weighted_bags(trainer: int, batch: int) -> Bags[Tensor]:
    rows = ROWS + 3 * trainer
    return tensor_bags(drawn_bags([trainer, batch], SPEC.table_rows, rows, weighted=True))


def steady(pooled_BFD: Tensor, trainer: int) -> Tensor:
    """Draws sums of rows to a point, so that rounding does not grow."""
    return (pooled_BFD - trainer - 1) / 4096


def local(bags_of: BagsOf, gradient: Gradient) -> dict[str, Tensor]:
    embeddings = drawn()
    tables = LocalTables(embeddings, 1, SpanClock())
    World().runner.run({0: learning(tables, 0, range(BATCHES), 0, bags_of, gradient)})
    return embeddings.weights()


def shared(trainers: int, deduplicate: bool) -> Learned:
    def learned(bags_of: BagsOf, gradient: Gradient) -> dict[str, Tensor]:
        embeddings, group = drawn(), tuple(range(trainers))
        look_up = AllIds(embeddings, casts("float32"))
        if deduplicate:
            formats = row_formats("float32", SPEC.table_rows)
            look_up = EachIdOnce.of(embeddings, SPEC, formats, trainers)
        joint = JointTables(look_up, SpanClock())
        tables = [SharedTables(joint, group) for _ in group]
        programs = {n: learning(tables[n], n, range(BATCHES), 0, bags_of, gradient) for n in group}
        World(trainers).runner.run(programs)
        return embeddings.weights()

    return learned


def served(
    trainers: int,
    servers: int,
    staleness: int = 0,
    cache: Served | None = None,
    is_async: bool = False,
) -> Learned:
    def learned(bags_of: BagsOf, gradient: Gradient) -> dict[str, Tensor]:
        order = ArrivalOrder() if is_async else None
        world = World(trainers, servers, staleness, cache=cache, order=order)
        world.learn(0, BATCHES, bags_of, gradient)
        return world.weights()

    return learned


KINDS: dict[str, Learned] = {
    "local": local,
    "all ids": shared(2, deduplicate=False),
    "each id once": shared(3, deduplicate=True),
    "served": served(2, 1),
    "two servers": served(2, 2),
    "stale": served(2, 2, 3),
    "cached": served(2, 2, 0, Served(cache_rows=60, cache_batches=4)),
    "async": served(2, 2, 1, is_async=True),
}
EXACT = {"local": 1, "all ids": 2, "each id once": 3, "served": 2, "two servers": 2}  # trainers


@pytest.mark.parametrize("kind", KINDS)
def test_bags_of_one_id_learn_the_bits_of_ids(kind: str) -> None:
    learned = KINDS[kind]
    plain, same = learned(plain_bags, gradient_of), learned(counted_bags, gradient_of)
    for name, weight in plain.items():
        assert torch.equal(weight, same[name]), name
    assert_moved(plain)


@pytest.mark.parametrize("bags_of", [jagged_bags, weighted_bags])
@pytest.mark.parametrize("kind", EXACT)
def test_tables_learn_from_bags_what_torch_learns(kind: str, bags_of: BagsOf) -> None:
    found, trainers = KINDS[kind](bags_of, steady), EXACT[kind]
    expected = {name: weight.clone() for name, weight in drawn().weights().items()}
    for batch in range(BATCHES):
        bags_T = [bags_of(trainer, batch) for trainer in range(trainers)]
        leaves = {name: weight.clone().requires_grad_() for name, weight in expected.items()}
        for trainer, bags in enumerate(bags_T):
            pooled_BFD = pooled_by_torch(leaves, bags)
            pooled_BFD.backward(steady(pooled_BFD.detach(), trainer) / trainers)
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            expected[name] -= LR * leaf.grad
    first, last = drawn().weights(), f"embedding.{len(SPEC.table_rows)}.weight"
    for name, weight in found.items():
        assert (weight - expected[name]).abs().max() <= 1e-6, name
        assert bool((weight - first[name]).abs().max() > 0.05) is (name != last), name


@pytest.mark.parametrize("bags_of", [jagged_bags, weighted_bags])
@pytest.mark.parametrize("kind", ["served", "cached"])
def test_predictions_are_pooled(kind: str, bags_of: BagsOf) -> None:
    world = World(1, 2, cache=Served(cache_rows=60, cache_batches=4) if kind == "cached" else None)
    world.learn(0, 5, bags_of)
    bags = bags_of(0, 99)
    (found_BFD,) = world.runner.run({0: world.tables[0].predict(bags)}).values()
    assert torch.allclose(found_BFD, pooled_by_torch(world.weights(), bags), atol=1e-6)
    assert found_BFD.abs().max() > 0.1


def test_an_empty_batch_asks_for_nothing() -> None:
    """All bags of a batch may be empty."""
    world = World(1, 2)
    empty = tensor_bags(drawn_bags(0, SPEC.table_rows, 0))
    bags = Bags(empty.values, torch.zeros(26 * 4 + 1, dtype=torch.int64), 26)

    world.learn(0, 3, lambda trainer, batch: bags if batch == 1 else jagged_bags(trainer, batch))
    (pooled_BFD,) = world.runner.run({0: world.tables[0].predict(bags)}).values()
    assert pooled_BFD.shape == (4, 26, 8) and not pooled_BFD.any()
    (none_BFD,) = world.runner.run({0: world.tables[0].predict(empty)}).values()
    assert none_BFD.shape == (0, 26, 8)
    world.tables[0].prefetch(BatchNumber(3), bags)
