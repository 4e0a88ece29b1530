"""Trainers with a cache learn what its rule says, send every gradient once, and can go on."""

from collections.abc import Callable, Mapping
from itertools import product

import numpy as np
import pytest
import torch
from table_world import LR, SEED, SPEC, World, assert_moved, ids_of, joined, reference_gradient
from test_row_cache import Reference
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused, Served, TableOptimizer
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.types import BatchNumber, DataError, Version

TABLES = len(SPEC.table_rows)
KEYS = 1000  # more than any table has rows
MANY = Served(cache_rows=10_000, cache_batches=3)


def named(key: int) -> tuple[str, int]:
    table, row = divmod(key, KEYS)
    return f"embedding.{table + 1}.weight", row


class ReferenceTrainer:
    """Its cache as dictionaries: rows as they were fetched, and sums of their gradients."""

    def __init__(self, limits: Served, trainer: int, trainers: int) -> None:
        self.reference = Reference(limits)
        self.rows: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.of = trainer, trainers

    def learn(self, weights: dict[str, Tensor], batch: int) -> tuple[Rows, Tensor]:
        """What leaves with a batch that fetches from `weights`."""
        trainer, trainers = self.of
        pairs = enumerate(ids_of(trainer, batch).tolist())
        keys = sorted({table * KEYS + row for table, ids in pairs for row in ids})
        fetched, left = self.reference.turn(batch, keys)
        for key in fetched:
            name, row = named(key)
            self.rows[key] = weights[name][row].clone()
            self.sums[key] = torch.zeros(SPEC.embedding_dim)
        seen = {name: weight.clone() for name, weight in weights.items()}
        for key in keys:
            name, row = named(key)
            seen[name][row] = self.rows[key]
        _, gradient_KD = reference_gradient(seen, trainer, batch, trainers)
        for key, gradient_D in zip(keys, gradient_KD, strict=True):
            self.sums[key] += gradient_D
        ids = np.array([key % KEYS for key in left], np.int64)
        counts = np.bincount([key // KEYS for key in left], minlength=TABLES)
        sums = [self.sums.pop(key) for key in left]
        sum_LD = torch.stack(sums) if sums else torch.zeros(0, SPEC.embedding_dim)
        return Rows(ids, counts), sum_LD


@pytest.mark.parametrize(
    ("trainers", "servers", "staleness", "limits", "optimizer"),
    [
        (1, 1, 0, MANY, "sgd"),
        (1, 1, 0, MANY, "adam"),
        (2, 2, 2, Served(cache_rows=150, cache_batches=4), "adagrad"),
        (2, 2, 2, Served(cache_rows=150, cache_batches=4), "rowwise_adam"),
        (3, 1, 0, Served(cache_rows=20, cache_batches=2), "rowwise_adagrad"),
    ],
)
def test_rows_are_as_old_and_sums_as_long_as_the_rule_says(
    trainers: int, servers: int, staleness: int, limits: Served, optimizer: TableOptimizer
) -> None:
    options = Fused(optimizer=optimizer)
    world = World(trainers, servers, staleness, options, cache=limits)
    world.learn(0, 16)
    rows = TableRows(SPEC, options)
    rows.draw(SEED)
    versions: list[dict[str, Tensor]] = [joined(rows.pieces())]
    caches = [ReferenceTrainer(limits, trainer, trainers) for trainer in range(trainers)]
    for batch in range(16):
        weights = versions[max(0, batch - staleness)]
        rows.update([cache.learn(weights, batch) for cache in caches], LR)
        versions.append(joined(rows.pieces()))
    for name, table in world.weights().items():
        assert torch.equal(table, versions[-1][name]), name
    assert_moved(world.weights())


def steady(tables: Tables, trainer: int, batches: range) -> Program[None]:
    """Gradients that are multiples of 1/64, so that their sums are exact."""
    for number in batches:
        batch, bags = BatchNumber(number), Bags(ids_of(trainer, number))
        pooled_BFD = yield from tables.lookup(batch, bags, 1.0)
        yield from tables.update(batch, steady_gradient(trainer, number, pooled_BFD.shape))


def steady_gradient(trainer: int, batch: int, shape: torch.Size) -> Tensor:
    rng = np.random.default_rng([trainer, batch, 7])
    return torch.from_numpy(rng.integers(-8, 9, shape).astype(np.float32)) / 64


def steady_world(limits: Served, batches: range) -> tuple[World, dict[str, Tensor]]:
    """One that has learned from rows of 0, and the sums of all its gradients."""
    world = World(2, 2, 0, cache=limits)
    for server in world.servers:
        for piece in server.pieces():
            piece.view.zero_()
    world.runner.run({n: steady(one, n, batches) for n, one in enumerate(world.tables)})
    total = {name: torch.zeros_like(table) for name, table in world.weights().items()}
    for trainer, batch in product(range(2), batches):
        ids_FB = ids_of(trainer, batch)
        shape = torch.Size((ids_FB.shape[1], TABLES, SPEC.embedding_dim))
        gradient_BFD = steady_gradient(trainer, batch, shape)
        for table, ids_B in enumerate(ids_FB):
            sum_RD = total[f"embedding.{table + 1}.weight"]
            sum_RD.index_add_(0, ids_B, gradient_BFD[:, table] / 2)
    return world, total


def assert_sent(world: World, sums: Mapping[str, Tensor]) -> None:
    for name, table in world.weights().items():
        assert torch.equal(table, -LR * sums[name]), name
        assert table.abs().sum() > 0


@pytest.mark.parametrize(
    "limits", [Served(cache_rows=1, cache_batches=1), Served(cache_rows=60, cache_batches=4), MANY]
)
def test_every_gradient_is_sent_once_or_held(limits: Served) -> None:
    world, expected = steady_world(limits, range(30))
    for trainer in range(len(world.tables)):
        state = held_by(world, trainer)
        keys_N, sums_ND = state[f"lookups.{trainer}.keys"], state[f"lookups.{trainer}.sums"]
        assert 0 < len(keys_N) <= limits.cache_rows
        assert sums_ND.abs().sum() > 0
        for key, sum_D in zip(keys_N.tolist(), sums_ND, strict=True):
            expected[f"embedding.{(key >> 32) + 1}.weight"][key & 0xFFFFFFFF] -= sum_D
    assert_sent(world, expected)


@pytest.mark.parametrize("limits", [Served(cache_rows=60, cache_batches=4), MANY])
def test_what_is_held_can_be_handed_over(limits: Served) -> None:
    """By a trainer that leaves; a checkpoint then holds nothing of it."""
    world, expected = steady_world(limits, range(12))
    world.runner.run({n: one.flush() for n, one in enumerate(world.tables)})
    assert_sent(world, expected)
    assert not any(held_by(world, trainer) for trainer in range(len(world.tables)))


def held_by(world: World, trainer: int = 0) -> dict[str, Tensor]:
    pieces = world.runner.run({trainer: world.tables[trainer].state_ahead()})[trainer]
    return {piece.name: piece.view for piece in pieces}


LONG = Served(cache_rows=60, cache_batches=4)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("keys", lambda one: one.index_fill(0, torch.tensor([3]), 1 << 50), r"keys\[3\] = 112589"),
        ("keys", lambda one: one - (1 << 40), r"keys\[0\] = -10[0-9]+: is no row of a table"),
        ("keys", lambda one: one.flip(0), r"keys\[1\] = .* or not after the one before"),
        ("keys", lambda one: one.float(), r"keys: torch.float32 of shape .* expected torch.int64"),
        ("ages", lambda one: one - 9, r"ages\[0\] = .* with embedding.cache_batches = 4"),
        ("ages", lambda one: one + (1 << 62), r"ages\[0\] = .* batches since it was fetched"),
        ("ages", lambda one: one.flip(1), r"ages\[\d+\] = \[1, [234]\]"),
        (
            "ages",
            lambda one: one[:, 0],
            r"ages: torch.int64 of shape \[\d+\], expected .* \[N, 2\]",
        ),
        ("rows", lambda one: one[1:], r"keys and other numbers of ages, rows or sums"),
        ("sums", lambda one: one.double(), r"sums: torch.float64 of shape"),
        (
            "ahead.0.0.keys",
            lambda one: one[1:],
            r"ahead.0.0.keys: \[\d+\] with \[\d+, 8\] numbers are no rows of",
        ),
        ("ahead.0.1.keys", lambda one: one.flip(0), r"ahead.0.1.keys: \[\d+\] with"),
        ("ahead.0.1.numbers", lambda one: one[:, :3], r"ahead.0.1.keys: \[\d+\] with \[\d+, 3\]"),
    ],
)
def test_what_no_cache_can_have_held_is_refused(
    name: str, change: Callable[[Tensor], Tensor], told: str
) -> None:
    world = World(1, 1, 2, cache=LONG)
    world.learn(0, 9)
    held = held_by(world)
    key = f"lookups.0.{name}"
    other = World(1, 1, 2, cache=LONG)
    other.tables[0].restart(Version(9), held)
    with pytest.raises(DataError, match=rf"^lookups\.0\.(?:\*: \d+ )?{told}"):
        other.tables[0].restart(Version(9), {**held, key: change(held[key])})


def test_rows_of_another_batch_or_a_larger_cache_are_refused() -> None:
    world = World(1, 1, 2, cache=MANY)
    world.learn(0, 9)
    held, small = held_by(world), World(1, 1, 2, cache=Served(cache_rows=5, cache_batches=3))
    with pytest.raises(DataError, match=r"lookups\.0\.keys: \d+ of embedding.cache_rows = 5"):
        small.tables[0].restart(Version(9), held)
    other = World(1, 1, 2, cache=MANY)
    swapped = {
        f"lookups.0.ahead.0.{n}.{x}": held[f"lookups.0.ahead.0.{1 - n}.{x}"]
        for n, x in product((0, 1), ("keys", "numbers"))
    }
    other.tables[0].restart(Version(9), {**held, **swapped})
    with pytest.raises(DataError, match=r"lookups.0.ahead: other rows than those of batch 9"):
        other.learn(9, 1)


def test_a_rest_changes_nothing_that_is_kept() -> None:
    """Rows that were asked for ahead are asked for again, and here answered alike."""
    unbroken, world = (
        World(2, 2, 3, cache=Served(cache_rows=60, cache_batches=4)) for _ in range(2)
    )
    unbroken.learn(0, 20)
    world.learn(0, 9)
    world.runner.run({n: tables.settle() for n, tables in enumerate(world.tables)})
    world.learn(9, 11)
    for name, table in unbroken.weights().items():
        assert torch.equal(table, world.weights()[name]), name
    assert_moved(world.weights())
