"""Steps of a run that is one process: model, tables and optimizer together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlrm_hybrid.data.loader import Loader, LoaderState
from dlrm_hybrid.model.schedule import Schedule
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.train.parts import Learned


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleLearner:
    """Learns one batch after the other.

    Attributes:
        trainer: the model with its optimizers.
        loader: training batches.
        schedule: learning rate of the dense parameters.
        embedding_schedule: learning rate of the tables.
    """

    trainer: Trainer
    loader: Loader
    schedule: Schedule
    embedding_schedule: Schedule

    def learn(self, step: int, at: LoaderState) -> tuple[Learned, LoaderState]:
        """Make one step from the batch at `at`; see `Parts.learn`."""
        batch, after = self.loader.read(at)
        lr = self.schedule.lr(step)
        result = self.trainer.step(
            torch.from_numpy(batch.dense_BI),
            torch.from_numpy(batch.ids_FB),
            torch.from_numpy(batch.label_B),
            lr=lr,
            embedding_lr=self.embedding_schedule.lr(step),
        )
        rows = len(batch.label_B)
        learned = Learned(
            loss_sum=float(result.loss) * rows, correct=int(result.correct), rows=rows, lr=lr
        )
        return learned, after
