"""The backend of a world whose ranks are objects of the program's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.placement import matrix_products
from dlrm_hybrid.model.tensors import whole
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.rank.facts import Source
from dlrm_hybrid.run.rank.training import resume
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.world.backend import Backend, Counts, OwnOrder, job_of, save, weights
from dlrm_hybrid.world.settings import Settings

_MODES = threading.RLock()  # some are global to all threads


@final
class InProcess(Backend):
    """All ranks of a world in one process; see `World.in_process`.

    Args:
        settings: settings of the world.
        folder: folder for checkpoints.
        resume_from: run folder or checkpoint to resume from, or None.
    """

    def __init__(self, settings: Settings, folder: Path, resume_from: Path | None) -> None:
        config = settings.config
        self._config = config
        task = TrainTask(run_folder=str(folder), resume_from=resume_from and str(resume_from))
        self._job = job = job_of(settings, task, ignore, StopRequest())
        build_model.keep_freed_memory()
        with _as_in_a_rank(self._config):
            self._engine = engine = build_engine.engine_of(job.layout, None, job.storage)
            self._meter = RankMeter(engine.count, job.clock, uncounted=engine.uncounted)
            progress = resume(job, engine, Source.of(job))
        self._meter.begin(progress.step)
        self._predicted = count()

    @property
    @override
    def steps(self) -> int:
        return self._engine.step

    @override
    def learn(self, batches: Sequence[Batch], meanwhile: Callable[[], None]) -> StepMetrics:
        with _as_in_a_rank(self._config):
            metrics = self._engine.learn(batches)
        self._meter.step_done()
        return metrics

    @override
    def drain(self) -> StepMetrics:
        with _as_in_a_rank(self._config):
            return self._engine.drain() or StepMetrics()

    @override
    def begin_evaluation(self) -> None:
        with _as_in_a_rank(self._config):
            self._engine.take_masters()

    @override
    def predict(self, batches: Sequence[Batch]) -> list[Float32s]:
        with _as_in_a_rank(self._config), self._meter.within(Phase.EVALUATE):
            return [self._engine.predict(next(self._predicted), batch).numpy() for batch in batches]

    @override
    def save(self) -> Path:
        with _as_in_a_rank(self._config):
            return save(self._job, self._engine, self._meter)

    @override
    def tensors(self) -> dict[str, Tensor]:
        with _as_in_a_rank(self._config):
            return whole(weights(self._engine))

    @override
    def ask(self, order: OwnOrder, values: Mapping[str, Any]) -> list[Any]:
        with _as_in_a_rank(self._config):
            return [order(worker, **values) for worker in self._engine.ranks.workers]

    @override
    def counts(self) -> Counts:
        return self._meter.steps_counts()

    @override
    def close(self) -> None:
        pass


@contextmanager
def _as_in_a_rank(config: Config) -> Generator[None, None, None]:
    """Compute as ranks do, in any mode of torch that the program has set: results depend on it.

    Products round by the number of threads; without gradients nothing is trained; autocast, TF32
    and default types change numbers.
    """
    with _MODES:
        before = torch.get_num_threads(), torch.get_default_dtype()
        # A device mode would cost each call of torch something.
        is_elsewhere = torch.get_default_device().type != "cpu"
        is_mixed = torch.is_autocast_enabled("cuda")
        torch.set_num_threads(config.threads)
        torch.set_default_dtype(torch.float32)
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False) if is_mixed else nullcontext(),
                torch.device("cpu") if is_elsewhere else nullcontext(),
                matrix_products(config.device, tf32=config.tf32),
            ):
                yield
        finally:
            torch.set_num_threads(before[0])
            torch.set_default_dtype(before[1])
