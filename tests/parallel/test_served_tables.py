"""Tables on table servers learn what tables in the trainers learn, and see what they should."""

from collections.abc import Sequence

import pytest
import torch
from table_world import (
    LR,
    ROWS,
    SEED,
    SPEC,
    World,
    assert_moved,
    ids_of,
    joined,
    reference_gradient,
    repeat,
)
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.memory import LevelOptions
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused, Served, TableOptimizer
from dlrm_hybrid.parallel.effects import Outgoing, Port
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.order import ArrivalOrder
from dlrm_hybrid.parallel.tables.served import ServedTables, TableClient
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Tally, Traffic
from dlrm_hybrid.types import BatchNumber, DlrmError, Version
from dlrm_hybrid.wire.frame import Frame, Kind

FEW = LevelOptions(row_error=0.02, gradient_error=0.5, copies_rows=16, lifespan=8)
FORMATS = row_formats("float32", SPEC.table_rows, FEW)


@pytest.mark.parametrize(
    ("trainers", "servers", "staleness", "optimizer"),
    [
        (1, 1, 1, "sgd"),
        (2, 2, 4, "adagrad"),
        (2, 2, 4, "adam"),
        (3, 1, 0, "rowwise_adagrad"),
        (3, 1, 0, "rowwise_adam"),
    ],
)
def test_lookups_see_the_version_they_should(
    trainers: int, servers: int, staleness: int, optimizer: TableOptimizer
) -> None:
    """Against one set of rows that keeps every version."""
    options = Fused(optimizer=optimizer)
    world = World(trainers, servers, staleness, options)
    world.learn(0, 16)
    rows = TableRows(SPEC, options)
    rows.draw(SEED)
    versions: list[dict[str, Tensor]] = [joined(rows.pieces())]
    for batch in range(16):
        weights = versions[max(0, batch - staleness)]
        gradients = [
            reference_gradient(weights, trainer, batch, trainers) for trainer in range(trainers)
        ]
        rows.update(gradients, LR)
        versions.append(joined(rows.pieces()))
    assert world.weights().keys() == versions[-1].keys()
    for name, table in world.weights().items():
        assert torch.equal(table, versions[-1][name]), name
    assert_moved(world.weights())


def test_messages_that_come_twice_change_nothing() -> None:
    once, twice = World(2, 2, 2), World(2, 2, 2)
    once.learn(0, 15)
    repeat(twice, lambda frame: frame.kind is Kind.UPDATE)
    twice.learn(0, 15)
    for name, table in once.weights().items():
        assert torch.equal(table, twice.weights()[name]), name
    assert_moved(once.weights())


@pytest.mark.parametrize("levels", [None, FEW])
def test_a_lookup_that_comes_again_is_answered_alike(levels: LevelOptions | None) -> None:
    """Also where the tables have moved on since, or what the trainer has of their rows."""
    world, first = World(1, 1, 3, levels=levels), dict[int, tuple[Frame, Frame]]()
    moved_on = 0

    def handle(frame: Frame) -> Sequence[Outgoing]:
        nonlocal moved_on
        found = world.servers[0].handle(frame)
        if frame.kind is Kind.LOOKUP:
            first[frame.number] = frame, found[0].frame
            assert world.servers[0].handle(frame) == found
        else:
            del first[frame.number]
            for asked, answered in first.values():
                (again,) = world.servers[0].handle(asked)
                assert again.frame.sections[0].payload == answered.sections[0].payload
                moved_on += 1
        return found

    channel, _ = world.runner.servers[0]
    world.runner = InProcessRunner(
        mailboxes=world.runner.mailboxes, servers=[(channel, handle)], clock=SpanClock()
    )
    world.learn(0, 10)
    assert moved_on == 30


@pytest.mark.parametrize(
    ("trainers", "servers", "staleness", "cache", "levels"),
    [
        (2, 2, 3, None, None),
        (2, 2, 3, None, FEW),
        (1, 2, 0, None, FEW),
        (2, 1, 2, Served(cache_rows=150, cache_batches=3), None),
        (2, 2, 2, Served(cache_rows=150, cache_batches=3), FEW),
    ],
)
def test_a_checkpoint_changes_nothing_and_is_gone_on_from(
    trainers: int,
    servers: int,
    staleness: int,
    cache: Served | None,
    levels: LevelOptions | None,
) -> None:
    """Rows that were sent ahead are as old in the world that goes on, and as much is remembered."""

    def world_of() -> World:
        return World(trainers, servers, staleness, cache=cache, levels=levels)

    unbroken, saved, resumed = world_of(), world_of(), world_of()
    unbroken.learn(0, 20)
    saved.learn(0, 9)
    parts = saved.runner.run({n: tables.state_ahead() for n, tables in enumerate(saved.tables)})
    values = {piece.name: piece.view.clone() for part in parts.values() for piece in part}
    for mine, its in zip(resumed.servers, saved.servers, strict=True):
        for piece, other in zip(mine.pieces(), its.pieces(), strict=True):
            piece.view.copy_(other.view)
        mine.restart(Version(9), values)
    for tables in resumed.tables:
        tables.restart(Version(9), values)
    for world in (saved, resumed):
        world.learn(9, 11)
        for name, table in unbroken.weights().items():
            assert torch.equal(table, world.weights()[name]), name
    assert_moved(unbroken.weights())


def test_a_trainer_that_comes_again_is_sent_all_rows_anew() -> None:
    """Its server must hear of it, else the two would differ in what they remember."""
    world = World(1, 1, 0, order=ArrivalOrder(), levels=FEW)
    world.learn(0, 5)
    first = world.tables[0]
    assert isinstance(first, ServedTables)

    def come_again() -> None:
        client = TableClient(first._client._port, SPEC, FORMATS, SpanClock())
        world.tables = [ServedTables(client, 1)]
        world.tables[0].restart(Version(9), {})

    come_again()
    with pytest.raises(DlrmError, match="coded with tables 3; this rank has none"):
        world.learn(9, 1)
    come_again()
    world.servers[0].leave(0)
    errors: list[float] = []

    def gradient(pooled_BFD: Tensor, trainer: int) -> Tensor:
        weights = world.weights().values()
        exact = [weight[ids_B] for weight, ids_B in zip(weights, ids_of(0, 10), strict=True)]
        errors.append(float((pooled_BFD - torch.stack(exact, 1)).abs().max()))
        return torch.zeros_like(pooled_BFD)

    world.learn(10, 1, gradient=gradient)
    assert 0 < errors[0] < 0.1


def test_predictions_are_of_all_updates() -> None:
    world = World(2, 2, 3)
    world.learn(0, 10)
    ids_FB = ids_of(7, 7)
    (found,) = world.runner.run({0: world.tables[0].predict(Bags(ids_FB))}).values()
    weights = world.weights()
    for table, ids_B in enumerate(ids_FB):
        expected = weights[f"embedding.{table + 1}.weight"][ids_B]
        assert torch.equal(found[:, table], expected)
    world.learn(10, 5)  # what was asked for ahead is still there
    (none,) = world.runner.run({1: world.tables[1].predict(Bags(ids_FB[:, :0]))}).values()
    assert none.shape == (0, 26, 8)


def test_traffic_is_counted_as_that_of_embeddings() -> None:
    world = World(2, 2)
    world.learn(0, 10)
    sent = world.counters.sent.snapshot()
    lookups = 10 * 2 * 26 * ROWS
    assert sent[Traffic.EMBEDDING].messages == 10 * 2 * 2 * 3
    assert sent[Traffic.EMBEDDING].dense_equivalent_bytes == lookups * (4 + 32 + 32)
    assert 0 < sent[Traffic.EMBEDDING].num_bytes < lookups * 64
    assert all(sent[one] == Tally() for one in Traffic if one is not Traffic.EMBEDDING)


def test_foreign_messages_are_refused() -> None:
    world = World(2, 1)
    frames: list[Frame] = []
    port = Port(
        topology=world.topology,
        rank=1,
        attempt=1,
        transmit=lambda to, frame, num_bytes: frames.append(frame),
    )
    formats = row_formats("float32", SPEC.table_rows)
    tables = ServedTables(TableClient(port, SPEC, formats, SpanClock()), 1)
    tables.prefetch(BatchNumber(0), Bags(ids_of(0, 0)))
    with pytest.raises(DlrmError, match="lookup 0 of rank 1, attempt 1: .* of attempt 0"):
        world.servers[0].handle(frames[0])


def test_a_server_has_made_the_version_of_a_step_until_it_is_past_it():
    world = World(trainers=2)
    (server,) = world.servers
    world.learn(0, 2)
    made = server.version
    assert made == server.version_at(2) > server.version_at(1)
    assert server.has_made(0, {"step": 2})
    assert not server.has_made(0, {"step": 3})
    with pytest.raises(DlrmError, match=f"tables of step 1, which are at version {made}"):
        server.has_made(0, {"step": 1})
