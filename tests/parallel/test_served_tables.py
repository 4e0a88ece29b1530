"""Tables on table servers learn what tables in the trainers learn, and see what they should."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.model.embeddings import EmbeddingOptimizer, EmbeddingOptions, Embeddings
from dlrm_hybrid.model.optimizer import Constant
from dlrm_hybrid.model.sharding import CommPrecision, Rounding
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import OwnedIds, TableRows
from dlrm_hybrid.model.tensors import Piece, draw_embeddings
from dlrm_hybrid.parallel.effects import Outgoing, Port, Program
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.parallel.tables.served import ServedTables
from dlrm_hybrid.parallel.tables.shared import EachIdOnce, JointTables, SharedTables
from dlrm_hybrid.parallel.tables.table_server import TableOptions, TableServer
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters, Tally, Traffic
from dlrm_hybrid.types import BatchNumber, DlrmError, Version
from dlrm_hybrid.wire.frame import Frame, Kind

SPEC = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(1,), table_rows=(1, 2, 7, 50) + (20,) * 22)
SGD = EmbeddingOptions(optimizer=EmbeddingOptimizer.SGD, eps=1e-8)
ROWS, LR, SEED = 12, 32.0, 3


def ids_of(trainer: int, batch: int) -> Tensor:
    rng = np.random.default_rng([trainer, batch])
    return torch.from_numpy(np.stack([rng.integers(0, rows, ROWS) for rows in SPEC.table_rows]))


def gradient_of(pooled_BFD: Tensor, trainer: int) -> Tensor:
    """Depends on the rows, so that rows of another version show; float16 holds sums of it."""
    return torch.sin(9 * pooled_BFD + trainer) / 64


class World:
    """Trainers that only look up and update, and their table servers."""

    def __init__(
        self,
        trainers: int = 1,
        servers: int = 1,
        staleness: int = 0,
        options: EmbeddingOptions = SGD,
        precision: CommPrecision = CommPrecision.FLOAT32,
    ) -> None:
        self.staleness = staleness
        self.topology = Topology(
            trainers=trainers,
            stages=1,
            servers=int(trainers > 1),
            interaction_stage=0,
            table_servers=servers,
        )
        self.counters = Counters()
        channels = [
            MeteredChannel(channel, self.counters, SpanClock())
            for channel in in_process_channels(self.topology.size)
        ]
        table = TableOptions(
            staleness=staleness, precision=precision, schedule=Constant(base_lr=LR), attempt=0
        )
        self.servers: list[TableServer] = []
        for index in range(servers):
            rows = TableRows(SPEC, options, index, servers)
            rows.draw(SEED)
            self.servers.append(TableServer(self.topology, index, rows, table, SpanClock()))
        self.tables = [
            ServedTables(
                Port(topology=self.topology, rank=rank, attempt=0, transmit=channels[rank].send),
                SPEC,
                precision,
                SpanClock(),
            )
            for rank in range(trainers)
        ]
        group = self.topology.table_server_group
        self.runner = InProcessRunner(
            mailboxes={rank: Mailbox(channels[rank], 0, 64) for rank in range(trainers)},
            servers=[
                (channels[rank], server.handle)
                for rank, server in zip(group, self.servers, strict=True)
            ],
            clock=SpanClock(),
        )

    def learn(self, first: int, batches: int) -> None:
        programs = {
            trainer: learning(tables, trainer, range(first, first + batches), self.staleness)
            for trainer, tables in enumerate(self.tables)
        }
        self.runner.run(programs)

    def weights(self) -> dict[str, Tensor]:
        return joined([piece for server in self.servers for piece in server.pieces()])


def learning(tables: Tables, trainer: int, batches: range, staleness: int) -> Program[None]:
    for number in batches:
        for later in range(number, number + staleness + 1):
            tables.prefetch(BatchNumber(later), ids_of(trainer, later))
        batch = BatchNumber(number)
        pooled_BFD = yield from tables.lookup(batch, ids_of(trainer, number), LR)
        yield from tables.update(batch, gradient_of(pooled_BFD, trainer))


def joined(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Full tensors, in memory of their own."""
    full: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = full.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        tensor[piece.begin[0] :: piece.every] = piece.view
    return full


def drawn() -> Embeddings:
    embeddings = Embeddings(SPEC, SGD)
    draw_embeddings(embeddings.weights(), SEED)
    return embeddings


def assert_moved(weights: dict[str, Tensor]) -> None:
    for name, first in drawn().weights().items():
        assert (weights[name] - first).abs().max() > 0.1, name


@pytest.mark.parametrize("servers", [1, 2])
def test_one_trainer_learns_the_bits_of_local_tables(servers: int) -> None:
    world, embeddings = World(servers=servers), drawn()
    world.learn(0, 200)
    local = LocalTables(embeddings, 1, SpanClock())
    world.runner.run({0: learning(local, 0, range(200), 0)})
    for name, table in world.weights().items():
        assert torch.equal(table, embeddings.weights()[name]), name
    assert_moved(world.weights())


@pytest.mark.parametrize("precision", list(CommPrecision))
@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (3, 2)])
def test_trainers_learn_what_they_learn_from_shared_tables(
    trainers: int, servers: int, precision: CommPrecision
) -> None:
    """Those look up each id of a trainer once, too; FBGEMM updates them."""
    world, embeddings = World(trainers, servers, precision=precision), drawn()
    world.learn(0, 30)
    joint = JointTables(EachIdOnce(embeddings, Rounding(precision)), SpanClock())
    group = tuple(range(trainers))
    shared = {rank: SharedTables(joint, group) for rank in group}
    world.runner.run({n: learning(one, n, range(30), 0) for n, one in shared.items()})
    for name, table in world.weights().items():
        assert torch.allclose(table, embeddings.weights()[name], atol=1e-6), name
    assert_moved(world.weights())


@pytest.mark.parametrize("optimizer", list(EmbeddingOptimizer))
@pytest.mark.parametrize(("trainers", "servers", "staleness"), [(1, 1, 1), (2, 2, 4), (3, 1, 0)])
def test_lookups_see_the_version_they_should(
    trainers: int, servers: int, staleness: int, optimizer: EmbeddingOptimizer
) -> None:
    """Against one set of rows that keeps every version."""
    options = EmbeddingOptions(optimizer=optimizer, eps=1e-8)
    world = World(trainers, servers, staleness, options)
    world.learn(0, 25)
    rows = TableRows(SPEC, options)
    rows.draw(SEED)
    versions: list[dict[str, Tensor]] = [joined(rows.pieces())]
    for batch in range(25):
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


def reference_gradient(
    weights: dict[str, Tensor], trainer: int, batch: int, trainers: int
) -> tuple[OwnedIds, Tensor]:
    """Of each distinct id, summed in the order of the batch."""
    ids_K: list[int] = []
    counts_F: list[int] = []
    sums: list[Tensor] = []
    for number, ids_B in enumerate(ids_of(trainer, batch)):
        pooled_BD = weights[f"embedding.{number + 1}.weight"][ids_B]
        gradient_BD = gradient_of(pooled_BD, trainer) / trainers
        found = sorted(set(ids_B.tolist()))
        for one in found:
            sums.append(torch.zeros(SPEC.embedding_dim))
            for row in (ids_B == one).nonzero()[:, 0]:
                sums[-1] += gradient_BD[row]
        ids_K += found
        counts_F.append(len(found))
    return OwnedIds(np.array(ids_K), np.array(counts_F)), torch.stack(sums)


@pytest.mark.parametrize(("trainers", "servers", "staleness"), [(1, 1, 0), (2, 2, 4)])
def test_a_world_goes_on_from_what_it_held(trainers: int, servers: int, staleness: int) -> None:
    unbroken, world = (World(trainers, servers, staleness) for _ in range(2))
    unbroken.learn(0, 20)
    world.learn(0, 9)
    states = world.runner.run({n: tables.state_ahead() for n, tables in enumerate(world.tables)})
    ahead = {name: one for state in states.values() for name, one in state.items()}
    assert len(ahead) == trainers * staleness
    resumed = World(trainers, servers, staleness)
    for server, other in zip(resumed.servers, world.servers, strict=True):
        for piece, saved in zip(server.pieces(), other.pieces(), strict=True):
            piece.view.copy_(saved.view)
        server.restart(Version(9))
    for tables in resumed.tables:
        tables.restart(Version(9), ahead)
    resumed.learn(9, 11)
    for name, table in unbroken.weights().items():
        assert torch.equal(table, resumed.weights()[name]), name
    if staleness:
        anew = World(trainers, servers, staleness)
        for server, other in zip(anew.servers, world.servers, strict=True):
            for piece, saved in zip(server.pieces(), other.pieces(), strict=True):
                piece.view.copy_(saved.view)
            server.restart(Version(9))
        for tables in anew.tables:
            tables.restart(Version(9), {})
        anew.learn(9, 11)
        assert any(
            not torch.equal(table, anew.weights()[n]) for n, table in unbroken.weights().items()
        )


def test_messages_that_come_twice_change_nothing() -> None:
    once, twice = World(2, 2, 2), World(2, 2, 2)
    once.learn(0, 15)
    repeat(twice, lambda frame: frame.kind is Kind.UPDATE)
    twice.learn(0, 15)
    for name, table in once.weights().items():
        assert torch.equal(table, twice.weights()[name]), name
    assert_moved(once.weights())


def repeat(world: World, chosen: Callable[[Frame], bool]) -> None:
    """Let servers take each chosen frame twice."""

    def handle_twice(server: TableServer) -> Callable[[Frame], Sequence[Outgoing]]:
        def handle(frame: Frame) -> Sequence[Outgoing]:
            found = server.handle(frame)
            if chosen(frame):
                assert server.handle(frame) == []
            return found

        return handle

    servers = [
        (channel, handle_twice(server))
        for (channel, _), server in zip(world.runner.servers, world.servers, strict=True)
    ]
    world.runner = InProcessRunner(
        mailboxes=world.runner.mailboxes, servers=servers, clock=SpanClock()
    )


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
    (found,) = world.runner.run({0: world.tables[0].predict(ids_FB)}).values()
    weights = world.weights()
    for table, ids_B in enumerate(ids_FB):
        expected = weights[f"embedding.{table + 1}.weight"][ids_B]
        assert torch.equal(found[:, table], expected)
    world.learn(10, 5)  # what was asked for ahead is still there
    (none,) = world.runner.run({1: world.tables[1].predict(ids_FB[:, :0])}).values()
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
    tables = ServedTables(port, SPEC, CommPrecision.FLOAT32, SpanClock())
    tables.prefetch(BatchNumber(0), ids_of(0, 0))
    with pytest.raises(DlrmError, match="lookup 0 of rank 1, attempt 1: .* of attempt 0"):
        world.servers[0].handle(frames[0])
