"""The model of a checkpoint in this process, whatever world has trained it.

Shapes: B rows of a batch, F tables, D embedding dimension, N inputs or outputs of a stage, L labels
if there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.checkpoint.reader import OnRead, open_checkpoint
from dlrm_hybrid.config.schema import Config, ModelConfig
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.manifest import Manifest
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.embeddings import Embeddings, with_means
from dlrm_hybrid.model.layers.keep_largest import KeepLargest
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.sharding import Cast, casts
from dlrm_hybrid.model.spec import ModelShape, Partition
from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly.model import evaluation_masks
from dlrm_hybrid.train import statistics

BLOCK_ROWS = 1 << 20  # rows rounded at a time


@final
@dataclass(frozen=True, slots=True)
class SavedModel:
    """A trained model, for scoring.

    Attributes:
        stages: its dense layers, cut where boundaries mask activations.
        masks: masks of activations, by the layer that they follow.
        rounding: rounding of pooled embeddings, if evaluations of the run's world send them.
        rounding_of_rows: rounding that its tables have had already, if the run's world sends rows.
    """

    spec: ModelShape
    embeddings: Embeddings
    stages: tuple[StageModel, ...]
    masks: Mapping[str, KeepLargest] = field(default_factory=dict[str, KeepLargest])
    rounding: Cast | None = None
    rounding_of_rows: Cast | None = None

    @classmethod
    def load(
        cls,
        config: Config,
        folder: Path,
        rows: Manifest,
        precision: Precision,
        progress: OnRead | None = None,
        *,
        padded_rows: tuple[int, ...] | None = None,
        rounds: bool = True,
    ) -> SavedModel:
        """Read the weights of a checkpoint.

        Args:
            rows: the rows that the model was trained on.
            progress: called while a file is verified.
            padded_rows: rows of each table to make, at least as many; the additional ones are zero.
            rounds: whether to round what evaluations of the run's world send (table rows or pooled
                embeddings, and masked activations), so that scores are those of `evaluate`.

        Raises:
            DataError: a file is missing, changed or does not fit.
        """
        spec = build.shape_of(config, rows)
        table_rows = spec.table_rows
        spec = replace(spec, table_rows=padded_rows or table_rows)
        masks = evaluation_masks(config, spec, rounds=rounds)
        pooled, of_rows = _roundings(config) if rounds else (None, None)
        tables, stages = Embeddings(spec, config.embedding), _stages(spec, precision, masks)
        model = cls(spec, tables, stages, masks, pooled, of_rows)
        tensors = model.tensors
        for name, count in zip(spec.table_names, table_rows, strict=True):
            table = tensors[f"{name}.weight"]
            table[count:] = 0
            tensors[f"{name}.weight"] = table[:count]
        checkpoint = open_checkpoint(folder, progress)
        of_norms = {name: tensors.pop(name) for name in spec.statistics_shapes()}
        checkpoint.fill(full_pieces(tensors))
        for name, running in statistics.saved(checkpoint, spec.statistics_shapes()).items():
            of_norms[name].copy_(running)
        if of_rows is not None:
            for name in spec.table_names:
                _round(tensors[f"{name}.weight"], of_rows)
        return model

    def updated(
        self,
        config: Config,
        delta: Mapping[str, Tensor],
        base_rows: tuple[int, ...],
        table_rows: tuple[int, ...],
        padded_rows: tuple[int, ...],
    ) -> SavedModel:
        """The model with the tensors of a delta; `self` stays as it is.

        Args:
            delta: see `saved.delta`.
            base_rows: rows of each table of this model, without those of zeros.
            table_rows: rows of each table after the delta.
            padded_rows: as for `load`.

        Raises:
            ValueError: the tensors do not fit; says which.
        """
        spec = replace(self.spec, table_rows=padded_rows)
        model = replace(
            self,
            spec=spec,
            embeddings=Embeddings(spec, config.embedding),
            stages=_stages(spec, Precision(config.precision), self.masks),
        )
        tensors, before = model.tensors, self.tensors
        counts = zip(spec.table_names, base_rows, table_rows, strict=True)
        for name, base, rows in counts:
            table_RD, weight = tensors.pop(f"{name}.weight"), f"{name}.weight"
            changed_R, new_RD = delta[f"{name}.rows"].long(), delta[weight].clone()
            if new_RD.shape != (len(changed_R), table_RD.shape[1]):
                raise ValueError(f"{weight} is {[*new_RD.shape]} for {len(changed_R)} rows")
            if not _makes_up(changed_R, base, rows):
                raise ValueError(f"{name}.rows are not of a table of {base} rows that gets {rows}")
            if self.rounding_of_rows is not None:
                _round(new_RD, self.rounding_of_rows)
            table_RD[:base] = before[weight][:base]
            table_RD[rows:] = 0
            table_RD[changed_R] = new_RD
        for name, tensor in tensors.items():
            new, wanted = delta[name], f"{tensor.dtype} {[*tensor.shape]}"
            if (new.dtype, new.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{name} is {new.dtype} {[*new.shape]}, wanted {wanted}")
            tensor.copy_(new)
        return model

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and statistics by name; writing to one changes the model."""
        tensors = self.embeddings.weights()
        for stage in self.stages:
            dense = {name: weight.detach() for name, weight in stage.dense_parameters().items()}
            tensors = {**tensors, **dense, **stage.statistics()}
        return tensors

    def logits(self, batch: Batch) -> Float32s:
        """Logits of a batch, (B,) or (B, L), bit for bit those of an evaluation in one process."""
        with torch.no_grad():
            bags: Bags[Tensor] = batch.bags.map(lambda ids: torch.from_numpy(ids))
            x_BN, columns = torch.from_numpy(batch.dense_BI), ColumnBags.of(self.spec)
            pooled_BFD = columns.by_column(self.embeddings(columns.by_table(bags)))
            if self.rounding is not None:
                pooled_BFD = self.rounding.rounded(pooled_BFD)
            pooled_BFD = with_means(pooled_BFD, bags)
            for stage, mask in zip(self.stages, (*self.masks.values(), None), strict=True):
                x_BN = stage(x_BN, pooled_BFD if stage.part.has_interaction else None)
                x_BN = x_BN if mask is None else mask(x_BN)
        return x_BN.squeeze(1).numpy()

    def score(self, batch: Batch) -> tuple[Float32s, Float32s]:
        """Logits and probabilities of a batch, each (B,) or (B, L)."""
        logit_B = self.logits(batch)
        return logit_B, torch.from_numpy(logit_B).sigmoid().numpy()


def _stages(
    spec: ModelShape, precision: Precision, masks: Mapping[str, KeepLargest]
) -> tuple[StageModel, ...]:
    """The dense layers, cut where boundaries mask activations."""
    parts = Partition.of(spec, tuple(masks)).stages
    return tuple(StageModel(spec, part, precision, seed=0) for part in parts)


def scoring(config: Config, spec: ModelShape) -> tuple[object, ...]:
    """What decides the scores of a model beside its tensors: equal where models score alike."""
    model = config.model
    if isinstance(model, ModelConfig):
        model = replace(model, dropout=0.0, bottom_dropout=None)
    masks = evaluation_masks(config, spec, rounds=True)
    kept = [(cut, mask.k, mask.dtype, mask.bits) for cut, mask in masks.items()]
    return model, config.precision, _roundings(config), kept


def _makes_up(changed_R: Tensor, base: int, rows: int) -> bool:
    """Whether the rows of a delta and those of its base make up a table, each once."""
    is_inside = rows >= base and bool(((changed_R >= 0) & (changed_R < rows)).all())
    is_ordered = bool((changed_R.diff() > 0).all())
    return is_inside and is_ordered and int((changed_R >= base).sum()) == rows - base


def _round(table_RD: Tensor, rounding: Cast) -> None:
    for start in range(0, len(table_RD), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        table_RD[block] = rounding.rounded(table_RD[block])


def _roundings(config: Config) -> tuple[Cast | None, Cast | None]:
    """Rounding of pooled embeddings, and of table rows, that evaluations of a run's world send."""
    is_served, precision = config.embedding.name == "served", config.embedding.comm_precision
    if precision == "float32" or (config.parallel.trainers == 1 and not is_served):
        return None, None
    rounding, _ = casts(precision)
    rows_travel = is_served or config.embedding.deduplicate
    return (None, rounding) if rows_travel else (rounding, None)
