"""Sources of a world's batches: prepared rows, or batches that a program hands over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Read
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.telemetry.histogram import IdSample
from dlrm_hybrid.train.evaluation import EvaluatedRows
from dlrm_hybrid.types import ScoredPart


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """The rows of a run.

    Attributes:
        table_rows: rows of each embedding table.
        reader: makes the reader of a trainer's batches; the sample, if any, counts ids.
        evaluated: rows of each part that evaluations read.
        shards: prepared rows; None if a program hands batches over.
    """

    table_rows: tuple[int, ...]
    reader: Callable[[int, IdSample | None], Read]
    evaluated: Mapping[ScoredPart, EvaluatedRows] = field(
        default_factory=dict[ScoredPart, EvaluatedRows]
    )
    shards: Shards | None = None


def prepared(config: Config, shards: Shards) -> RowSource:
    """The prepared rows as the source of a run."""
    return RowSource(
        table_rows=shards.table_rows,
        reader=lambda trainer, sample: build_model.loader(config, shards, trainer, sample).read,
        evaluated=evaluated_rows(config, shards),
        shards=shards,
    )


def evaluated_rows(config: Config, shards: Shards) -> dict[ScoredPart, EvaluatedRows]:
    """The rows of each scored part, as evaluations read them."""
    return {
        part: EvaluatedRows(shards, rows, config.evaluate.batch_size)
        for part, rows in shards.scored_rows(config.data.test_part).items()
    }
