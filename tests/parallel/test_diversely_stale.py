"""`schedule=dsp` against numbers of an independent implementation in numpy, and its laws."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stale_blocks import Blocks, initial

from dlrm_hybrid.parallel.schedule import Dsp, Pipeline

NONE = Dsp(delays=(0, 0, 0), staleness=(0, 0, 0))
SHORT = Dsp(delays=(1, 1, 0), staleness=(4, 2, 0))
MIDDLE = Dsp(delays=(2, 2, 0), staleness=(6, 3, 0))
LONG = Dsp(delays=(3, 3, 0), staleness=(10, 5, 0))
# Of 10 batches: norm of all weights, loss of the last batch, one weight of each block and a row.
GOLDEN = {
    NONE: (
        5.363671637208886,
        0.663076238715283,
        0.06502060616219069,
        -0.6085038656874542,
        0.1369889310699896,
    ),
    SHORT: (
        5.362275747859495,
        0.661055742827733,
        0.06553302883957769,
        -0.6083008740560746,
        0.1488544491128658,
    ),
    MIDDLE: (
        5.360906602967346,
        0.659330519884949,
        0.0664256130317969,
        -0.6085323355694211,
        0.15020718866664315,
    ),
    LONG: (
        5.3582253927643375,
        0.665011094652645,
        0.06795488806736957,
        -0.6085361565289747,
        0.15452925047551122,
    ),
}
MOMENTUM = (5.36522852769865, 0.265308154853651)


def first(ready):
    return ready[0]


@pytest.mark.parametrize("schedule", GOLDEN, ids=str)
def test_ten_batches_give_the_numbers_of_another_implementation(schedule: Dsp) -> None:
    blocks = Blocks(schedule)
    losses = blocks.run(10, first)
    weights = blocks.weights()
    norm = float(torch.stack([one.square().sum() for one in weights.values()]).sum().sqrt())
    found = (norm, losses[-1], *(float(weights[name][0, 0]) for name in ("w1", "e0", "w4")))
    assert len(losses) == 10
    np.testing.assert_allclose(found, GOLDEN[schedule], rtol=0, atol=1e-12)
    assert all(not torch.equal(weights[name], one) for name, one in initial().items())


def test_ten_batches_with_momentum_give_the_numbers_of_another_implementation() -> None:
    blocks = Blocks(SHORT, lr=0.05, momentum=0.9)
    blocks.run(10, first)
    weights = blocks.weights()
    norm = float(torch.stack([one.square().sum() for one in weights.values()]).sum().sqrt())
    found = (norm, float(weights["w4"][0, 0]))
    np.testing.assert_allclose(found, MOMENTUM, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("schedule", "seeds"), [(SHORT, 10), (MIDDLE, 3), (LONG, 3)], ids=str)
def test_any_order_of_events_gives_the_same_bits_and_queues_stay_short(
    schedule: Dsp, seeds: int
) -> None:
    orders = [first, *(random.Random(seed).choice for seed in range(seeds))]
    runs = [Blocks(schedule) for _ in orders]
    losses = [blocks.run(16, order) for blocks, order in zip(runs, orders, strict=True)]
    weights = runs[0].weights()
    for blocks, found in zip(runs[1:], losses[1:], strict=True):
        assert found == losses[0]
        for name, one in blocks.weights().items():
            assert torch.equal(one, weights[name]), name
        assert max(blocks.waited.values()) <= 1 + max(schedule.staleness)
    assert len({tuple(sorted(blocks.waited.items())) for blocks in runs}) > 1, "one order only"


@pytest.mark.parametrize("schedule", [SHORT, MIDDLE, LONG], ids=str)
def test_weights_that_do_not_move_give_the_losses_of_backpropagation(schedule: Dsp) -> None:
    runs = [Blocks(one, lr=0.0) for one in (NONE, schedule)]
    expected, found = (blocks.run(12, first) for blocks in runs)
    assert found == expected and len(set(found)) == 12
    for blocks in runs:
        for name, one in blocks.weights().items():
            assert torch.equal(one, initial()[name]), name


@st.composite
def stale(draw: st.DrawFn) -> Dsp:
    """Any delays of activations and gradients; the staleness follows."""
    stages = draw(st.integers(2, 6))
    numbers = st.lists(st.integers(0, 4), min_size=stages - 1, max_size=stages - 1)
    delays, gradient_delays = draw(numbers), draw(numbers)
    staleness = [sum(delays[k:]) + sum(gradient_delays[k:]) for k in range(stages)]
    return Dsp(delays=(*delays, 0), staleness=tuple(staleness))


@settings(max_examples=40)
@given(stale(), st.integers(1, 30))
def test_each_batch_is_so_stale_and_every_block_learns_from_it_once(
    schedule: Dsp, batches: int
) -> None:
    stages = len(schedule.delays)
    pipeline = Pipeline.of(schedule, stages, 1)
    learned: list[Counter[int]] = [Counter() for _ in range(stages)]
    entered: list[dict[int, int]] = [{} for _ in range(stages)]
    most = [0] * stages
    between: dict[tuple[str, int], set[int]] = {}
    for tick in range(batches + pipeline.most_in_flight):
        # Forward from the bottom up, then backward from the top down: a tick without waiting.
        order = [(k, "F") for k in range(stages)] + [(k, "B") for k in reversed(range(stages))]
        for stage, kind in order:
            batch = tick - pipeline.delay(stage, kind, 0)
            if not 0 <= batch < batches:
                continue
            source = stage - 1 if kind == "F" else stage + 1
            if 0 <= source < stages:
                between[kind, source].remove(batch)
            if 0 <= 2 * stage - source < stages:
                between.setdefault((kind, stage), set()).add(batch)
            if kind == "F":
                entered[stage][batch] = learned[stage].total()
                most[stage] = max(most[stage], len(entered[stage]))
                assert len(between.get((kind, stage), ())) <= 1 + schedule.delays[stage]
                continue
            stale_by = learned[stage].total() - entered[stage].pop(batch)
            assert stale_by == min(batch, schedule.staleness[stage])
            learned[stage][batch] += 1
        if tick < batches:
            for stage in range(stages):
                done = pipeline.pushed(stage, tick + 1)
                assert done == learned[stage].total()
    assert all(one == Counter(range(batches)) for one in learned)
    assert most == [min(batches, 1 + m) for m in schedule.staleness]
