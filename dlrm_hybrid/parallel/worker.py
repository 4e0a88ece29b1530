"""One worker: its parts, its share of a batch, its predictions and its state in flight.

Shapes: B rows of the trainer's batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.spec import StagePart
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.boundaries import Boundaries
from dlrm_hybrid.parallel.dense.client import Client
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.schedule import Pipeline
from dlrm_hybrid.parallel.stage import Inputs, Stage, predict_stage
from dlrm_hybrid.parallel.step import look_up
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.types import BatchNumber, DataError, Group
from dlrm_hybrid.wire.frame import EVALUATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The parts of one worker.

    Attributes:
        rank: rank of the worker.
        stage: computes, and keeps what is in flight.
        pipeline: the ops of this stage and its neighbours in every tick.
        boundaries: boundaries to the neighbouring stages.
        tables: access to the tables; None at a stage without the interaction.
        columns: which columns share a table.
        embedding_schedule: learning rate of the tables.
        client: pulls the weights of the stage and pushes their gradients.
    """

    rank: int
    stage: Stage
    pipeline: Pipeline
    boundaries: Boundaries
    tables: Tables | None
    columns: ColumnBags
    embedding_schedule: LrSchedule
    client: Client

    @property
    def name(self) -> str:
        """Name in messages: `worker-0.1 (rank 1)`."""
        return str(self.boundaries.port)

    @property
    def part(self) -> StagePart:
        """The layers of the model that the worker computes."""
        return self.stage.model.part


def stage_inputs(worker: Worker, batch: Batch, coming: Sequence[Batch] = ()) -> Inputs:
    """The parts of a batch, and of the next ones, that a worker's stage reads."""
    part, weight_B = worker.part, batch.weight_B
    return Inputs(
        rows=len(batch.label_B),
        dense_BI=torch.from_numpy(batch.dense_BI) if part.is_first else None,
        bags=tensor_bags(batch.bags) if part.has_interaction else None,
        label_B=torch.from_numpy(batch.label_B) if part.is_last else None,
        weight_B=torch.from_numpy(weight_B) if part.is_last and weight_B is not None else None,
        coming=[tensor_bags(later.bags) for later in coming if part.has_interaction],
    )


def flight(worker: Worker, ticks: int, emptied: int = 0) -> Program[list[Piece]]:
    """Views of the batches in flight that a checkpoint must hold; none if none outlives a tick.

    Args:
        worker: between two ticks.
        ticks: number done.
        emptied: number done when the pipeline was last empty.

    Raises:
        DlrmError: a batch is in the middle of its backward.
    """
    if not worker.pipeline.most_in_flight:
        return []
    underway = partial(worker.pipeline.underway, ticks=ticks, emptied=emptied)
    yield from worker.boundaries.receive_ahead(underway, worker.stage.rows)
    parts = {"boundaries": worker.boundaries.state_dict(), "stage": worker.stage.state_dict()}
    named = {
        f"{_head(worker)}{part}.{name}": tensor
        for part, state in parts.items()
        for name, tensor in state.items()
    }
    return full_pieces(named, Group.FLIGHT)


def load_flight(
    worker: Worker, ticks: int, emptied: int, values: Mapping[str, Tensor]
) -> Program[None]:
    """Resume from `flight`, with the tables as they were then; `values` may hold other tensors too.

    Raises:
        DataError: `values` do not hold the batches in flight.
    """
    head = _head(worker)

    def state(part: str) -> dict[str, Tensor]:
        own = f"{head}{part}."
        return {name.removeprefix(own): values[name] for name in values if name.startswith(own)}

    pushed = worker.pipeline.pushed(worker.part.index, ticks, emptied)
    try:
        worker.boundaries.load_state_dict(state("boundaries"))
        worker.stage.load_state_dict(state("stage"))
        if worker.tables is not None:
            for batch in worker.stage.looked_up():
                # The lookup prepares the update; the rows that it found before are in the state.
                yield from look_up(worker, worker.tables, batch)
    except (IndexError, KeyError, ValueError) as error:
        raise DataError(f"{head}*: holds no batches in flight: {error!r}") from error
    if missing := [n for n in range(pushed, ticks) if BatchNumber(n) not in worker.stage]:
        raise DataError(f"{head}*: batch {missing[0]} is in flight, and not there")


def _head(worker: Worker) -> str:
    """The begin of the names of what a worker has in flight."""
    return f"flight.{worker.rank}."


def predict_batch(worker: Worker, number: int, inputs: Inputs) -> Program[Tensor | None]:
    """Compute logits of one batch at the last stage, None at others; nothing is updated.

    They are (B,), or (B, labels) of several labels.

    A stage returns once the next one has its activations: it is at most one batch ahead.

    Args:
        worker: its weights are used as they are.
        number: number of the batch; unique in an evaluation.
        inputs: any number of rows; labels are not read.
    """
    batch, boundaries = BatchNumber(number), worker.boundaries
    pooled_BFD = None
    if worker.tables is not None:
        assert inputs.bags is not None
        pooled = yield from worker.tables.predict(worker.columns.by_table(inputs.bags))
        pooled_BFD = worker.columns.by_column(pooled)
    received_BN = yield from boundaries.receive_activations(batch, EVALUATION, inputs.rows)
    boundaries.confirm(batch)
    left = predict_stage(worker.stage, inputs, received_BN, pooled_BFD)
    if worker.part.is_last:
        return left
    boundaries.send_activations(left, batch, EVALUATION)
    yield from boundaries.receive_confirmation(batch)
    return None
