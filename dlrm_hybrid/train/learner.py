"""A worker with all that it trains with; what it does are programs, which its engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.peers import MasterClient
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.finite import check_weights, is_check_due
from dlrm_hybrid.parallel.step import StepMetrics, train_step
from dlrm_hybrid.parallel.worker import Worker, flight, load_flight, stage_inputs
from dlrm_hybrid.train import statistics
from dlrm_hybrid.types import Tick, Version


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A worker, the client of its weights, and its compressors.

    Attributes:
        worker: the worker's stage, boundaries and clients.
        client: client of its weights: the one below that of its steps, if there are two.
        compression: compressors of the worker.
    """

    worker: Worker
    client: ServerClient | MasterClient
    compression: Compression

    @property
    def trainer(self) -> int:
        """Number of the worker's trainer."""
        return self.compression.trainer

    @property
    def masters(self) -> MasterClient | None:
        """The client, if the worker has the masters of its weights itself."""
        return None if isinstance(self.client, ServerClient) else self.client

    def learn(self, step: int, batch: Batch, coming: Sequence[Batch] = ()) -> Program[StepMetrics]:
        """Make one training step; `coming` are the next ones, as far as its tables look ahead."""
        return train_step(self.worker, Tick(step), stage_inputs(self.worker, batch, coming))

    def check_weights(
        self,
        step: int,
        rows: int,
        schedule: LrSchedule,
        tensors: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Check weights after a step, now and then, where no server has checked the pushes.

        Args:
            step: number of the step.
            rows: number of its rows.
            schedule: learning rate of the dense parameters.
            tensors: see `finite.check_weights`; None for those of this worker.
        """
        masters, worker = self.masters, self.worker
        if masters is not None and is_check_due(step, rows):
            rates = {
                "optimizer.lr": schedule.lr(step),
                "embedding.lr": worker.embedding_schedule.lr(step),
            }
            check_weights(step, worker.name, masters.weights, tensors or masters.tensors, rates)

    def pieces(self, step: int, emptied: int) -> Program[list[Piece]]:
        """Views of what a checkpoint must hold of this worker, between two steps.

        Args:
            step: number of steps done.
            emptied: the last step at which no batch was in flight.
        """
        worker, masters = self.worker, self.masters
        pieces = self.compression.pieces()
        pieces += statistics.pieces(self.trainer, worker.stage.model)
        if worker.tables is not None:
            pieces += yield from worker.tables.state_ahead()
        if masters is not None:
            yield from masters.pull()
            pieces += full_pieces({} if self.trainer else masters.tensors())
        return pieces + (yield from flight(worker, step, emptied))

    def restart(self, step: int, emptied: int, values: Mapping[str, Tensor]) -> Program[None]:
        """Resume after so many batches from `pieces` and the servers' weights; see `pieces`."""
        worker = self.worker
        self.compression.load(values)
        self.client.restart(worker.pipeline.pushed(worker.part.index, step, emptied), values)
        if worker.tables is not None:
            worker.tables.restart(Version(step), values)
        yield from load_flight(worker, step, emptied, values)
