"""Counts bytes and CPU time of tables on table servers, beside tables in trainers.

    python scripts/benchmarks/served.py RUNS

Bytes stand beside those expected from the rows that a run has read. Trains in folders of RUNS;
complete runs are not repeated, so an interrupted measurement continues. Other arguments are
overrides of every run. Needs what `network=emulated` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from harness import (
    Page,
    Row,
    arguments,
    publish,
    ranks_of,
    samples_of,
    slug,
    train_once,
)
from lists import NO_CHECKPOINTS, SERVED

from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import START
from dlrm_hybrid.data.profile import WEIGHT_ONE, builtin
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.embeddings import distinct_ids, tensor_bags
from dlrm_hybrid.model.exchange.distinct import encoded_ids
from dlrm_hybrid.model.tables import Served
from dlrm_hybrid.parallel.tables.cached import RowCache
from dlrm_hybrid.parallel.tables.lookups import ids_of, keys_of
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.run.assembly import build, model
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.traffic import Phase

TWO = ("parallel.machines=2", "parallel.servers=1")


def cached(rows: int, batches: int) -> tuple[str, ...]:
    """Words for served tables with a cache in each trainer."""
    return (*SERVED, f"embedding.cache_rows={rows}", f"embedding.cache_batches={batches}")


UNLIMITED = 1_000_000  # more rows than a trainer sees in so many batches
BYTES_WORLDS: Mapping[str, Sequence[str]] = {
    "sharded": (),
    "served": SERVED,
    "sharded, 2 machines": TWO,
    "served, 2 machines": (*SERVED, *TWO),
}
CACHED_WORLDS: Mapping[str, Sequence[str]] = {
    "cached for 4": cached(10_000, 4),
    "cached for 16": cached(10_000, 16),
    "cached for 4, all": cached(UNLIMITED, 4),
    "cached for 16, all": cached(UNLIMITED, 16),
}
COMPRESSED = ("+experiment=dct_hybrid", "train.evaluate_every=0", *NO_CHECKPOINTS)
LINKED = ("network=emulated", "network.rate=1gbit")
BATCH_SIZES = (128, 2048)
BYTES_ROWS = 2 * 128 * 205


def main() -> None:
    """Run what is missing, print the page."""
    options, overrides = arguments(__doc__, runs=True).parse_known_args()

    def measure() -> Page:
        found = run_bytes(options.runs, overrides).items()
        return {
            "Bytes of tables": [bytes_row(*one) for one in found],
            "CPU time of the table server": [cpu_row(*one) for one in found],
        }

    publish(measure, options.output)


Case = tuple[str, int]
"""Name of a world, rows of a trainer's batch."""


def run_bytes(runs: Path, overrides: Sequence[str]) -> dict[Case, Run]:
    """A run of each world and batch size."""
    found: dict[Case, Run] = {}
    cases = [*product(BATCH_SIZES, BYTES_WORLDS.items()), *product([128], CACHED_WORLDS.items())]
    for batch_size, (name, world) in cases:
        steps = max(5 + BYTES_ROWS // (2 * batch_size), 20)
        words = (*COMPRESSED, *world, f"train.batch_size={batch_size}", f"train.steps={steps}")
        folder = runs / "bytes" / f"{slug(name)}-{batch_size}"
        found[name, batch_size] = train_once(folder, *words, *LINKED, *overrides)
    return found


def bytes_row(case: Case, run: Run) -> Row:
    """What a run has sent for its tables, what its rows let expect, and what crossed links in all.

    Frames are counted wherever they go. On links they have headers, and are acknowledged.
    """
    name, batch_size = case
    samples = samples_of(run)
    counted = run.summary["network"]["by_class"]["embedding"]["bytes"] / samples
    crossed = run.summary["network"]["interface_bytes"]
    config = validate(run.config)
    fetched, expected = expected_bytes(config, run.summary["steps"])
    by_profile = fetched_by_profile(batch_size, config.embedding.cache_batches)
    is_limited = 0 < config.embedding.cache_rows < UNLIMITED
    return {
        "world": name,
        "batch": batch_size,
        "rows fetched per sample": f"{fetched:.2f}",
        "by the profile": None if is_limited else f"{by_profile:.2f}",
        "bytes per sample": f"{counted:,.1f}",
        "formula": f"{expected:,.1f}",
        "more": f"{counted / expected - 1:+.1%}",
        "all on links": None if crossed is None else f"{crossed / samples:,.1f}",
    }


def expected_bytes(config: Config, steps: int) -> tuple[float, float]:
    """Rows fetched per sample, and bytes without headers: rows, gradients and ids that travel.

    With table servers all rows and gradients do, and ids twice; else what the other trainers own.

    Args:
        config: of the run, with the prepared rows of its data.
        steps: of it; the first ones are not counted.
    """
    shards = open_shards(build.prepared_folder(config), None)
    rows_F = np.array(shards.manifest.table_rows, np.int64)
    keys, trainers, batch_size = config.embedding, config.parallel.trainers, config.train.batch_size
    ways = np.zeros((2, 2), np.int64)  # rows there, gradients back: how many, bytes of their ids
    for trainer in range(trainers):
        state, loader = START, model.loader(config, shards, trainer)
        batches = max(keys.cache_batches, 1)
        cache = RowCache(Served(cache_rows=keys.cache_rows, cache_batches=batches))
        for step in range(steps):
            batch, state = loader.read(state)
            ids = distinct_ids(tensor_bags(batch.bags), np.arange(len(rows_F)))
            both = [Rows(ids.ids_K, ids.counts_F)] * 2
            if keys.cache_rows:
                keys_K = keys_of(both[0])
                turn = cache.turn(step, keys_K)
                moved = (keys_K[turn.fetched_M], turn.left_L4[:, 0])
                both = [ids_of(keys_K, len(rows_F)) for keys_K in moved]
            if step >= WARMUP_STEPS:
                ways += [
                    (len(x.ids_K), len(encoded_ids(x.ids_K, x.counts_L, rows_F, batch_size)))
                    for x in both
                ]
    samples = trainers * batch_size * (steps - WARMUP_STEPS)
    value_bytes = 4 if keys.comm_precision == "float32" else 2
    sent = config.model.embedding_dim * value_bytes * ways[:, 0].sum()
    if keys.name == "served":
        return ways[0, 0] / samples, (sent + ways[:, 1].sum()) / samples
    return ways[0, 0] / samples, (trainers - 1) / trainers * (sent + ways[0, 1]) / samples


def fetched_by_profile(batch_size: int, batches: int) -> float:
    """Rows of an unlimited cache that are fetched per sample, by the profile of the rows alone.

    A row that is in a batch with probability q is fetched once in `batches` + 1 / q of them.
    """
    found = 0.0
    for column in builtin("criteo_kaggle").categoricals:
        missing = column.missing / WEIGHT_ONE
        count_G = np.diff([*column.starts, column.stop])
        share_G = (1 - missing) * np.array(column.weights) / WEIGHT_ONE / count_G
        count_G, share_G = np.append(count_G, 1), np.append(share_G, missing)
        in_batch_G = -np.expm1(batch_size * np.log1p(-np.minimum(share_G, 1 - 1e-15)))
        found += float((count_G * in_batch_G / (1 + batches * in_batch_G)).sum())
    return found / batch_size


def cpu_row(case: Case, run: Run) -> Row:
    """CPU time of all ranks of a kind with their threads, for each batch of a trainer."""
    name, batch_size = case
    samples = samples_of(run)
    spent = dict.fromkeys(("tables", "worker", "server"), 0.0)
    for rank in ranks_of(run):
        spent[rank["role"].partition("-")[0]] += rank["cpu_seconds"][Phase.TRAIN]
    microseconds = {kind: 1e6 * batch_size * of / samples for kind, of in spent.items()}
    return {
        "world": name,
        "batch": batch_size,
        "table server, µs per batch": microseconds["tables"] or None,
        "workers": microseconds["worker"],
        "dense server": microseconds["server"],
        "all": sum(microseconds.values()),
    }


if __name__ == "__main__":
    main()
