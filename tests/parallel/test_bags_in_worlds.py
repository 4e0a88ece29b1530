"""Worlds of pipeline stages take batches of bags; what waits in them is saved and restored."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from bag_draws import counted, drawn_bags
from tiny_world import SEED, SMALL, TABLES, Layout, TinyWorld, columns, draw_batch
from torch import Tensor

from dlrm_hybrid.bags import Bags, joined, part
from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.parallel.schedule import Dsp
from dlrm_hybrid.parallel.stage import Inputs

CUTS = ("bottom.2", "top.2")
STALE = Dsp(delays=(1, 1, 0), staleness=(4, 2, 0))
ROWS = 12
BagsOf = Callable[[int, int], Bags[Tensor]]  # of a batch, and its rows


def plain(number: int, rows: int) -> Bags[Tensor]:
    return Bags(columns(draw_batch(SMALL, rows, number))[1])


def ones(number: int, rows: int) -> Bags[Tensor]:
    return counted(plain(number, rows).values)


def jagged(number: int, rows: int) -> Bags[Tensor]:
    return tensor_bags(drawn_bags(number, SMALL.table_rows, rows))


def batches(number: int, trainers: int, bags_of: BagsOf) -> list[Inputs]:
    """Of each trainer; the same rows whatever the number of trainers."""
    rows = trainers * ROWS
    bags = bags_of(number, rows).map(Tensor.numpy)
    dense_BI, _, label_B = columns(draw_batch(SMALL, rows, number))
    slices = [slice(first, first + ROWS) for first in range(0, rows, ROWS)]
    return [
        Inputs(
            rows=ROWS,
            dense_BI=dense_BI[one],
            bags=tensor_bags(part(bags, one)),
            label_B=label_B[one],
        )
        for one in slices
    ]


def step(world: TinyWorld, tick: int, bags_of: BagsOf) -> float:
    inputs = batches(tick, world.layout.trainers, bags_of)
    return sum(one.loss_sum for one in world.step(tick, inputs))


def assert_same(world: TinyWorld, other: TinyWorld, still: frozenset[str] = frozenset()) -> None:
    """And moved, but for some tensors."""
    found, first = other.tensors(), TinyWorld(SMALL, world.layout).tensors()
    for name, tensor in world.tensors().items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(first[name], tensor) is (name in still), name


EMPTY = frozenset({"embedding.26.weight"})
LAYOUTS = [
    Layout(),
    Layout(CUTS, trainers=2, servers=1, microbatches=4, schedule="one_f_one_b"),
    Layout(CUTS, trainers=2, servers=2, schedule=STALE),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bags_of_one_id_learn_the_bits_of_ids(layout: Layout) -> None:
    one, other = TinyWorld(SMALL, layout), TinyWorld(SMALL, layout)
    for tick in range(10):
        assert step(one, tick, plain) == step(other, tick, ones)
    assert one.drain(10) == other.drain(10)
    assert_same(one, other)


@pytest.mark.parametrize("paused", [3, 9])
def test_bags_in_flight_are_saved_and_restored(paused: int) -> None:
    layout = LAYOUTS[-1]
    unbroken, resumed = TinyWorld(SMALL, layout), TinyWorld(SMALL, layout)
    for tick in range(paused):
        step(unbroken, tick, jagged)
    saved = unbroken.save(paused)
    assert any(name.endswith(".offsets") for state in saved.values() for name in state)
    resumed.load(paused, saved)
    for tick in range(paused, 2 * paused):
        assert step(unbroken, tick, jagged) == step(resumed, tick, jagged) > 0
    assert unbroken.drain(2 * paused) == resumed.drain(2 * paused)
    assert_same(unbroken, resumed, EMPTY)


@pytest.mark.parametrize("trainers", [1, 3])
def test_a_world_learns_from_bags_what_one_model_learns(trainers: int) -> None:
    """Bit for bit where nothing is summed in another order: with one trainer."""
    world = TinyWorld(SMALL, Layout(CUTS, trainers=trainers, servers=1))
    alone = TinyWorld(SMALL, Layout())
    for tick in range(10):
        inputs = batches(tick, trainers, jagged)
        of_all = joined([one.bags.map(Tensor.numpy) for one in inputs if one.bags is not None])
        expected_bags = jagged(tick, trainers * ROWS)
        assert np.array_equal(of_all.values, expected_bags.values.numpy())
        full = draw_batch(SMALL, trainers * ROWS, tick)
        world.step(tick, inputs)
        alone.step(tick, [replace(full, bags=expected_bags)])
    if trainers == 1:
        assert_same(alone, world, EMPTY)
    expected = alone.tensors()
    for name, tensor in world.tensors().items():
        assert (tensor - expected[name]).abs().max() <= 1e-6, name


def test_predictions_are_those_of_the_whole_model() -> None:
    world = TinyWorld(SMALL, Layout(CUTS, microbatches=4))
    model = Dlrm(SMALL, TABLES, Precision.FLOAT32, SEED)
    for number, rows in enumerate((64, 7, 1)):
        bags = jagged(number, rows)
        batch = replace(draw_batch(SMALL, rows, number), bags=bags)
        *_, logit_B = world.predict(number, [batch])
        assert logit_B is not None
        with torch.no_grad():
            assert torch.equal(logit_B, model(columns(batch)[0], bags))
