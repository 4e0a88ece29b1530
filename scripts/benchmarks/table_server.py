"""Measures the CPU time of a table server's lookup and update, without a network.

    python scripts/benchmarks/table_server.py --repeats 5 --output table_server.md
    python scripts/benchmarks/table_server.py --rows 100000 --batch-sizes 128 --repeats 3

One server with all rows gets the frames that trainers send for batches of synthetic rows, as the
bytes of a socket, and its answers are encoded to bytes. The cost of sockets is not included. Makes
and removes raw rows in data/raw, 550 bytes per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import torch
from harness import (
    SEED,
    Page,
    Part,
    Row,
    arguments,
    each,
    one_thread,
    publish,
    seconds,
    silent,
    spread,
)

from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data import synthetic
from dlrm_hybrid.data.loader import START
from dlrm_hybrid.data.prepare import prepare
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.optimizer import Constant
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused, TableOptimizer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.tables.lookups import held_by, id_sections, number_section, split_batch
from dlrm_hybrid.parallel.tables.order import BatchOrder
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.run.assembly import build, model
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode

BATCH_SIZES = (128, 2048)
BATCH_ROWS = 65_536  # of a turn
TRAINERS = 2
LR = 1e-3
PRECISION = "bfloat16"
NOTE = f"""
{TRAINERS} trainers, one server, staleness 0, rows and gradients as {PRECISION}, {{rows:,}} rows of
{{dim}} numbers in all tables. Microseconds of CPU time per batch of one trainer, means over a turn:
median (lowest – highest) of the turns. A lookup is from the bytes of its frame to those of the
answer; an update is applied with that of the other trainer. "Embedding rows/s" looks each up and
updates it; samples/s are those of the trainers that one core can serve, sockets left out.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What all trainers send for one batch each.

    Attributes:
        lookups: frames as bytes, one of each trainer.
        updates: the same.
        distinct: ids of all trainers, each counted once for each.
    """

    lookups: Sequence[bytes | bytearray]
    updates: Sequence[bytes | bytearray]
    distinct: int


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="synthetic rows to prepare")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    options = parser.parse_args()

    def measure() -> Page:
        build.RAW_FOLDER.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="bench-", dir=build.RAW_FOLDER) as folder:
            shards = shards_of(options.rows, Path(folder))
            rows = list(measure_rows(shards, options.batch_sizes, options.repeats))
        table_rows, dim = sum(shards.manifest.table_rows), configured(BATCH_SIZES[0]).model
        note = NOTE.format(rows=table_rows, dim=dim.embedding_dim)
        return {"CPU time of a table server": Part(rows, note)}

    with one_thread():
        publish(measure, options.output, compiles=True)


def configured(batch_size: int) -> Config:
    """Trainers that have nothing but a batch size of their own."""
    return validate(values_of([f"train.batch_size={batch_size}"]))


def shards_of(rows: int, folder: Path) -> Shards:
    """Synthetic rows, prepared in a folder."""
    raw, output = folder / "train.txt", folder / "shards"
    synthetic.generate(raw, rows, SEED, build.profile(), lambda done: None)
    prepare([raw], output, build.prepare_options(configured(1), advice=""), silent, silent)
    return open_shards(output, None)


def measure_rows(shards: Shards, batch_sizes: Sequence[int], repeats: int) -> Iterator[Row]:
    """A row for each optimizer and batch size."""
    spec = build.shape_of(configured(1), shards.manifest)
    topology = Topology(
        trainers=TRAINERS, stages=1, servers=1, interaction_stage=0, table_servers=1
    )
    for batch_size, optimizer in each(
        "cases", list(product(batch_sizes, get_args(TableOptimizer)))
    ):
        rows = TableRows(spec, Fused(optimizer=optimizer))
        rows.draw(SEED)
        messages = list(messages_of(shards, batch_size, topology, rows.rows_F, spec.embedding_dim))
        turns: list[tuple[float, float]] = []
        for _ in range(1 + repeats):  # the first turn pages memory in and is not counted
            server = TableServer(
                *(topology, 0, rows),
                order=BatchOrder(0),
                formats=row_formats(PRECISION, rows.rows_F),
                schedule=Constant(base_lr=LR),
                attempt=0,
                clock=SpanClock(),
            )
            turns.append(served(server, messages))
        yield row_of(batch_size, optimizer, messages, turns[1:])


def row_of(
    batch_size: int,
    optimizer: str,
    messages: Sequence[Messages],
    turns: Sequence[tuple[float, float]],
) -> Row:
    """What all turns of one case have taken."""
    batches = len(messages) * TRAINERS
    distinct = sum(one.distinct for one in messages) / batches
    lookups, updates = ([1e6 * turn[part] / batches for turn in turns] for part in (0, 1))
    batch = median(a + b for a, b in zip(lookups, updates, strict=True))
    return {
        "batch": batch_size,
        "optimizer": str(optimizer),
        "distinct ids": round(distinct),
        "lookup, µs": spread(lookups, 0),
        "update, µs": spread(updates, 0),
        "batches/s": 1e6 / batch,
        "embedding rows/s": 1e6 * distinct / batch,
        "samples/s": 1e6 * batch_size / batch,
    }


def served(server: TableServer, messages: Sequence[Messages]) -> tuple[float, float]:
    """CPU seconds of all lookups, and of all updates."""
    looking_up = updating = 0.0
    for number, one in enumerate(messages):
        looking_up += seconds(lambda one=one: [answer(server, frame) for frame in one.lookups])
        updating += seconds(lambda one=one: [answer(server, frame) for frame in one.updates])
        if server.version != number + 1:
            raise ValueError(f"{number + 1} batches make version {server.version}")
    return looking_up, updating


def answer(server: TableServer, message: bytes | bytearray) -> list[bytes | bytearray]:
    """What the server sends for a message, as bytes."""
    outgoing: list[Outgoing] = server.handle(decode(message))
    return [encode(one.frame) for one in outgoing]


def messages_of(
    shards: Shards,
    batch_size: int,
    topology: Topology,
    rows_F: Sequence[int],
    dim: int,
) -> Iterator[Messages]:
    """The frames of the first batches, with made-up gradients."""
    config = configured(batch_size)
    loader, state = model.loader(config, shards), START
    generator = torch.Generator().manual_seed(SEED)
    rows = np.array(rows_F, np.int64)
    held = held_by(0, rows_F, Widths((dim,) * len(rows_F), dim))
    end = row_formats(PRECISION, rows_F).training.trainer(0, [held])
    for number in range(BATCH_ROWS // batch_size):
        lookups: list[bytes | bytearray] = []
        updates: list[bytes | bytearray] = []
        distinct = 0
        for worker in topology.interaction_group:
            batch, state = loader.read(state)
            (asked,) = split_batch(tensor_bags(batch.bags), 1)[1].asked
            gradient_KD = torch.randn(len(asked.ids.ids_K), dim, generator=generator).numpy()
            sections = id_sections(asked, rows)
            values = number_section(end.encode(0, asked.ids, gradient_KD), end.dtype)
            for kind, found, sent in (
                (Kind.LOOKUP, lookups, sections),
                (Kind.UPDATE, updates, (*sections, values)),
            ):
                frame = Frame(kind=kind, sender=worker, attempt=0, number=number, sections=sent)
                found.append(encode(frame))
            distinct += len(asked.ids.ids_K)
        yield Messages(lookups=lookups, updates=updates, distinct=distinct)


if __name__ == "__main__":
    main()
