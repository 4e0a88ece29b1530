"""`Predictor`: scores rows with a trained model and the vocabularies of its run.

Shapes: R rows, B rows of a batch, L labels if there are several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch.nn import Module

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.bounds import Extra
from dlrm_hybrid.checkpoint.folder import find_best, read_facts
from dlrm_hybrid.checkpoint.manifest import version
from dlrm_hybrid.checkpoint.reader import OnRead
from dlrm_hybrid.config.commands import Unknown
from dlrm_hybrid.config.outside import fault_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.outside import path_of
from dlrm_hybrid.predict.sources import NewRows, frame_block
from dlrm_hybrid.run.evaluating import check_vocabulary, saved_config, saved_preprocessing
from dlrm_hybrid.saved.delta import (
    DeltaManifest,
    ModelVersion,
    later_vocabulary,
    read_manifest,
    read_tensors,
)
from dlrm_hybrid.saved.encoding import Encoder, RefusedValueError
from dlrm_hybrid.saved.model import SavedModel
from dlrm_hybrid.types import ConfigError, DataError, DlrmError

if TYPE_CHECKING:
    import pandas as pd

BATCH_ROWS = 4096
UNKNOWN_KEY = "predict.unknown"


@final
class Predictor:
    """Scores rows of a DataFrame with the model of a run.

        scores = Predictor("runs/mine").predict(frame)

    The logits are those of `evaluate` in a run of one process: the same code computes them.

    Args:
        run: a run folder, whose best checkpoint is used, or the latest if the best is unknown; or
            one of its checkpoints, such as `…/checkpoints/latest`.
        prepared: a folder of prepared rows whose vocabularies to use; None for the checkpoint's.
        unknown: what to do with categories that the run has not seen, in columns where id 0 does
            not represent them: `error`, or `zero` for a row of zeros.
        extra: whether columns that the schema does not name are an `error`, or ignored.
        threads: number of torch's threads in this process; None leaves it unchanged.
        batch_rows: number of rows scored at a time.
        progress: called while the checkpoint is verified.
        model: class of the run's model if that is your own: a run folder imports nothing.

    Raises:
        ConfigError: the run's model is another class of your own than `model`.
        DataError: the checkpoint or the rows are missing or damaged, or do not fit together.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        prepared: str | Path | None = None,
        unknown: Unknown = "error",
        extra: Extra = "error",
        threads: int | None = None,
        batch_rows: int = BATCH_ROWS,
        progress: OnRead | None = None,
        model: type[Module] | None = None,
    ) -> None:
        if model is not None and (fault := fault_of("model", path_of(model))):
            raise ConfigError(f"model = {path_of(model)!r}: {fault}")
        checkpoint = find_best(Path(run))
        facts = read_facts(checkpoint)
        self.config: Config = saved_config(checkpoint, facts)
        if prepared is None:
            preprocessing = saved_preprocessing(checkpoint, facts)
        else:
            preprocessing = open_shards(Path(prepared), None).preprocessing
            check_vocabulary(checkpoint, facts, preprocessing)
        if threads is not None:
            torch.set_num_threads(threads)
        self.schema = preprocessing.schema.for_scoring
        self.extra: Extra = extra
        encoder = Encoder(preprocessing.columns(), unknown)
        self._batch_rows = batch_rows
        self._updating = Lock()
        # Replaced as a whole by `update`: whoever scores takes it once.
        self._serving = _Serving(
            version=ModelVersion(
                version=version(facts), checkpoint=str(checkpoint), step=facts["step"]
            ),
            preprocessing=preprocessing,
            encoder=encoder,
            model=SavedModel.load(
                self.config,
                checkpoint,
                preprocessing.manifest,
                Precision(self.config.precision),
                progress,
                padded_rows=encoder.padded_rows,
            ),
        )

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the present model, loaded or reached by deltas."""
        return Path(self._serving.version.checkpoint)

    @property
    def step(self) -> int:
        """Step of that checkpoint."""
        return self._serving.version.step

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of several labels, in the order of their scores; empty for one label."""
        return tuple(self.schema.loss_weights)

    @property
    def encoder(self) -> Encoder:
        """Encodes values as inputs of the model."""
        return self._serving.encoder

    def update(self, delta: str | Path) -> None:
        """Change the model by a delta that `export export.since=…` has written.

        Scores are then those of a Predictor of the later checkpoint, bit for bit. Calls of other
        threads go on meanwhile, each with one model, the earlier or the later one; both are in
        memory until then.

        Raises:
            DataError: it is damaged, or changes another model; the present one stays.
        """
        folder = Path(delta)
        with self._updating:
            manifest = read_manifest(folder)
            serving = self._serving
            if manifest.base.version != serving.version.version:
                raise DataError(
                    f"{folder}: changes the model of {manifest.base.text}, this is that of "
                    f"{serving.version.text}; apply deltas in their order, or load a checkpoint"
                )
            self._serving = serving.updated(self.config, folder, manifest)

    def predict(self, frame: pd.DataFrame) -> Float32s:
        """Probabilities of a click, float32 (R,), in the order of the rows; of `labels` (R, L).

        Args:
            frame: has all feature columns of the schema by name, with values as in files; None and
                NaN are missing values. Columns with a `default` in the schema may be left out;
                others that it names (label, `ignore`, time of the split) are ignored.

        Raises:
            DataError: a column is missing or unknown, or a value is invalid; names row and column.
        """
        return (
            torch.from_numpy(self.logits(frame_block(frame, self.schema, self.extra)))
            .sigmoid()
            .numpy()
        )

    def batch(self, block: NewRows) -> Batch:
        """Convert rows to a batch for the model, with labels of 0; raises like `logits`."""
        return self._serving.batch(block)

    def logits(self, block: NewRows) -> Float32s:
        """Logits of rows, float32 (R,), of `labels` (R, L).

        Raises:
            DataError: a category is unknown and `unknown` is `error`, or a number is too large;
                names the row.
        """
        serving = self._serving
        batch = serving.batch(block)
        logit_R = np.empty((len(batch.label_B), len(self.labels) or 1), np.float32)
        logit_R = logit_R if self.labels else logit_R[:, 0]
        for start in range(0, len(logit_R), self._batch_rows):
            rows = slice(start, start + self._batch_rows)
            logit_R[rows] = serving.model.logits(batch.part(rows))
        for row, *_ in np.argwhere(~np.isfinite(logit_R))[:1].tolist():
            raise DataError(f"{block.where(row)}: the logit is not finite: values are too large")
        return logit_R


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    version: ModelVersion
    preprocessing: Preprocessing
    encoder: Encoder
    model: SavedModel

    def batch(self, block: NewRows) -> Batch:
        values = block.values
        try:
            bags = self.preprocessing.expanded(self.encoder.bags(values))
            dense_BI = self.encoder.dense(values)
        except RefusedValueError as error:
            advice = (
                ", and no row of its table stands for such ones "
                f"({UNKNOWN_KEY}=zero scores it with zeros)"
            )
            reason = f"{error.reason}{advice if error.is_unknown else ''}"
            raise DataError(f"{block.where(error.row)}: {reason}") from None
        return Batch(dense_BI, bags, np.zeros(len(dense_BI), np.float32))

    def updated(self, config: Config, folder: Path, delta: DeltaManifest) -> _Serving:
        """The later model of a delta; raises DataError if that is damaged."""
        tensors = read_tensors(folder, delta)
        try:
            before, schema = self.encoder.columns.vocabularies, self.preprocessing.schema
            later = {
                first: later_vocabulary(tensors, first + 1, before[first])
                for first in dict.fromkeys(schema.first_columns)
            }
            columns = zip(before, schema.first_columns, strict=True)
            vocabularies = [replace(later[first], column=old.column) for old, first in columns]
            encoder = self.encoder.having(vocabularies)
            rows = tuple(
                max(1, vocabulary.table_rows) for vocabulary in encoder.columns.vocabularies
            )
            sizes = self.preprocessing.table_rows, schema.by_table(rows)
            if (delta.base_rows, delta.table_rows) != sizes:
                raise ValueError("rows of tables are not those of its categories")
            model = self.model.updated(
                config, tensors, delta.base_rows, delta.table_rows, encoder.padded_rows
            )
        except KeyError as error:
            raise DataError(f"{folder}: is damaged: has no tensor {error}") from None
        except (MemoryError, DlrmError):
            raise
        except Exception as error:  # untrusted tensors may make a library raise anything
            raise DataError(f"{folder}: is damaged: {error}") from error
        manifest = replace(self.preprocessing.manifest, table_rows=rows)
        preprocessing = replace(self.preprocessing, manifest=manifest)
        return _Serving(
            version=delta.model, preprocessing=preprocessing, encoder=encoder, model=model
        )
