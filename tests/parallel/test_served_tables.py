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
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.parallel.effects import Outgoing, Port
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.served import ServedTables, TableClient
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Tally, Traffic
from dlrm_hybrid.types import BatchNumber, DataError, DlrmError, Version
from dlrm_hybrid.wire.frame import Frame, Kind


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


def test_saved_rows_of_another_shape_are_refused() -> None:
    (tables,) = World(1, 1, 2).tables
    rows = torch.zeros(1, len(SPEC.table_rows), SPEC.embedding_dim)
    tables.restart(Version(5), {"lookups.0.1": rows, "lookups.0.keys": rows, "lookups.1.0": rows})
    tables.prefetch(BatchNumber(5), Bags(ids_of(0, 5)))  # asks for its rows
    with pytest.raises(DataError, match=r"^lookups\.0\.\*: \[1, .*\] for batch 6, it must be \["):
        tables.prefetch(BatchNumber(6), Bags(ids_of(0, 6)))


def test_messages_that_come_twice_change_nothing() -> None:
    once, twice = World(2, 2, 2), World(2, 2, 2)
    once.learn(0, 15)
    repeat(twice, lambda frame: frame.kind is Kind.UPDATE)
    twice.learn(0, 15)
    for name, table in once.weights().items():
        assert torch.equal(table, twice.weights()[name]), name
    assert_moved(once.weights())


def test_a_lookup_that_comes_again_is_answered_alike() -> None:
    """Also where the tables have moved on since."""
    world, first = World(1, 1, 3), dict[int, tuple[Frame, Frame]]()
    moved_on = 0

    def handle(frame: Frame) -> Sequence[Outgoing]:
        nonlocal moved_on
        found = world.servers[0].handle(frame)
        if frame.kind is Kind.LOOKUP:
            first[frame.number] = frame, found[0].frame
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
