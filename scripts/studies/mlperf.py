"""Calculates memory and bytes of worlds that train MLPerf's DLRM v2, without starting them.

    python scripts/studies/mlperf.py

Tables have MLPerf's sizes. The number of distinct categories in a batch is that of Criteo Kaggle's
profile; of the ids that bags add, it is the expected one for uniform draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import expm1, log1p

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.model import spec_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.profile import WEIGHT_ONE, Staircase
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.model.spec import DataShape
from dlrm_hybrid.parallel.topology import ServerRole, WorkerRole
from dlrm_hybrid.plan.counting import BatchIds, exchange_bytes
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.memory import memory_bytes
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.run.assembly.build import profile

# mlcommons/training, recommendation_v2/torchrec_dlrm/README.MD, --num_embeddings_per_feature
ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
RECIPE = ("+experiment=mlperf_v2", f"data.raw=[{','.join(f'day_{day}.gz' for day in range(24))}]")
CUTS = "parallel.cuts=[bottom.2,top.2]"
COMPRESSED = (
    *("gradient=dct", "gradient.precision=bfloat16", "pull.precision=bfloat16"),
    *("embedding.comm_precision=bfloat16", "activation=dct", "activation.precision=bfloat16", CUTS),
)
SERVED = ("embedding=served", "embedding.optimizer=adagrad", "parallel.table_servers=4")
WORLDS: Mapping[str, tuple[str, ...]] = {
    "one process": ("parallel=single", "train.batch_size=65536"),
    "8 trainers (the recipe)": (),
    "8 trainers, stages": (CUTS,),
    "8 trainers, stages, compressed": COMPRESSED,
    "… as `dct_hybrid`, deduplicated": (*COMPRESSED, "embedding.deduplicate=true"),
    "8 trainers, 4 table servers": SERVED,
    "… stages, compressed": (*SERVED, *COMPRESSED),
}
HEAD = ("tables", "gradients, weights", "activations")
FLOAT_BYTES = 4


def main() -> None:
    """Print the table."""
    tables = 4 * sum(ROWS) * 128
    state = "with the state of adagrad twice that"
    print(f"tables: {sum(ROWS):,} rows, {tables / 1e9:.1f} GB, {state}")  # noqa: T201
    head = ("world", "bytes/sample", *HEAD, "trainer", "table server", "server")
    print(Table(head, [_row(*one) for one in WORLDS.items()]).markdown())  # noqa: T201


def gap_bits(density: float) -> float:
    """Of the Rice code of a gap between elements that are spread evenly."""
    stay = log1p(-density)
    return min(power + 1 / -expm1(stay * 2**power) for power in range(32))


def ids_of(config: Config) -> BatchIds:
    """Of a trainer's batch; each table has all of a row's ids for it."""
    rows, columns = config.train.batch_size, profile().integers + profile().categoricals
    sizes = [one.expand_to for one in builtin("criteo_1tb_multi_hot").categorical]
    kinds = [distinct(columns, len(profile().integers) + one, rows) for one in range(len(sizes))]
    different = [
        min(all_, kind - expm1((size - 1) * kind * log1p(-1 / all_)) * all_)
        for kind, size, all_ in zip(kinds, sizes, ROWS, strict=True)
    ]
    coded = sum(
        one * gap_bits(min(one / all_, 1 - 1e-9)) / 8
        for one, all_ in zip(different, ROWS, strict=True)
    )
    dim, bags = config.model.embedding_dim, rows * len(ROWS)
    return BatchIds(
        bags=bags,
        looked_up=rows * sum(sizes),
        distinct=sum(different),
        bag_elements=dim * bags,
        distinct_elements=dim * sum(different),
        coded_bytes=coded,
        are_lists=True,
    )


def distinct(columns: Sequence[Staircase], number: int, rows: int) -> float:
    """How many different categories so many rows have in a column, on average."""
    column = columns[number]
    missing = columns[column.missing_with].missing / WEIGHT_ONE
    different = 1 - (1 - missing) ** rows
    stops = (*column.starts[1:], column.stop)
    for start, stop, weight in zip(column.starts, stops, column.weights, strict=True):
        chance = (1 - missing) * weight / WEIGHT_ONE / (stop - start)
        share = -expm1(rows * log1p(-chance)) if chance < 1 else 1.0
        different += (stop - start) * share
    return different


def sparse_bytes(count: float, density: float, value_bytes: int) -> float:
    """Of some elements with their positions."""
    return count * density * (value_bytes + gap_bits(density) / 8)


def sent(world: Layout) -> tuple[float, float, float]:
    """Of tables, of gradients and weights, and of activations: bytes of a sample."""
    config, topology, keys = world.config, world.topology, world.config.embedding
    trainers, rows, ids = topology.trainers, config.train.batch_size, ids_of(config)
    elements = sum(one.count for one in world.tensors)
    tables = weights = passed = 0.0
    if topology.table_servers:
        row_bytes = config.model.embedding_dim * (2 if keys.comm_precision == "bfloat16" else 4)
        tables = 2 * (ids.coded_bytes + ids.distinct * row_bytes)
    elif trainers > 1:
        tables = (trainers - 1) * sum(exchange_bytes(config, ids))
    is_sparse = config.gradient.name != "none"
    # Trainers' choices overlap: docs/results/buildup.md.
    for density in (0.01, 1 - 0.99 ** (trainers**0.75)) if topology.servers else ():
        sparse = sparse_bytes(elements, density, 2)
        weights += sparse if is_sparse else FLOAT_BYTES * elements
    for stage in world.partition.stages[:-1]:
        count = rows * stage.output_width
        if config.activation.name == "none":
            passed += 2 * FLOAT_BYTES * count
        else:
            passed += sparse_bytes(count, 0.1, 2) + 0.1 * count * 2
    return tables / rows, weights / rows, passed / rows


def _row(name: str, overrides: tuple[str, ...]) -> list[str]:
    config = validate(values_of([*RECIPE, *overrides]))
    world = Layout(config=config, spec=spec_of(config.model, DataShape(table_rows=ROWS)), sent={})
    groups = sent(world)
    most = [0, 0, 0]
    for rank in range(world.topology.size):
        role = world.topology.role(rank)
        kind = 0 if isinstance(role, WorkerRole) else 2 if isinstance(role, ServerRole) else 1
        most[kind] = max(most[kind], memory_bytes(world, rank, {}))
    figures = [f"{one:,.0f}" for one in (sum(groups), *groups)]
    return [name, *figures, *(f"{one / 1e9:,.1f} GB" if one else MISSING for one in most)]


if __name__ == "__main__":
    main()
