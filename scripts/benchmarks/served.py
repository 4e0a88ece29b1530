"""Compares tables on table servers with tables in trainers: scores, bytes, speed on slow links.

    python scripts/benchmarks/served.py quality RUNS    test log-loss over staleness of lookups
    python scripts/benchmarks/served.py bytes RUNS      of tables, beside those expected from rows
    python scripts/benchmarks/served.py links RUNS      samples per second on links with latency

Trains in folders of RUNS; complete runs are not repeated, so an interrupted measurement continues.
Other arguments are overrides of every run. `bytes` and `links` need what `network=emulated` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy as np
from harness import (
    Page,
    Part,
    Row,
    arguments,
    percent_more,
    publish,
    ranks_of,
    samples_of,
    slug,
    spread,
    train_once,
    trained,
)
from utilisation import cpu_percent, faster, network_percent, speed

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
from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.run.assembly import build, model
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.traffic import Phase

TWO = ("parallel.machines=2", "parallel.servers=1")
SERVED = ("embedding=served", "parallel.table_servers=1")
BOUNDED = "sync=bounded"


def cached(rows: int, batches: int) -> tuple[str, ...]:
    """Words for served tables with a cache in each trainer."""
    return (*SERVED, f"embedding.cache_rows={rows}", f"embedding.cache_batches={batches}")


QUALITY_WORLDS: Mapping[str, Sequence[str]] = {
    "served-0": SERVED,
    "served-4": (*SERVED, "embedding.staleness=4"),
    "served-16": (*SERVED, "embedding.staleness=16"),
    "served-4-bounded-1": (*SERVED, "embedding.staleness=4", BOUNDED),
    "cached-16": cached(10_000, 16),
    "served-4-cached-16": (*cached(10_000, 16), "embedding.staleness=4"),
}
QUALITY = (
    *("parallel=hybrid", "parallel.world=in_process", "parallel.cuts=[]"),
    *("optimizer.schedule=linear", "checkpoint.minutes=0"),
)
SEEDS = (0, 1, 2)

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
COMPRESSED = (
    *("+experiment=dct_hybrid", "train.evaluate_every=0"),
    *("checkpoint.every=0", "checkpoint.minutes=0"),
)
LINKED = ("network=emulated", "network.rate=1gbit")
BATCH_SIZES = (128, 2048)
BYTES_ROWS = 2 * 128 * 205

LINK_WORLDS: Mapping[str, Sequence[str]] = {
    "sharded, sync": (),
    "sharded, bounded 1": (BOUNDED,),
    "served 0, sync": SERVED,
    "served 4, sync": (*SERVED, "embedding.staleness=4"),
    "served 4, bounded 1": (*SERVED, "embedding.staleness=4", BOUNDED),
    "served 0, async": (*SERVED, "sync=async"),
    "served 4, async": (*SERVED, "embedding.staleness=4", "sync=async"),
    "served 0, async, 2 threads": (*SERVED, "sync=async", "parallel.threads=2"),
    "served 0, async, 4 threads": (*SERVED, "sync=async", "parallel.threads=4"),
    "served 4, bounded 2": (*SERVED, "embedding.staleness=4", BOUNDED, "sync.staleness=2"),
}
LINKS: Mapping[str, Sequence[str]] = {
    "100mbit-20ms": ("network.rate=100mbit", "network.latency=20ms", "train.steps=85"),
    "1gbit-1ms": ("network.rate=1gbit", "network.latency=1ms", "train.steps=305"),
}
CUTS: Mapping[str, Sequence[str]] = {
    "3": (),
    "2": ("parallel.cuts=[bottom.2]",),
    "1": ("parallel.cuts=[]", "activation=none"),
}
LATE = (*COMPRESSED, "network=emulated", "data.rows=100000", "train.epochs=10")
LINKS_NOTE = """
Samples/s and their ratio to the first row, turn by turn: median (lowest – highest). A step's time
is also given in one-way delays of the link, for it is mostly a row of them. Network use is that of
the busiest link, CPU use that of all cores, without what emulating takes."""


def main() -> None:
    """Run what is missing of what the first word says, print the page."""
    parser = arguments(__doc__, "quality", "bytes", "links", runs=True, repeats=3)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--stages", nargs="+", choices=CUTS, default=["3"], help="of links")
    parser.add_argument(
        "--worlds", nargs="+", choices=LINK_WORLDS, default=list(LINK_WORLDS), help="of links"
    )
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        if options.what == "quality":
            return {"Test scores": quality(options.runs, overrides)}
        if options.what == "bytes":
            found = run_bytes(options.runs, overrides).items()
            return {
                "Bytes of tables": [bytes_row(*one) for one in found],
                "CPU time of the table server": [cpu_row(*one) for one in found],
            }
        tables: dict[str, Part] = {}
        for link, stages in product(options.links, options.stages):
            words = (*LATE, *LINKS[link], *CUTS[stages])
            worlds = {name: (*words, *LINK_WORLDS[name]) for name in options.worlds}
            folder = options.runs / link / f"{stages}-stages"
            turns = trained(folder, worlds, overrides, turns=options.repeats)
            tables[f"{link}, {stages} stages"] = Part(
                link_rows(turns), "" if tables else LINKS_NOTE
            )
        return tables

    publish(measure, options.output)


def quality(runs: Path, overrides: Sequence[str]) -> list[Row]:
    """Test log-loss of each world by seed, and against the first world's of the same seed."""
    worlds = {name: (*QUALITY, *world) for name, world in QUALITY_WORLDS.items()}
    found = trained(runs / "quality", worlds, overrides, seeds=SEEDS)
    losses = {name: [run.summary["test"]["loss"] for run in own] for name, own in found.items()}
    first = next(iter(losses.values()))
    return [
        {
            "world": name,
            **{f"seed {seed}": f"{loss:.4f}" for seed, loss in zip(SEEDS, own, strict=True)},
            "mean": mean_spread(own, 4),
            "to the first, %": percent_more(own, first, 2),
        }
        for name, own in losses.items()
    ]


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


def link_rows(turns: Mapping[str, Sequence[Run]]) -> list[Row]:
    """What each world reaches on one kind of links."""
    first = next(iter(turns.values()))
    one_way_seconds = first[0].summary["network"]["latency"]["one_way_seconds"]
    return [
        {
            "world": name,
            "samples/s": spread([speed(run) for run in runs], 0),
            "to the first": spread(faster(runs, first), 2),
            "ms per step": f"{1e3 * step_seconds(runs):.1f}",
            "one-way delays": f"{step_seconds(runs) / one_way_seconds:.1f}",
            "network, %": f"{median(network_percent(run) for run in runs):.1f}",
            "CPU, %": f"{median(cpu_percent(run) for run in runs):.0f}",
            "train loss": f"{mean(run.summary['train']['loss'] for run in runs):.4f}",
        }
        for name, runs in turns.items()
    ]


def step_seconds(runs: Sequence[Run]) -> float:
    """Of a step of all trainers; the median over runs."""
    config = runs[0].config
    samples = config["parallel"]["trainers"] * config["train"]["batch_size"]
    return samples / median(speed(run) for run in runs)


if __name__ == "__main__":
    main()
