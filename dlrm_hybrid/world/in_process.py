"""The engine of a world whose ranks are objects of the program's process."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.data.loader import START, Batch
from dlrm_hybrid.model.tensors import whole
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.process import interrupts_wait
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.rank.training import checkpoint_writer, resume
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.saver import piece_groups
from dlrm_hybrid.types import DataError
from dlrm_hybrid.world.body import (
    WEIGHTS,
    Body,
    Counts,
    Floats,
    job_of,
    progress_of,
    rows_of,
)
from dlrm_hybrid.world.rows.batches import Loader
from dlrm_hybrid.world.rows.feed import Feed
from dlrm_hybrid.world.settings import Settings

_MODES = threading.RLock()  # some are global to all threads


@final
class InProcess(Body):
    """All ranks of a world in one process; see `World.in_process`.

    Args:
        settings: those of the world.
        loader: makes iterables of batches, or None.
        folder: folder for checkpoints.
        resume_from: run folder or checkpoint to resume from, or None.
    """

    def __init__(
        self, settings: Settings, loader: Loader | None, folder: Path, resume_from: Path | None
    ) -> None:
        config, trainers = settings.config, settings.config.parallel.trainers
        self._threads = config.threads
        self._feeds = [
            Feed(settings.columns, trainer, trainers, loader) for trainer in range(trainers)
        ]
        task = TrainTask(
            run_folder=str(folder),
            prepared="",
            resume_from=None if resume_from is None else str(resume_from),
            rank=0,
            attempt=0,
            rendezvous="",
        )
        rows = rows_of(settings.spec, dict(enumerate(self._feeds)))
        self._job = job = job_of(settings, task, rows)
        build_model.keep_freed_memory()
        with _as_in_a_rank(self._threads):
            self._engine = engine = build_engine.engine_of(
                config, rows, settings.steps, job.storage, job.clock
            )
            self._meter = RankMeter(engine.count, job.clock, uncounted=engine.uncounted)
            progress = resume(job, engine, ignore)
        self._meter.begin(progress.step)
        self._predicted = count()

    @property
    @override
    def steps(self) -> int:
        return self._engine.step

    @override
    def fill(self) -> bool:
        faults, filled = list[DataError](), True
        with interrupts_wait():  # Ctrl-C would end a loader that is a generator
            for feed in self._feeds:
                try:
                    filled &= feed.fill()
                except DataError as fault:
                    faults.append(fault)
            if len(faults) > 1:
                raise DataError("\n".join(map(str, faults))) from faults[0]
            if faults:
                raise faults[0]
        return filled

    @override
    def end_epoch(self) -> list[int]:
        return [feed.trainer for feed in self._feeds if feed.end_epoch()]

    @override
    def learn(self, batches: Sequence[Batch] | None) -> StepMetrics:
        for feed, batch in zip(self._feeds, batches or (), strict=False):
            feed.put(batch)
        with _as_in_a_rank(self._threads):
            metrics, _ = self._engine.make_step(self._engine.step, START)
        self._meter.step_done()
        return metrics

    @override
    def drain(self) -> StepMetrics:
        with _as_in_a_rank(self._threads):
            return self._engine.drain(self._engine.step) or StepMetrics()

    @override
    def begin_evaluation(self) -> None:
        with _as_in_a_rank(self._threads):
            self._engine.take_masters()

    @override
    def predict(self, batches: Sequence[Batch]) -> list[Floats]:
        with _as_in_a_rank(self._threads), self._meter.within(Phase.EVALUATE):
            return [self._engine.predict(next(self._predicted), batch).numpy() for batch in batches]

    @override
    def save(self) -> Path:
        engine = self._engine
        writer = checkpoint_writer(self._job, engine)
        with _as_in_a_rank(self._threads), self._meter.within(Phase.CHECKPOINT):
            writer.save(progress_of(self._job, engine.step, engine.emptied))
            saved = writer.finish()
        assert saved is not None
        return saved.folder

    @override
    def tensors(self) -> dict[str, Tensor]:
        with _as_in_a_rank(self._threads):
            groups = piece_groups(self._engine.pieces())
            return whole(piece for group in WEIGHTS for piece in groups[group])

    @override
    def counts(self) -> Counts:
        return self._meter.steps_counts()

    @override
    def close(self) -> None:
        self._feeds.clear()


@contextmanager
def _as_in_a_rank(threads: int) -> Generator[None, None, None]:
    """Compute as ranks do, in any mode of torch that the program has set: results depend on it.

    Products round by the number of threads; without gradients nothing is trained; autocast and
    default types change numbers.
    """
    with _MODES:
        before = torch.get_num_threads(), torch.get_default_dtype()
        # A device mode would cost each call of torch something.
        is_elsewhere = torch.get_default_device().type != "cpu"
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                torch.device("cpu") if is_elsewhere else nullcontext(),
            ):
                yield
        finally:
            torch.set_num_threads(before[0])
            torch.set_default_dtype(before[1])
