"""The batches of a run of `train`, as a program would hand them to a world."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dlrm_hybrid.data.loader import START, Batch, Loader, sequential_batches
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.spec import ModelSpec

BATCH = 64
ROWS = "DLRM_HYBRID_TEST_ROWS"  # the folder of prepared rows, for loaders of ranks


def small_spec(shards: Shards) -> ModelSpec:
    """conf/model/dlrm_small."""
    return ModelSpec(
        embedding_dim=4,
        bottom=(13, 32, 16, 8, 4),
        top=(32, 16, 8, 1),
        table_rows=shards.table_rows,
    )


def batches_of(shards: Shards, trainer: int, trainers: int, steps: int) -> Iterator[Batch]:
    """What a trainer of a run learns from, step after step."""
    config = {"shuffle": True, "shuffle_block_rows": 65536, "shuffle_read_rows": 1024}
    loader = Loader(shards, batch_size=BATCH, seed=0, trainer=trainer, trainers=trainers, **config)
    at = START
    for _ in range(steps):
        batch, at = loader.read(at)
        yield batch


def tuples_of(shards: Shards, trainer: int, trainers: int, steps: int) -> Iterator[tuple]:
    """The same as arrays: dense, ids (rows, tables), label."""
    for batch in batches_of(shards, trainer, trainers, steps):
        yield batch.dense_BI, batch.bags.values.T, batch.label_B


def test_batches(shards: Shards, rows: int = 4096) -> Iterator[Batch]:
    return sequential_batches(shards, shards.test_rows("day"), rows)


test_batches.__test__ = False  # type: ignore[attr-defined]


def losses(folder: Path) -> list[float]:
    """Of each step of a run with telemetry.every=1."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [one["loss"] for one in found if one["kind"] == "progress"]


def loader(trainer: int, trainers: int) -> Iterator[tuple]:
    """Of a rank: 20 steps of the rows of this test."""
    shards = open_shards(Path(os.environ[ROWS]), None)
    yield from tuples_of(shards, trainer, trainers, 20)
