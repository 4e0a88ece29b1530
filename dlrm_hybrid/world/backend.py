"""The backend of a world, whether its ranks are objects of this process or processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.checkpoint.folder import read
from dlrm_hybrid.config.model import spec_of
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.tensors import Piece, in_groups
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.run.folder import begun_anew, check_weights
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.training import checkpoint_writer
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.train.progress import Plan, Progress
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import DataError, Group
from dlrm_hybrid.world.settings import Settings

OwnOrder = Callable[..., Any]
"""A function of a module: takes a worker and values, and returns what JSON can hold."""
Counts = Mapping[str, Mapping[str, int]]
"""Messages, bytes and dense_equivalent_bytes sent, by traffic class."""


@final
@dataclass(frozen=True, slots=True)
class StepResult:
    """Training metrics of one step, or of several.

    Attributes:
        step: training steps done so far.
        rows: number that passed all stages, of all trainers; 0 while a stale pipeline fills.
        loss: mean log-loss of these rows, in nats; None without rows. Of several labels the
            weighted sum.
        accuracy: fraction of these rows whose (first) label equals p > 0.5; None without rows.
    """

    step: int
    rows: int
    loss: float | None
    accuracy: float | None


class Backend(Protocol):
    """The ranks of a world, which make steps together on request."""

    @property
    def steps(self) -> int:
        """Number of steps since the beginning of the run, including those before a checkpoint."""
        ...

    def learn(self, batches: Sequence[Batch], meanwhile: Callable[[], None]) -> StepMetrics:
        """Train on one batch per trainer.

        Args:
            batches: one for each trainer.
            meanwhile: called while other processes compute, if there are any.
        """
        ...

    def drain(self) -> StepMetrics:
        """Finish the batches in flight."""
        ...

    def begin_evaluation(self) -> None:
        """Take the present master weights for predictions."""
        ...

    def predict(self, batches: Sequence[Batch]) -> list[Float32s]:
        """Compute logits of batches of any number of rows, at most one for each trainer."""
        ...

    def save(self) -> Path:
        """Write a checkpoint into the world's folder; returns its folder once complete."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Copy all weights and optimizer state, by name."""
        ...

    def ask(self, order: OwnOrder, values: Mapping[str, Any]) -> list[Any]:
        """Have each worker carry out an order of the program's own; returns answers by rank."""
        ...

    def counts(self) -> Counts:
        """Traffic of training steps, between all ranks."""
        ...

    def close(self) -> None:
        """End all ranks; has no effect a second time."""
        ...


def job_of(settings: Settings, task: TrainTask, report: Report, stop: StopRequest) -> Job:
    """Make the job of a process of a world, as of a run."""
    config = settings.config
    rows = config.parallel.trainers * config.train.batch_size
    plan = Plan(steps=settings.steps, samples_per_step=rows)
    spec = spec_of(config.model, settings.spec)
    return Job.of(task, settings.values, config, plan, spec, None, report, stop)


def check_weights_of(folder: Path, settings: Settings) -> None:
    """Refuse a checkpoint of another model, or of other settings that decide the weights.

    Warns of state of it that is dropped.

    Raises:
        DataError: names each key or table that differs.
    """
    facts = check_weights(folder, settings.values, new_run=True)
    tensors = read(folder).tensors
    for name, rows in zip(settings.spec.table_names, settings.spec.table_rows, strict=True):
        table = tensors.get(f"{name}.weight")
        if table is None or table.shape[0] != rows:
            has = "is not in this checkpoint" if table is None else f"has {table.shape[0]:,} rows"
            raise DataError(f"{folder}: {name} {has}, the model's {rows:,}")
    for name, shape in settings.spec.dense_shapes().items():
        tensor = tensors.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            has = f"has the shape {[*tensor.shape]}, the model's {[*shape]}"
            raise DataError(f"{folder}: {name} {has}")
    if line := begun_anew(folder, facts, settings.values):
        warnings.warn(line, stacklevel=3)


def save(job: Job, engine: InProcessEngine | WorkerRank, meter: RankMeter) -> Path:
    """Write a checkpoint with the shards of the other ranks; returns its folder.

    The program keeps the position of its loaders.
    """
    writer, step = checkpoint_writer(job, engine), engine.step
    samples = step * job.plan.samples_per_step
    with meter.within(Phase.CHECKPOINT):
        writer.save(Progress(step=step, samples=samples, emptied=engine.emptied))
        checkpoint = writer.finish()
    assert checkpoint is not None, "it has been begun"
    return checkpoint.folder


def weights(engine: InProcessEngine | WorkerRank) -> list[Piece]:
    """The pieces of weights and optimizer state that a process holds."""
    return in_groups(engine.pieces(), Group.DENSE, Group.EMBEDDINGS)


def added(several: Iterable[Counts]) -> dict[str, dict[str, int]]:
    """Add up several counts."""
    sums: dict[str, dict[str, int]] = {}
    for counts in several:
        for traffic, tally in counts.items():
            total = sums.setdefault(traffic, {})
            for name, count in tally.items():
                total[name] = total.get(name, 0) + count
    return sums
