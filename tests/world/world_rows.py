"""The batches of a run of `train`, as a program would hand them to a world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from dlrm_hybrid.data.loader import START, Batch, Loader, sequential_batches
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.model.spec import ModelSpec

BATCH = 64


def small_spec(shards: Shards) -> ModelSpec:
    """conf/model/dlrm_small."""
    return ModelSpec(
        embedding_dim=4, bottom=(13, 32, 16, 8, 4), top=(32, 16, 8, 1), table_rows=shards.table_rows
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


def loader(folder: str, steps: int, trainer: int, trainers: int) -> Iterator[tuple]:
    """Some steps of the prepared rows of a folder."""
    yield from tuples_of(open_shards(Path(folder), None), trainer, trainers, steps)


def uneven(folder: str, trainer: int, trainers: int) -> Iterator[tuple]:
    """Trainer 0 has 2 batches, trainer 1 has 3."""
    return loader(folder, 2 + trainer, trainer, trainers)


def failing(folder: str, trainer: int, trainers: int) -> Iterator[tuple]:
    """Trainer 1 fails after a batch."""
    yield from loader(folder, 1, trainer, trainers)
    if trainer:
        raise ValueError("the disk is gone")
    yield from loader(folder, 1, trainer, trainers)


def short(folder: str, trainer: int, trainers: int) -> Iterator[tuple]:
    """The second batch of each trainer has too few rows."""
    for number, batch in enumerate(loader(folder, 4, trainer, trainers)):
        yield tuple(array[:5] for array in batch) if number == 1 else batch


def global_batches(shards: Shards, steps: int) -> list[tuple]:
    """Batches of two trainers together, as one loader would give them."""
    of_trainers = zip(tuples_of(shards, 0, 2, steps), tuples_of(shards, 1, 2, steps), strict=True)
    return [
        tuple(np.concatenate(pair) for pair in zip(one, other, strict=True))
        for one, other in of_trainers
    ]


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name
