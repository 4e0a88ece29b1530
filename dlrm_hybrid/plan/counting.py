"""Counts the bytes that a world sends, in a few steps of it in this process, without a network.

The same elements are sent as between processes, bit for bit with `sync` and `bounded`. The traffic
of worlds that are too large to train here is extrapolated from two smaller ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import expm1, log1p, log2
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import numpy as np

from dlrm_hybrid.bags import table_offsets
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import START
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.exchange.distinct import encoded_ids
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.parallel.topology import Topology, WorkerRole
from dlrm_hybrid.plan.layout import Layout, Sent, Way
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.readiness import require_memory
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.wire.frame import Frame, Kind, encoded_bytes

MOST_TRAINERS = 8  # of a world that is trained here
SMALL, LARGER = 2, 4  # trainers of the worlds that larger ones are extrapolated from
FEW_STEPS = 20  # most steps of these worlds
ID_BATCHES = 8
FLOAT_BYTES, ID_BYTES, LENGTH_BYTES = 4, 4, 4
FRAME_BYTES = 56  # of a frame with one section, without its payload
EXCHANGE_HEADER_BYTES = 8  # length of the ids, rows of the batch; with lists most ids of a table
# The exchange's messages are padded, so that later ones fit as well; measured over 500 steps.
ROOM_OF_IDS, ROOM_OF_LEVELS = 1.05, 1.13
ROW_LEVELS_BYTES = 1.0  # of a row or its gradient; measured with SGD and row-wise Adagrad
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TABLE_KINDS = (Kind.LOOKUP, Kind.ROWS, Kind.UPDATE)


@dataclass(frozen=True, slots=True)
class BatchIds:
    """The ids of a trainer's batch in all tables, means over some batches.

    Attributes:
        bags: number of bags, one for each row and table.
        looked_up: number of ids.
        distinct: number of distinct ids.
        bag_elements: numbers in the pooled rows of all bags.
        distinct_elements: numbers in the rows of the distinct ids.
        coded_bytes: bytes of the distinct ids as encoded for the exchange.
        are_lists: whether bags have any number of ids.
        are_weighted: whether ids have weights.
    """

    bags: float
    looked_up: float
    distinct: float
    bag_elements: float
    distinct_elements: float
    coded_bytes: float
    are_lists: bool
    are_weighted: bool = False


@final
class Counter:
    """Counts what worlds send on the same rows, each world once."""

    def __init__(self, shards: Shards, steps: int, tell: Callable[[str], object]) -> None:
        self.train_rows = len(shards.train_rows)
        self._shards, self._steps, self._tell = shards, steps, tell
        self._counted: dict[str, Mapping[Way, Sent]] = {}
        self._ids: dict[int, BatchIds] = {}
        self._tables: dict[int, Mapping[Way, Sent]] = {}

    def layout(self, config: Config, *, exactly: bool = True) -> Layout:
        """The layout of a world, with the frames that it sends.

        Args:
            config: configuration of the world.
            exactly: count this world, unless it has too many trainers; else extrapolate.

        Raises:
            ConfigError: its parts do not fit together.
            ResourceError: its tables do not fit into memory.
        """
        trainers = config.parallel.trainers
        is_counted = exactly and trainers <= MOST_TRAINERS
        sent = self._count(config) if is_counted else self._stretched(config)
        shared = config.embedding.name == "fused" and trainers > 1
        exchange = exchange_bytes(config, self._batch_ids(config)) if shared else ()
        return replace(self.shape(config), sent=sent, exchange=exchange)

    def shape(self, config: Config) -> Layout:
        """The layout of a world, without the frames that it sends."""
        spec = build.shape_of(config, self._shards.manifest)
        return Layout(config=config, spec=spec, sent={})

    def _count(self, config: Config, most_steps: int | None = None) -> Mapping[Way, Sent]:
        alone = in_process(config)
        steps = min(most_steps or self._steps, self._steps, config.train.steps or self._steps)
        key = repr((alone.parallel, alone.gradient, alone.activation, alone.embedding, alone.sync))
        key += repr((alone.pull, alone.schedule, alone.train.batch_size, steps))
        if key not in self._counted:
            parallel = alone.parallel
            shape = f"{parallel.trainers} × {len(parallel.cuts) + 1} + {parallel.servers}"
            tables = f" + {parallel.table_servers}" if parallel.table_servers else ""
            self._tell(f"{shape}{tables}: {steps} steps to count its bytes")
            require_memory(config, self._shards.table_rows)
            with TemporaryDirectory(prefix="dlrm_hybrid-plan-") as folder:
                self._counted[key] = counted(alone, self._shards, steps, Path(folder))
        return self._counted[key]

    def _stretched(self, config: Config) -> dict[Way, Sent]:
        """Extrapolate the frames of a world from worlds of few trainers with one server or none."""
        small, larger = (self._count(smaller(config, few), FEW_STEPS) for few in (SMALL, LARGER))
        world = self.shape(config)
        topology, frames = world.topology, dict[Way, Sent]()
        for way, sent in larger.items():
            each = sent.messages / LARGER * topology.trainers
            if way.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT):
                frames[way] = Sent(each, sent.num_bytes)
                continue
            elements = world.elements(way.stage)
            before = small.get(way, sent).num_bytes
            num_bytes = grown(before, sent.num_bytes, FLOAT_BYTES * elements, topology.trainers)
            if not topology.servers:
                each *= (topology.trainers - 1) / (LARGER - 1)
                frames[way] = Sent(each, num_bytes)
                continue
            if way.kind in (Kind.CONTRIBUTION, Kind.RESULT):
                owner = way.stage % topology.servers
                frames[way._replace(server=owner)] = Sent(each, num_bytes)
                continue
            for server in range(topology.servers):
                if part := world.elements(way.stage, server) / elements:
                    frames[way._replace(server=server)] = Sent(each, part * num_bytes + FRAME_BYTES)
        if topology.table_servers:
            frames |= self._asked(config, topology)
        return frames

    def _asked(self, config: Config, topology: Topology) -> dict[Way, Sent]:
        """Frames to and from table servers, which share every batch equally."""
        embedding, parallel = config.embedding, config.parallel
        single = parallel.having(cuts=(), trainers=1, servers=1, table_servers=1, elastic=False)
        rows = config.train.batch_size
        if rows not in self._tables:
            alone = replace(config, parallel=single, embedding=embedding.having(staleness=0))
            self._tables[rows] = self._count(alone, FEW_STEPS)
        sent = self._tables[rows]
        servers, stage = topology.table_servers, topology.interaction_stage
        frames: dict[Way, Sent] = {}
        for kind in TABLE_KINDS:
            size = sent[Way(kind, 0)].num_bytes
            for server in range(servers):
                part = FRAME_BYTES + (size - FRAME_BYTES) / servers
                frames[Way(kind, stage, server)] = Sent(topology.trainers, part)
        return frames

    def _batch_ids(self, config: Config) -> BatchIds:
        rows = config.train.batch_size
        if rows not in self._ids:
            self._ids[rows] = batch_ids(config, self._shards)
        return self._ids[rows]


def grown(small: float, larger: float, most: float, trainers: int) -> float:
    """Extrapolate the bytes of a frame to a world of T trainers.

    Trainers send partly different elements: the share of elements that at least one of them sends
    is 1 - exp(-x), and x grows as a power of T.

    Args:
        small: bytes of the frame in a world of SMALL trainers.
        larger: bytes in a world of LARGER trainers.
        most: bytes if all elements are sent.
        trainers: T.
    """
    most = max(most, larger)
    then, now = (-log1p(-min(size / most, 1 - 1e-9)) for size in (small, larger))
    return -most * expm1(-now * (now / then) ** log2(trainers / LARGER))


def in_process(config: Config) -> Config:
    """Configure a planned world in one process, where it sends the same."""
    return replace(
        config,
        parallel=config.parallel.having(world="in_process", elastic=False),
        embedding=config.embedding.having(sharding="table_wise"),
        sync=config.sync.having(record=False, replay=None),
    )


def smaller(config: Config, trainers: int) -> Config:
    """Configure a world with fewer trainers, one server at most, and tables shared by trainers."""
    servers = min(config.parallel.servers, 1)
    parallel = config.parallel.having(
        trainers=trainers, servers=servers, table_servers=0, elastic=False
    )
    keys = {key.name: getattr(config.embedding, key.name) for key in fields(config.embedding)}
    embedding = Fused().having(**{**keys, "deduplicate": True})
    return replace(config, parallel=parallel, embedding=embedding)


def counted(config: Config, shards: Shards, steps: int, folder: Path) -> dict[Way, Sent]:
    """Count the frames of a step of a world in one process, means after warm-up."""
    build_model.prepare_torch(config)
    storage = build_model.row_storage(config, folder)
    engine = build_engine.engine(config, shards, steps, storage)
    topology = build.topology(config)
    tallies: dict[Way, list[int]] = defaultdict(lambda: [0, 0])

    def watching(receiver: int) -> Callable[[Frame, int], None]:
        def watch(frame: Frame, dense_bytes: int) -> None:
            tally = tallies[_way(frame, receiver, topology)]
            tally[0] += 1
            tally[1] += encoded_bytes(frame)

        return watch

    for channel in engine.ranks.channels:
        channel.watch = watching(channel.rank)
    at, skipped = START, min(WARMUP_STEPS, steps - 1)
    for step in range(steps):
        if step == skipped:
            tallies.clear()
        _, at = engine.make_step(step, at)
    return {
        way: Sent(messages / (steps - skipped), num_bytes / messages)
        for way, (messages, num_bytes) in sorted(tallies.items())
    }


def _way(frame: Frame, receiver: int, topology: Topology) -> Way:
    ends = [topology.role(rank) for rank in (frame.sender, receiver)]
    stage = next(role.stage for role in ends if isinstance(role, WorkerRole))
    server = next((role.index for role in ends if not isinstance(role, WorkerRole)), 0)
    return Way(frame.kind, stage, server, frame.round or frame.boundary)


def batch_ids(config: Config, shards: Shards) -> BatchIds:
    """Count the ids in the first batches of a trainer."""
    loader, at = build_model.loader(config, shards), START
    rows_F = np.array(shards.table_rows, np.int64)
    spec = build.shape_of(config, shards.manifest)
    widths, columns = spec.widths, ColumnBags.of(spec)
    counts: list[tuple[int, ...]] = []
    for _ in range(min(ID_BATCHES, loader.steps_per_epoch)):
        batch, at = loader.read(at)
        bags = columns.by_table(tensor_bags(batch.bags)).map(lambda ids: ids.numpy())
        values_N, offsets = bags.values.reshape(-1), table_offsets(bags).tolist()
        parts = [np.unique(values_N[start:stop]) for start, stop in pairwise(offsets)]
        counts_F = np.array([len(ids) for ids in parts], np.int64)
        most = int(np.diff(offsets).max())
        coded = encoded_ids(np.concatenate(parts).astype(np.int64), counts_F, rows_F, most)
        elements = (bags.rows * sum(widths.dims), widths.elements(counts_F))
        numbers = len(values_N), int(counts_F.sum()), *elements, len(coded)
        counts.append((bags.tables * bags.rows, *numbers))
    means, schema = np.mean(counts, axis=0).tolist(), shards.schema
    are_lists = bool(schema.multi_hot or schema.expanded or columns.most > 1)
    return BatchIds(*means, are_lists=are_lists, are_weighted=bool(schema.weighted))


def exchange_bytes(config: Config, ids: BatchIds) -> tuple[float, ...]:
    """Bytes between two trainers that share tables, means over all pairs; see `Layout.exchange`.

    They are calculated, as nothing is exchanged in one process.
    """
    keys, trainers = config.embedding, config.parallel.trainers
    value_bytes = VALUE_BYTES[keys.comm_precision]
    share = 1.0 if keys.sharding == "row_wise" else 1 / trainers
    if keys.deduplicate:
        asked = EXCHANGE_HEADER_BYTES + ids.coded_bytes * share * ROOM_OF_IDS
        rows = ids.distinct_elements * share * value_bytes
        if keys.levels:
            rows = LENGTH_BYTES + ids.distinct * share * ROW_LEVELS_BYTES * ROOM_OF_LEVELS
        return asked, rows, rows
    rows = ids.bag_elements * share * value_bytes
    if not ids.are_lists:
        return ids.bags * share * ID_BYTES, rows, rows
    asked = ids.looked_up * share * ID_BYTES
    weights = [ids.looked_up * share * FLOAT_BYTES] * ids.are_weighted
    return ids.bags * share * LENGTH_BYTES, asked, *weights, rows, rows
