"""A run that is one process: model, tables and optimizer together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.data.loader import LoaderState, Read
from dlrm_hybrid.model.optimizer import Schedule
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.parallel.finite import first_not_finite, is_finite, key_of_rate
from dlrm_hybrid.telemetry.compression import Counts
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.train.evaluation import TestPart, evaluate
from dlrm_hybrid.train.parts import Learned
from dlrm_hybrid.types import DivergedError

# To check the dense weights takes 60 µs with the model of the paper: in so many rows once, it is a
# thousandth of the step. What is not finite stays so, whenever it is looked for.
CHECKED_ROWS = 1024


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
        if (step + 1) % max(1, CHECKED_ROWS // rows) == 0:
            self._check_finite(step)
        learned = Learned(
            loss_sum=float(result.loss) * rows, correct=int(result.correct), rows=rows, lr=lr
        )
        return learned, after

    def _check_finite(self, step: int) -> None:
        """Refuse dense weights that are not finite: a NaN can hide from the loss behind a ReLU."""
        if first_not_finite(self.trainer.weights.items()) is None:
            return
        found = [name for name, tensor in self.tensors().items() if not is_finite(tensor)]
        rates = {
            "optimizer.lr": self.schedule.lr(step),
            "embedding.lr": self.embedding_schedule.lr(step),
        }
        keys = [key for key in rates if any(key_of_rate(name) == key for name in found)]
        raise DivergedError(
            f"step {step + 1}: {found[0]} is not finite; "
            f"{' or '.join(f'{key} = {rates[key]}' for key in keys)} may be too high"
        )

    def evaluate(self, check: Callable[[int], None]) -> BinaryScores:
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
