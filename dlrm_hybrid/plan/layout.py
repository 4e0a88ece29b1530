"""Who computes and who owns what in a planned world, and how much of it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from math import expm1, inf, log1p
from pathlib import Path

import numpy as np

from dlrm_hybrid.bags import table_offsets
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.profile import WEIGHT_ONE, Profile, Staircase
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.parallel.topology import DenseTensor, Topology, lay_out
from dlrm_hybrid.plan.sizes import build_up
from dlrm_hybrid.run.assembly.build import model_spec, prepared_folder, profile, topology
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS

COUNTED_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps of a run that follow each other.

    Attributes:
        steps: how many.
        gradient: share of the elements of each tensor that was sent in them.
    """

    steps: int
    gradient: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Densities:
    """Shares of elements that are sent, where a run has measured them.

    Attributes:
        gradient: by tensor; others are as sparse as the configuration says.
        course: of the same, in the intervals of the run one after the other.
        activation: by boundary.
        overlap: factor on the power with which pulls become denser; see `plan.sizes.build_up`.
        ids: factor on the distinct ids of a batch that the profile of synthetic rows has.
        push: factor on the bytes of sparse pushes: what is sent lies closer together than chance
            would have it, and densities change from step to step.
        version: the same for what is pulled.
    """

    gradient: Mapping[str, float] = field(default_factory=dict[str, float])
    course: tuple[Interval, ...] = ()
    activation: Mapping[int, float] = field(default_factory=dict[int, float])
    overlap: float = 1.0
    ids: float = 1.0
    push: float = 1.0
    version: float = 1.0

    def distinct_trainers(self, trainers: int) -> float:
        """How many trainers that know nothing of each other send as much as these do."""
        return max(1.0, build_up(trainers) ** self.overlap)

    def over(self, steps: float) -> Densities:
        """Those of a run of so many steps, without the first ones, which nobody times.

        A threshold from a run's first gradients is too high once elements wait in the residual, so
        fewer are sent at first. Steps beyond those that were measured are as the second half of
        them: a threshold lets through up to 1.25 times its share for a while, then again less.
        """
        weights = _weights([one.steps for one in self.course], steps)
        sums: dict[str, tuple[float, float]] = {}
        for one, weight in zip(self.course, weights, strict=True):
            for name, share in one.gradient.items() if weight else ():
                total, weighed = sums.get(name, (0.0, 0.0))
                sums[name] = total + weight, weighed + weight * share
        known = {name: weighed / total for name, (total, weighed) in sums.items()}
        return replace(self, gradient={**self.gradient, **known})


def _weights(lengths: list[int], steps: float) -> list[float]:
    """How many steps of a run each interval of another one stands for, by their lengths."""
    ends = list(accumulate(lengths))
    known = ends[-1] if ends else 0
    first = WARMUP_STEPS if min(steps, known) > WARMUP_STEPS else 0

    def within(length: int, end: int, low: float, high: float) -> float:
        return max(0.0, min(end, high) - max(end - length, low))

    parts = list(zip(lengths, ends, strict=True))
    late = [within(*one, known / 2, known) for one in parts]
    if steps == inf:
        return late
    beyond = max(0.0, steps - known) / (known / 2) if known else 0.0
    return [within(*one, first, steps) + beyond * at for one, at in zip(parts, late, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableIds:
    """The ids of a trainer's batch.

    Attributes:
        rows: of each table.
        distinct: ids of a batch in each table, on average.
        per_row: ids that a row has in all tables, on average; None: one in each.
        most_per_row: in the table where these are most, on average of some batches.
    """

    rows: tuple[int, ...]
    distinct: tuple[float, ...]
    per_row: float | None = None
    most_per_row: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A planned world: who holds which part of the model, and what is sent.

    Attributes:
        config: of the run.
        spec: the whole model.
        partition: its stages.
        topology: ranks of workers and servers.
        tensors: every dense parameter with its stage and server.
        densities: of what is sent.
        ids: of a trainer's batch.
    """

    config: Config
    spec: ModelSpec
    partition: Partition
    topology: Topology
    tensors: tuple[DenseTensor, ...]
    densities: Densities
    ids: TableIds

    def bucket(self, stage: int, server: int) -> list[DenseTensor]:
        """The tensors of a stage that one server owns."""
        return [one for one in self.tensors if (one.stage, one.server) == (stage, server)]

    def elements(self, stage: int) -> int:
        """Dense parameters of a stage."""
        return sum(one.count for one in self.tensors if one.stage == stage)


def layout(
    config: Config,
    train_rows: int,
    densities: Densities | None = None,
    ids: TableIds | None = None,
) -> Layout:
    """The world that a configuration describes.

    Args:
        config: of the run.
        train_rows: that the vocabulary was made of.
        densities: as a run has measured them; None for what the configuration says.
        ids: of the tables, where they are known; then `train_rows` says nothing.

    Raises:
        ConfigError: the parts do not fit together.
        DataError: the rows of a table of one's own are not prepared.
    """
    known = densities or Densities()
    if ids is not None:
        pass
    elif config.data.name in ("table", "criteo_1tb_multi_hot"):
        ids = _counted(prepared_folder(config), config.train.batch_size)
    else:
        ids = TableIds(
            rows=table_rows(profile(), config, train_rows),
            distinct=tuple(distinct_ids(profile(), config.train.batch_size)),
        )
    spec = model_spec(config, ids.rows)
    partition = Partition.of(spec, config.parallel.cuts)
    return Layout(
        config=config,
        spec=spec,
        partition=partition,
        topology=topology(config),
        tensors=lay_out(spec.dense_shapes(), partition.stage_of, config.parallel.servers),
        densities=known,
        ids=replace(
            ids,
            distinct=tuple(
                min(known.ids * one, total)
                for one, total in zip(ids.distinct, ids.rows, strict=True)
            ),
        ),
    )


@cache
def _counted(folder: Path, batch_size: int) -> TableIds:
    """Those of some batches of prepared rows: the profile is of Criteo's rows alone."""
    shards = open_shards(folder, expected=None)
    schema, batch_rows = shards.schema, min(batch_size, len(shards.train_rows))
    firsts = np.linspace(0, len(shards.train_rows) - batch_rows, COUNTED_BATCHES, dtype=np.int64)
    distinct = np.zeros((COUNTED_BATCHES, len(schema.categorical)))
    counted = np.zeros_like(distinct)
    for number, first in enumerate(firsts.tolist()):
        (batch,) = sequential_batches(shards, range(first, first + batch_rows), batch_rows)
        values_N, offsets = batch.bags.values.reshape(-1), table_offsets(batch.bags).tolist()
        for table, (start, stop) in enumerate(pairwise(offsets)):
            distinct[number, table] = len(np.unique(values_N[start:stop]))
            counted[number, table] = stop - start
    has_bags = schema.multi_hot or schema.expanded
    return TableIds(
        rows=shards.table_rows,
        distinct=tuple(distinct.mean(0).tolist()),
        per_row=float(counted.sum(1).mean()) / batch_rows if has_bags else None,
        most_per_row=float(counted.max(1).mean()) / batch_rows,
    )


def matrices(world: Layout, stage: int) -> list[tuple[int, int]]:
    """Outputs and inputs of all matrix products of a stage, layers and interaction."""
    shapes = world.spec.dense_shapes()
    names = world.partition.stages[stage].parameter_names
    return [(shape[0], shape[1]) for shape in map(shapes.__getitem__, names) if len(shape) == 2]


def table_rows(profile: Profile, config: Config, train_rows: int) -> tuple[int, ...]:
    """Categories that so many rows of the profile have in each column, and one for the others."""
    wrapped = config.data.max_ind_range
    found = (round(one) + 1 for one in distinct_ids(profile, train_rows))
    return tuple(min(one, wrapped) if wrapped else one for one in found)


def distinct_ids(profile: Profile, rows: int) -> list[float]:
    """How many distinct categories so many rows have in each column, on average."""
    columns = profile.integers + profile.categoricals
    return [_distinct(columns, one, rows) for one in range(len(profile.integers), len(columns))]


def _distinct(columns: tuple[Staircase, ...], number: int, rows: int) -> float:
    column = columns[number]
    # Of columns that are empty together one draws.
    missing = columns[column.missing_with].missing / WEIGHT_ONE
    found = 1 - (1 - missing) ** rows
    stops = (*column.starts[1:], column.stop)
    for start, stop, weight in zip(column.starts, stops, column.weights, strict=True):
        chance = (1 - missing) * weight / WEIGHT_ONE / (stop - start)
        found += (stop - start) * (-expm1(rows * log1p(-chance)) if chance < 1 else 1.0)
    return found
