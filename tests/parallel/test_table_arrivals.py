"""In order of arrival nobody waits, every update counts once, and only the order decides."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_world import (
    LR,
    SEED,
    SGD,
    SPEC,
    World,
    assert_moved,
    joined,
    learning,
    reference_gradient,
)
from test_table_versions import Message, messages
from torch import Tensor

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.model.optimizer import Linear
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.tables.order import (
    Apply,
    ArrivalOrder,
    BatchOf,
    BatchOrder,
    PredictionOf,
    SendRows,
)
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.types import BatchNumber, DlrmError, Version
from dlrm_hybrid.wire.frame import Frame

SEEDS = st.integers(0, 2**32 - 1)
FALLING = Linear(base_lr=LR, steps=40)


def batch_of(trainer: int, batch: int) -> BatchOf:
    return BatchOf(trainer, BatchNumber(batch))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 30),
    SEEDS,
)
def test_every_update_makes_one_version_whatever_comes_twice(
    trainers: list[tuple[int, int]], staleness: int, begun: int, seed: int
) -> None:
    """Trainers begin at counts of their own, and none waits for another."""
    state = ArrivalOrder().begin(len(trainers), Version(begun))
    left = [list(messages(t, staleness, *one)) for t, one in enumerate(trainers)]
    sent: list[Message] = []
    applied: list[BatchOf] = []
    rng = np.random.default_rng(seed)
    while any(left):
        again = bool(sent) and rng.random() < 0.3
        if again:
            kind, of = sent[rng.integers(len(sent))]
        else:
            kind, of = left[rng.choice([n for n, one in enumerate(left) if one])].pop(0)
            sent.append((kind, of))
        before = state
        state, actions = (state.on_question if kind == "lookup" else state.on_update)(of)
        if of in applied:
            assert (state, actions) == (before, ())
        elif kind == "lookup":
            assert actions == (SendRows((of,), is_kept=False),)
            assert state.version == before.version
            assert state == before or not again
        else:
            assert actions == (Apply((of,), before.version // len(trainers)),)
            assert state.version == before.version + 1
            applied.append(of)
    assert state.version == begun + sum(batches for _, batches in trainers)
    assert len(set(applied)) == len(applied)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 9), SEEDS)
def test_each_thread_of_a_trainer_is_in_order_by_itself(
    trainers: int, threads: int, first: int, seed: int
) -> None:
    """Batch n of a trainer is of its thread n mod H; one thread may be far ahead of another."""
    state = ArrivalOrder(threads).begin(trainers, Version(0))
    assert state.version_at(5) == 5 * trainers
    left = [
        [
            (kind, batch_of(trainer, number))
            for number in range(first + thread, first + thread + 5 * threads, threads)
            for kind in ("lookup", "update")
        ]
        for trainer in range(trainers)
        for thread in range(threads)
    ]
    rng = np.random.default_rng(seed)
    while any(left):
        kind, of = left[rng.choice([n for n, one in enumerate(left) if one])].pop(0)
        before = state.version
        state, actions = (state.on_question if kind == "lookup" else state.on_update)(of)
        if kind == "lookup":
            assert actions == (SendRows((of,), is_kept=False),)
        else:
            assert actions == (Apply((of,), before // trainers),)
    assert state.version == trainers * threads * 5
    with pytest.raises(DlrmError, match=f"update of batch {of.batch + threads} by trainer"):
        state.on_update(of._replace(batch=BatchNumber(of.batch + threads)))


def test_predictions_are_answered_at_once() -> None:
    state = ArrivalOrder().begin(2, Version(4))
    asked = PredictionOf(1, Version(17))
    assert state.on_question(asked) == (state, (SendRows((asked,), is_kept=False),))


def test_a_checkpoint_holds_what_has_been_applied() -> None:
    """Of a step: an update of every trainer. Learning rates go on from there."""
    state = ArrivalOrder().begin(2, Version(0))
    assert state.version_at(5) == 10
    state = ArrivalOrder().begin(2, state.version_at(5))
    state, _ = state.on_question(batch_of(0, 9))
    _, (applied,) = state.on_update(batch_of(0, 9))
    assert applied == Apply((batch_of(0, 9),), step=5)
    assert BatchOrder(0).begin(2, Version(7)).version_at(8) == 8


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_a_trainer_joins_again_with_a_higher_count(ahead: int) -> None:
    """It was lost between two lookups and their updates, and nobody told the tables."""
    state = ArrivalOrder().begin(2, Version(0))
    for batch in (3, 4):
        state, _ = state.on_question(batch_of(1, batch))
    for number in (3 + ahead, 4 + ahead):
        state, actions = state.on_question(batch_of(1, number))
        assert actions
        state, actions = state.on_update(batch_of(1, number))
        assert len(actions) == 1
    assert state.version == 2
    assert state.on_update(batch_of(1, 3)) == (state, ())


def test_an_update_that_is_not_due_is_refused() -> None:
    state = ArrivalOrder().begin(2, Version(0))
    with pytest.raises(DlrmError, match=r"update of batch 0 by trainer 0: too early, .* due: none"):
        state.on_update(batch_of(0, 0))
    state, _ = state.on_question(batch_of(1, 5))
    with pytest.raises(DlrmError, match=r"update of batch 6 by trainer 1: too early, .* due: 5"):
        state.on_update(batch_of(1, 6))
    state, _ = state.on_question(batch_of(1, 9))  # it has joined again: 6 to 8 are not due
    state, actions = state.on_update(batch_of(1, 6))
    assert not actions
    with pytest.raises(DlrmError, match=r"update of batch 10 by trainer 1: too early, .* due: 9"):
        state.on_update(batch_of(1, 10))


@pytest.mark.parametrize("servers", [1, 2])
def test_one_trainer_learns_the_bits_of_batch_order(servers: int) -> None:
    worlds = [
        World(1, servers, order=order, schedule=FALLING)
        for order in (BatchOrder(0), ArrivalOrder())
    ]
    for world in worlds:
        world.learn(0, 30)
    in_batches, arrived = (world.weights() for world in worlds)
    for name, table in arrived.items():
        assert torch.equal(table, in_batches[name]), name
    assert_moved(arrived)


class Uneven:
    """Trainers of a world that learn one batch each when they are drawn; counts of their own."""

    def __init__(self, world: World, counts: list[int]) -> None:
        self.world, self.counts = world, counts

    def learn(self, order: list[int]) -> None:
        for trainer in order:
            batch = self.counts[trainer]
            program = learning(
                self.world.tables[trainer], trainer, range(batch, batch + 1), self.world.staleness
            )
            self.world.runner.run({trainer: program})
            self.counts[trainer] += 1

    def settle(self) -> None:
        self.world.runner.run({n: one.settle() for n, one in enumerate(self.world.tables)})


def drawn_order(trainers: int, batches: int, seed: int) -> list[int]:
    """Some trainers are twice as fast as others."""
    chances = np.arange(1, trainers + 1)
    rng = np.random.default_rng(seed)
    return rng.choice(trainers, batches, p=chances / chances.sum()).tolist()


@pytest.mark.parametrize(("trainers", "servers", "staleness"), [(2, 1, 0), (3, 2, 0), (2, 2, 3)])
def test_the_order_of_messages_decides_the_bits(
    trainers: int, servers: int, staleness: int
) -> None:
    """Against one set of rows that is told the same order."""
    order = drawn_order(trainers, 30, seed=staleness)
    world = World(trainers, servers, staleness, order=ArrivalOrder(), schedule=FALLING)
    uneven = Uneven(world, [0] * trainers)
    uneven.learn(order)
    assert len(set(uneven.counts)) > 1
    rows = TableRows(SPEC, SGD)
    rows.draw(SEED)
    seen: dict[tuple[int, int], dict[str, Tensor]] = {}
    counts = [0] * trainers
    for version, trainer in enumerate(order):
        batch = counts[trainer]
        for later in range(batch, batch + staleness + 1):
            if (trainer, later) not in seen:
                seen[trainer, later] = joined(rows.pieces())
        gradient = reference_gradient(seen[trainer, batch], trainer, batch, trainers)
        rows.update([gradient], FALLING.lr(version // trainers))
        counts[trainer] += 1
    assert [server.version for server in world.servers] == [30] * servers
    for name, table in world.weights().items():
        assert torch.equal(table, joined(rows.pieces())[name]), name
    assert_moved(world.weights())


def test_a_trainer_at_rest_has_been_answered_by_every_table_server() -> None:
    """They take its messages in order, so its updates are applied when it goes on."""
    world = World(1, 3, order=ArrivalOrder())
    world.learn(0, 3)
    before = world.counters.sent.snapshot()[Traffic.EMBEDDING].messages
    waiting = world.tables[0].settle()
    awaited: list[int] = []
    effect = next(waiting)
    while True:
        assert isinstance(effect, Receive)
        awaited.append(effect.sender)
        try:
            effect = waiting.send(world.runner.run({0: receiving(effect)})[0])
        except StopIteration:
            break
    assert awaited == list(world.topology.table_server_group)
    assert world.counters.sent.snapshot()[Traffic.EMBEDDING].messages == before + 2 * 3


def receiving(effect: Receive) -> Program[Frame]:
    return (yield effect)
