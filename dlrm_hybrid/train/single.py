"""A run that is one process: model, tables and optimizer together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.data.loader import LoaderState, Read
from dlrm_hybrid.model.schedule import Schedule
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.telemetry.compression import Counts
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.train.evaluation import TestPart, evaluate
from dlrm_hybrid.train.parts import Learned


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SingleEngine:
    """Learns one batch after the other; an `Engine`.

    Attributes:
        trainer: the model with its optimizers.
        read: gives training batches.
        schedule: learning rate of the dense parameters.
        embedding_schedule: learning rate of the tables.
        test: the rows to evaluate.
    """

    trainer: Trainer
    read: Read
    schedule: Schedule
    embedding_schedule: Schedule
    test: TestPart

    @property
    def count(self) -> None:
        """See `Engine`."""
        return None

    @property
    def uncounted(self) -> frozenset[Traffic]:
        """See `Engine`."""
        return frozenset()

    @property
    def versions(self) -> None:
        """See `Engine`."""
        return None

    def learn(self, step: int, at: LoaderState) -> tuple[Learned, LoaderState]:
        """See `Engine`."""
        batch, after = self.read(at)
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

    def evaluate(self, check: Callable[[], None]) -> BinaryScores:
        """See `Engine`."""
        return evaluate(self.trainer.model, self.test, check)

    def tensors(self) -> Mapping[str, Tensor]:
        """See `Engine`."""
        return self.trainer.tensors()

    def compression(self) -> Counts:
        """See `Engine`; nothing travels."""
        return {}

    def restart(self, step: int) -> None:
        """See `Engine`; nothing else remembers steps."""
