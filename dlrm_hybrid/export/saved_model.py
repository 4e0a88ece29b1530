"""The model of a checkpoint, whatever world has trained it, in this process.

Shapes: B rows of a batch, I integer features, F tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.checkpoint.reader import Progress, open_checkpoint
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model

Floats = npt.NDArray[np.float32]


@final
@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model that is not trained any further.

    Attributes:
        model: with the weights of the checkpoint.
    """

    model: Dlrm

    @classmethod
    def load(
        cls,
        config: Config,
        folder: Path,
        table_rows: tuple[int, ...],
        precision: Precision,
        progress: Progress | None = None,
        padded_rows: tuple[int, ...] | None = None,
    ) -> SavedModel:
        """Read the weights of a checkpoint.

        Args:
            config: of its run.
            folder: of the checkpoint.
            table_rows: of each table.
            precision: to compute in.
            progress: is called while a file is verified.
            padded_rows: of each table, at least as many; rows beyond the checkpoint's are zero.

        Raises:
            DataError: a file is missing, changed or does not fit.
        """
        spec = build.model_spec(config, padded_rows or table_rows)
        options = build_model.embedding_options(config)
        loaded = cls(Dlrm(spec, options, precision, seed=0))
        tensors = loaded.tensors
        for name, rows in zip(spec.table_names, table_rows, strict=True):
            table = tensors[f"{name}.weight"]
            table[rows:] = 0
            tensors[f"{name}.weight"] = table[:rows]
        open_checkpoint(folder, progress).fill(full_pieces(tensors))
        return loaded

    @property
    def spec(self) -> ModelSpec:
        """Its shape."""
        return self.model.spec

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its weights by the names of a checkpoint; writing to one changes it."""
        dense = {name: one.detach() for name, one in self.model.dense_parameters().items()}
        return {**self.model.embeddings.weights(), **dense}

    def logits(self, batch: Batch) -> Floats:
        """Logits (B,) of rows; the same bits as in an evaluation of one process."""
        with torch.no_grad():
            bags: Bags[Tensor] = batch.bags.map(lambda ids: torch.from_numpy(ids))
            logit_B: Tensor = self.model(torch.from_numpy(batch.dense_BI), bags)
        return logit_B.numpy()

    def score(self, batch: Batch) -> tuple[Floats, Floats]:
        """Logits and probabilities (B,) of rows."""
        logit_B = self.logits(batch)
        return logit_B, torch.from_numpy(logit_B).sigmoid().numpy()
