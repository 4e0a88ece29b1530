"""What MLPerf's DLRM v2 takes here, calculated: memory and bytes of worlds nobody has to start.

    python scripts/studies/mlperf.py

Tables have the sizes of MLPerf's own. How many categories of a batch differ is that of Criteo
Kaggle's profile, of those that bags add what chance makes of uniform draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import expm1, log1p

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.parallel.topology import ServerRole, WorkerRole
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import Layout, TableIds, distinct_ids, layout
from dlrm_hybrid.plan.memory import memory_bytes
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.run.assembly.build import profile
from dlrm_hybrid.telemetry.traffic import Traffic

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
    "one process": ("parallel=single", "parallel.trainers=1", "train.batch_size=65536"),
    "8 trainers (the recipe)": (),
    "8 trainers, stages": (CUTS,),
    "8 trainers, stages, compressed": COMPRESSED,
    "… as `dct_hybrid`, deduplicated": (*COMPRESSED, "embedding.deduplicate=true"),
    "8 trainers, 4 table servers": SERVED,
    "… stages, compressed": (*SERVED, *COMPRESSED),
}
GROUPS = {
    "tables": (Traffic.EMBEDDING,),
    "gradients, weights": (Traffic.GRADIENT_PUSH, Traffic.PARAMETER_PULL),
    "activations": (Traffic.ACTIVATION, Traffic.ACTIVATION_GRADIENT),
}


def main() -> None:
    """Print the table."""
    tables = 4 * sum(ROWS) * 128
    state = "with the state of adagrad twice that"
    print(f"tables: {sum(ROWS):,} rows, {tables / 1e9:.1f} GB, {state}")  # noqa: T201
    head = ("world", "bytes/sample", *GROUPS, "trainer", "table server", "server")
    print(Table(head, [_row(*one) for one in WORLDS.items()]).markdown())  # noqa: T201


def world_of(config: Config) -> Layout:
    """The world of a configuration, with tables of the benchmark's sizes."""
    sizes = [one.expand_to for one in builtin("criteo_1tb_multi_hot").categorical]
    kinds = distinct_ids(profile(), config.train.batch_size)
    distinct = tuple(
        min(rows, kind - expm1((size - 1) * kind * log1p(-1 / rows)) * rows)
        for kind, size, rows in zip(kinds, sizes, ROWS, strict=True)
    )
    ids = TableIds(rows=ROWS, distinct=distinct, per_row=sum(sizes), most_per_row=max(sizes))
    return layout(config, 0, ids=ids)


def _row(name: str, overrides: tuple[str, ...]) -> list[str]:
    config = validate(values_of([*RECIPE, *overrides]))
    world = world_of(config)
    sent = bytes_by_class(world, frames(world))
    samples = config.train.batch_size * world.topology.trainers
    groups = [sum(sent[one] for one in group) / samples for group in GROUPS.values()]
    most = [0, 0, 0]
    for rank in range(world.topology.size):
        role = world.topology.role(rank)
        kind = 0 if isinstance(role, WorkerRole) else 2 if isinstance(role, ServerRole) else 1
        most[kind] = max(most[kind], memory_bytes(world, rank, {}))
    figures = [f"{one:,.0f}" for one in (sum(groups), *groups)]
    return [name, *figures, *(f"{one / 1e9:,.1f} GB" if one else MISSING for one in most)]


if __name__ == "__main__":
    main()
